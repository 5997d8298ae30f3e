"""What one rank computes: the models, their caches, and the forwards of a step."""
from copy import copy

import torch

from minispec.batch import Assembler
from minispec.cache import Cache
from minispec.device import available, plan, size, weight_bytes
from minispec.draft import Draft, kv_shape
from minispec.graphs import Graphs
from minispec.hidden import HiddenBuffer
from minispec.pages import Pages
from minispec.speculate import Shape, Speculator
from minispec.target import Target
from minispec.weights import load
from minispec.weights.draft import load_draft
from minispec.weights.packed import keep_packed


class Runner:
    """target: a checkpoint's folder, config its TargetConfig; found: the opened draft (weights.draft.DraftPlan) or None for plain decoding.

    The rest as Engine's. `pages` says how much the caches hold; who takes which is the scheduler's.
    """

    def __init__(self, target, config, found, shape, device, dtype, *, capture, max_batch, max_length, chunk, page_size, exact, cuda_graphs,
                 progress):
        """Ask what fits, allocate, fill from the files, capture."""
        self.target_config, self.shape, self.device, self.exact, self.capture = config, shape, device, exact, capture
        self.max_batch, self.chunk, account = max_batch, chunk, load.open_target(target, config)
        account = keep_packed(account) if device.type == "cuda" else account
        draft = {f"draft.{name}": size for name, size in found.shapes.items()} if found else {}
        weights = weight_bytes(account.shapes | draft, dtype, account.dtypes)
        rotary = 8 * config.max_position_embeddings * (config.rope.dim + (found.config.rope.dim if found else 0))
        hidden = max_batch * (shape.nodes + 1) * len(capture) * config.hidden_size * dtype.itemsize
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        kv_heads, width = kv_shape(found.config) if found else (0, 0)
        token = (config.num_hidden_layers * latent + kv_heads * width) * dtype.itemsize
        self.max_length, tokens, reason = plan(available(device) - rotary - hidden, weights, token, max_batch, max_length,
                                               config.max_position_embeddings, shape.scratch + page_size)
        reach = self.max_length + shape.scratch
        self.target = Target(config, account.shapes, dtype, device, reach, account.dtypes)
        self.report = load.fill(account, self.target.parameters, progress).lines
        self.draft, draft_cache = None, None
        self.pages = Pages(1 + -(-tokens // page_size), page_size)
        slots = self.pages.count * page_size
        if found:
            self.draft = Draft(found.config, found.shapes, found.d2t, self.target.embed, self.target.head, dtype, device, reach)
            self.report += load_draft(found, self.draft.parameters, progress).lines
            draft_cache = Cache(1, slots, kv_heads, width, dtype, device)[0]
            if found.config.max_position_embeddings < self.max_length:
                self.report.append(f"warning: the draft was trained to {found.config.max_position_embeddings} positions, max_length is "
                                   f"{self.max_length}: expect fewer accepted tokens past that")
        self.hidden = HiddenBuffer(max_batch, shape.nodes + 1, capture if found else (), config.hidden_size, dtype, device)
        target_cache = Cache(config.num_hidden_layers, slots, 1, latent, dtype, device)
        self.speculator = Speculator(self.target, target_cache, self.draft if shape.steps else None, draft_cache, self.hidden, shape)
        self.assemble = Assembler(page_size, self.max_length, config.vocab_size, device, exact)
        self.report.append(f"max_length {self.max_length} ({reason}); caches hold {slots - page_size} tokens, {token} bytes each, "
                           f"{size(slots * token)}; weights {size(weights)}")
        self.graphs = Graphs(self) if cuda_graphs and device.type == "cuda" else None
        if self.graphs:
            self.graphs.warm(progress)

    def plain(self):
        """A runner that shares this one's target and caches and drafts nothing."""
        runner = copy(self)
        runner.shape, runner.draft = Shape(0), None
        runner.speculator = Speculator(self.target, self.speculator.target_cache, None, None, self.hidden, runner.shape)
        runner.assemble, runner.graphs = copy(self.assemble), self.graphs and Graphs(runner)
        return runner

    def prefill(self, request, start, stop):
        """A chunk of one prompt: what `round` returns when it was the last one, else two empty lists."""
        more = request.prompt_ids[stop] if stop < len(request.prompt_ids) else None
        path = self.speculator.prefill(self.assemble([request]), self.assemble.tensor([request.prompt_ids[start:stop]]), more)
        request.length, request.draft_length = stop, stop - (more is None)
        return path.read() if path else ([], [])

    def round(self, requests):
        """One round: [count, tokens ...] of each request, and its log-probabilities or None."""
        if self.graphs and all(map(self.graphs.fits, requests)):
            found = self.graphs(requests), [None] * len(requests)
        else:
            found = self.speculator.round(self.assemble(requests)).read()
        for request in requests:
            request.draft_length = request.length
        return found

    @torch.inference_mode()
    def score(self, ids, pages):
        """Logits fp32 [n, vocab] and captured states [n, A * hidden] after every token, computed in `pages`, which hold them."""
        parts = []
        for at in range(0, len(ids), self.chunk):
            batch = self.assemble.batch(self.assemble.tensor([pages]), [at], [0], [0], [0], None)
            hidden, states = self.speculator.forward(batch, self.assemble.tensor([ids[at:at + self.chunk]]), self.capture)
            parts.append((self.target.logits(hidden[0]), states[0]))
        return [torch.cat(part) for part in zip(*parts)]

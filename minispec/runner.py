"""What one rank computes: the models, their caches, and the forwards of a step."""
from copy import copy
from functools import partial
from time import perf_counter
from weakref import WeakSet
from zlib import crc32

import torch

from minispec.adapt import Adaptive
from minispec.batch import Assembler
from minispec.cache import Cache
from minispec.device import available, plan, size, weight_bytes, workspace
from minispec.draft import Draft, kv_shape
from minispec.graphs import READ, Flight, Graphs
from minispec.hidden import HiddenBuffer
from minispec.pages import Pages
from minispec.ranks import CHECK
from minispec.speculate import WORD, Speculator
from minispec.target import Target
from minispec.weights import load
from minispec.weights.draft import load_draft
from minispec.weights.packed import keep_packed
from minispec.weights.shard import shard_pair


class Runner:
    """target: a checkpoint's folder, config its TargetConfig; found: the opened draft (weights.draft.DraftPlan) or None for plain decoding.

    The rest as Engine's. `pages` says how much the caches hold; who takes which is the scheduler's.
    """

    def __init__(self, target, config, found, shape, device, dtype, ranks, *, capture, max_batch, max_length, chunk, page_size, exact,
                 cuda_graphs, progress):
        """Compare options, ask what fits, allocate, fill from the files, compare again, capture."""
        self.target_config, self.shape, self.device, self.exact, self.capture = config, shape, device, exact, capture
        self.max_batch, self.chunk, self.ranks, self.rounds, self.decided = max_batch, chunk, ranks, 0, 0
        options = shape, dtype, device.type, capture, max_batch, max_length, chunk, page_size, exact, cuda_graphs
        ranks.check("before loading", {"target config": repr(config), "draft config": repr(found and found.config), "options": repr(options)})
        account, found = shard_pair(load.open_target(target, config), config, found, ranks)
        account = keep_packed(account) if device.type == "cuda" else account
        draft = {f"draft.{name}": size for name, size in found.shapes.items()} if found else {}
        weights = -ranks.least(-weight_bytes(account.shapes | draft, dtype, account.dtypes))
        free = available(device) // (ranks.size if device.type == "cpu" else 1)
        free = ranks.least(free - workspace(config, found and found.config, shape, max_batch, len(capture), dtype))
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        kv_heads, width = kv_shape(found.config, ranks) if found else (0, 0)
        token = (config.num_hidden_layers * latent + kv_heads * width) * dtype.itemsize
        self.max_length, tokens, reason = plan(free, weights, token, max_batch, max_length, config.max_position_embeddings,
                                               shape.scratch + page_size)
        reach = self.max_length + WORD          # of any shape that `reshaped` may be asked for
        self.target = Target(config, account.shapes, dtype, device, reach, account.dtypes, ranks)
        self.report = load.fill(account, self.target.parameters, progress).lines
        self.draft, self.draft_cache = None, None
        self.pages = Pages(1 + -(-tokens // page_size), page_size)
        slots = self.pages.count * page_size
        if found:
            self.draft = Draft(found.config, found.shapes, found.d2t, self.target.embed, self.target.head, dtype, device, reach, ranks)
            self.report += load_draft(found, self.draft.parameters, progress).lines
            self.draft_cache = Cache(1, slots, kv_heads, width, dtype, device)[0]
            if found.config.max_position_embeddings < self.max_length:
                self.report.append(f"warning: the draft was trained to {found.config.max_position_embeddings} positions, max_length is "
                                   f"{self.max_length}: expect fewer accepted tokens past that")
        self.hidden = HiddenBuffer(max_batch, shape.unread, capture if found else (), config.hidden_size, dtype, device)
        target_cache = Cache(config.num_hidden_layers, slots, 1, latent, dtype, device)
        self.speculator = Speculator(self.target, target_cache, self.draft if shape.steps else None, self.draft_cache, self.hidden, shape)
        self.assemble = Assembler(page_size, self.max_length, config.vocab_size, device, exact)
        self.report.append(f"max_length {self.max_length} ({reason}); caches hold {slots - page_size} tokens, {token} bytes each, "
                           f"{size(slots * token)}; weights {size(weights)}")
        alike = {name: self.target.parameters[name] for name in sorted(account.replicated)}
        alike |= {f"the draft's {name}": self.draft.parameters[name] for name in sorted(found.replicated)} if found else {}
        ranks.check("after loading", alike | ({"d2t": self.draft.ids} if found and found.d2t is not None else {}))
        if ranks.size > 1:
            read = sum(plan.checkpoint.bytes_read for plan in (account, found) if plan)
            self.report.append(f"rank {ranks.rank} of {ranks.size} has read {size(read)}, experts {'whole' if ranks.expert_parallel else 'cut'}")
        self.adaptive = Adaptive(shape, device) if found and shape.adaptive else None
        self.graphs = Graphs(self) if cuda_graphs and device.type == "cuda" else None
        self.family = WeakSet()         # Graphs of runners that share the models
        if self.graphs:
            self.graphs.warm(progress)

    def reshaped(self, shape):
        """A runner that shares this one's models and caches and drafts a tree of another shape; plain decoding has no draft."""
        runner = copy(self)
        runner.shape, runner.draft = shape, self.draft if shape.steps else None
        runner.adaptive = Adaptive(shape, self.device) if shape.adaptive else None
        if shape.steps:
            states = self.hidden.states
            runner.hidden = HiddenBuffer(self.max_batch, shape.unread, self.capture, self.hidden.hidden, states.dtype, states.device)
        runner.speculator = Speculator(self.target, self.speculator.target_cache, runner.draft, self.draft_cache, runner.hidden, shape)
        runner.assemble, runner.graphs = copy(self.assemble), self.graphs and Graphs(runner)
        if runner.graphs:
            self.family.add(runner.graphs)
        return runner

    def release(self, whole):
        """-> None. Captured rounds go, with whole those of all who share the models: nccl ends a communicator only when no graph holds a call
        of it any more, and waits for that."""
        for graphs in filter(None, [self.graphs, *(self.family if whole else ())]):
            graphs.rounds.clear()
            graphs.flights.clear()
            graphs.places.clear()           # of a round that nobody reads any more they know, their requests do not

    def prefill(self, request, start, stop):
        """A chunk of one prompt: what `round` returns when it was the last one, else two empty lists."""
        more = request.prompt_ids[stop] if stop < len(request.prompt_ids) else None
        path = self.speculator.prefill(self.assemble([request]), self.assemble.tensor([request.prompt_ids[start:stop]]), more)
        request.length, request.draft_length = stop, stop - (more is None)
        if self.adaptive:
            self.adaptive.look()        # of the request before, while this one's prompt is read
        return path.read() if path else ([], [])

    def due(self, requests=()):
        """Of the requests whose turn it is those that the next round serves: who is left of a round that is under way, or all. A round of
        which nobody is left is waited for: nothing runs on."""
        left = [request for request in self.flights[0].requests if request.slot is not None] if self.flights else []
        while self.flights and not left:
            self.flights.pop().read()
        return left or requests

    @property
    def flights(self):
        return self.graphs.flights if self.graphs else []

    def plan(self, requests, ahead=False):
        """Yields what rank 0 decides of the rounds that this step starts, and tells the others: for each adapt.Adaptive.plan, or the fixed shape.

        The step's own, unless it is under way. ahead: and the next one, so that the GPU goes on while the host reads and plans: if it is
        captured and of the same requests, one of which cannot end before, and no costs are tried. Alone the first starts before the next is planned.

            host   start 1, start 2 | read 1, start 3 | read 2, start 4 | ...        GPU   round 1 | round 2 | round 3 | ...
        """
        captured, size = kind = self._kind(requests)
        one = partial(self.adaptive.plan, *kind, requests) if self.adaptive else lambda: [self.shape.steps]
        if self.flights:
            first, requested = self.flights[0].plan, self.flights[0].requests
        else:
            first, requested = one(), requests
            yield first
        left = max(request.room for request in requests) - first[0] - 1      # at least: the last few tokens want a tree of their own
        lasts = requested == requests and left > bool(self.adaptive and first[0])
        if ahead and captured and lasts and self.graphs.ahead and not (self.adaptive and self.adaptive.trying(*kind)):
            yield one()

    def _kind(self, requests):
        """What a round's cost depends on: whether it is captured, and for how many."""
        captured = bool(self.graphs) and all(map(self.graphs.fits, requests))
        return captured, self.graphs.size(len(requests)) if captured else len(requests)

    def round(self, requests, plans=None):
        """A round of requests that are due: [count, tokens ...] of each, and its log-probabilities or None. plans: rank 0's, by default own."""
        plans = self.plan(requests) if plans is None else plans
        captured, size = kind = self._kind(self.flights[0].requests if self.flights else requests)
        if captured:
            for plan in plans:
                self._start(requests, size, plan)
            if self.adaptive:
                self.adaptive.look()
            flight = self.flights.pop(0)
            (out, seconds), (steps, *_), parts = flight.read(), flight.plan, ()
            found = [one for request, one in zip(flight.requests, out) if request.slot is not None]
            logprobs, rows = [None] * len(found), sum(max(one[-1] - 1, 0) for one in out)         # past the context's end no root either
        else:
            flight, began = Flight(requests, *plans, self._waits(requests) >= self.shape.unread), perf_counter()
            budget = self.adaptive and self.adaptive.follow(size, flight.plan)
            if flight.caught:
                self.speculator.catch_up(self.assemble(requests))
            path = self.speculator.round(self.assemble(requests), budget)
            (found, logprobs), rows = path.read(), int(path.valid.sum()) - len(requests) if budget else 0
            inside, seconds = budget and budget.factors, perf_counter() - began
            steps, *parts = (budget.grown, self.speculator.drafting, budget.took) if inside else flight.plan[:1]
        if self.adaptive:
            emitted = [count for (count, *_), request in zip(found, requests) if request.room > steps]
            self.adaptive.saw(*kind, steps, rows, emitted, seconds, *parts)
        for request in requests:
            request.draft_length = request.length if steps else request.length - 1 if flight.caught else request.draft_length
        self._check(requests, (found, logprobs))
        return found, logprobs

    def _start(self, requests, size, plan):
        """Queue a captured round, and before it, where more waits than it lets the draft read, what does that."""
        steps, follows = plan[0], bool(self.flights)
        caught = self._waits(requests) >= (self.shape.nodes + 2 if steps else self.shape.unread)
        if self.adaptive:
            self.adaptive.follow(size, plan)
        if caught:
            self.graphs.of(requests, READ).start(requests, follows)
        read = self.graphs.of(requests, steps, len(plan) == 2).start(requests, follows or caught)
        self.flights.append(Flight(requests, plan, caught, read))

    def _waits(self, requests):
        """States that wait for the draft at most, of a request, once what is under way is done; of a fixed shape none, or those it reads next."""
        if not self.adaptive:
            return 0
        most = max(request.length - request.draft_length for request in requests)
        for flight in self.flights:
            most = min(flight.plan[0], self.shape.nodes) + 1 if flight.plan[0] else (1 if flight.caught else most) + 1
        return most

    def _check(self, requests, found):
        """Every CHECK rounds the ranks compare what all of them must hold alike: decisions, captured states, the newest latents in the cache."""
        if self.ranks.size == 1:
            return
        self.rounds, self.decided = self.rounds + 1, crc32(repr(found).encode(), self.decided)
        if self.rounds % CHECK == 0:
            cache, pages = self.speculator.target_cache.data, sum((r.pages[:self.pages.needed(r.length)][-CHECK:] for r in requests), [])
            self.ranks.check(f"round {self.rounds}", {
                "what was decided": str(self.decided), "captured states": self.hidden.states[:-1], "their tokens": self.hidden.next[:-1],
                "latents": cache.unflatten(1, (-1, self.pages.page_size))[:, pages]})

    @torch.inference_mode()
    def score(self, ids, pages):
        """Logits fp32 [n, vocab] and captured states [n, A * hidden] after every token, computed in `pages`, which hold them."""
        parts = []
        for at in range(0, len(ids), self.chunk):
            batch = self.assemble.batch(self.assemble.tensor([pages]), [at], [0], [0], [0], None)
            hidden, states = self.speculator.forward(batch, self.assemble.tensor([ids[at:at + self.chunk]]), self.capture)
            parts.append((self.target.logits(hidden[0]), states[0]))
        return [torch.cat(part) for part in zip(*parts)]

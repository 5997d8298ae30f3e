"""The public API: builds everything, runs the loop."""
from collections import deque
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch

from minispec.batch import Assembler
from minispec.cache import Cache
from minispec.config import TargetConfig, layer_inputs
from minispec.device import available, plan, resolve_device, resolve_dtype, size, weight_bytes
from minispec.draft import Draft, kv_shape
from minispec.errors import MinispecError
from minispec.graphs import Graphs
from minispec.hidden import HiddenBuffer
from minispec.pages import Pages
from minispec.params import SamplingParams
from minispec.request import Request
from minispec.scheduler import Scheduler
from minispec.speculate import Shape, Speculator
from minispec.target import Target
from minispec.text import Decoder
from minispec.tokenizer import Tokenizer, stop_ids
from minispec.weights import load
from minispec.weights.draft import load_draft, open_draft
from minispec.weights.packed import keep_packed


@dataclass(frozen=True)
class Score:
    """logits fp32 [n, vocab] and states [n, A * hidden] of the captured layers, for n token ids."""
    logits: torch.Tensor
    states: torch.Tensor


class Engine:
    """Speculative decoding of one target with one EAGLE-3 draft.

    target, draft: checkpoint folders; neither: the default pair; draft="none": plain decoding. device: "auto", "cpu", "cuda", "cuda:N".
    dtype: "auto" (float32 on CPU, bfloat16 on CUDA), "float32", "bfloat16", "float16". draft_steps: levels of the draft tree (0: plain);
    topk: children tried per node; nodes: draft tokens verified a round (default draft_steps). max_batch: requests at once;
    max_length: tokens of a request, prompt included (default: the target's context or what memory holds); chunk: prompt tokens a
    forward; capture, capture_convention, d2t, norm_* and fc_norm overrule what the draft's files say (weights/draft.py);
    latent_norm_eps: 1e-6 or "config". cuda_graphs: rounds on CUDA are captured and replayed; exact: there, a row's logits have the
    same bits in any company. progress(done, total, what): called as tensors are read and rounds captured. Bad input raises MinispecError.
    """

    def __init__(self, target=None, draft=None, *, device="auto", dtype="auto", draft_steps=6, topk=4, nodes=None, tensor_parallel=1,
                 max_batch=8, max_length=None, chunk=256, page_size=16, capture=None, capture_convention=None, d2t=None,
                 latent_norm_eps=1e-6, norm_before_residual=None, fc_norm=None, norm_before_fc=None, norm_output=None,
                 cuda_graphs=True, exact=False, progress=None):
        if tensor_parallel != 1:
            raise MinispecError(f"tensor_parallel={tensor_parallel!r}: this version runs on one device; leave it at 1")
        for name, value, most in (("max_batch", max_batch, 1024), ("chunk", chunk, 2**16), ("page_size", page_size, 2**12),
                                  ("max_length", 1 if max_length is None else max_length, 2**31)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise MinispecError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        for name, value in (("target", target), ("draft", draft)):
            if value == "" or not isinstance(value, (str, Path, type(None))):
                raise MinispecError(f"{name} is {value!r}; give the folder of a checkpoint")
        if draft is None and target is not None:
            raise MinispecError('a target without a draft: give draft=DIR, or draft="none" for plain decoding')
        flags = {"norm_before_residual": norm_before_residual, "fc_norm": fc_norm, "norm_before_fc": norm_before_fc,
                 "norm_output": norm_output}
        overrides = {name: value for name, value in flags.items() if value is not None}
        given = {"nodes": nodes or None, "capture_convention": capture_convention, "d2t": d2t, **overrides}
        if draft == "none" and (unread := [f"{name}={value!r}" for name, value in given.items() if value is not None]):
            raise MinispecError(f'{", ".join(unread)} is about a draft, and draft="none" leaves it out: drop one or the other')
        shape = Shape(draft_steps, topk, nodes)
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        if exact and self.device.type == "cpu":
            raise MinispecError("exact=True is about the kernels on CUDA; on the CPU give dtype float32 and leave it out")
        self.cuda_graphs, self.exact = cuda_graphs, exact
        target = Path(load.DEFAULT / "target" if target is None else target)
        config = self.target_config = TargetConfig.read(target, latent_norm_eps)
        self.tokenizer = Tokenizer.load(target, config.vocab_size)
        self.stops = stop_ids(target, config.vocab_size, self.tokenizer)
        if draft == "none":
            found, shape, self.capture = None, Shape(0, topk), layer_inputs(capture, config.num_hidden_layers)
        else:
            found = open_draft(Path(load.DEFAULT / "draft" if draft is None else draft), config, capture=capture,
                               capture_convention=capture_convention, d2t=d2t or "offset", latent_norm_eps=latent_norm_eps, overrides=overrides)
            self.capture = found.config.capture
            if shape.steps and topk > found.config.draft_vocab_size:
                raise MinispecError(f"topk={topk}: the draft proposes one of {found.config.draft_vocab_size} ids; give at most that")
        self.draft_config, self.shape, self.chunk, self.max_batch = found and found.config, shape, chunk, max_batch
        self.report = [f"device {self.device}, dtype {str(self.dtype).removeprefix('torch.')}",
                       f"tokenizer: {self.tokenizer.source}" if self.tokenizer else "no tokenizer files: prompts are ids, text is None",
                       *(f"stop id {token}: {', '.join(files)}" for token, files in self.stops.items())]
        self._load(target, found, max_length, page_size, progress)

    def _load(self, target, found, max_length, page_size, progress):
        """Ask what fits, allocate, fill from the files, capture."""
        config, shape, account = self.target_config, self.shape, load.open_target(target, self.target_config)
        account = keep_packed(account) if self.device.type == "cuda" else account
        draft = {f"draft.{name}": size for name, size in found.shapes.items()} if found else {}
        weights = weight_bytes(account.shapes | draft, self.dtype, account.dtypes)
        rotary = 8 * config.max_position_embeddings * (config.rope.dim + (found.config.rope.dim if found else 0))
        hidden = self.max_batch * (shape.nodes + 1) * len(self.capture) * config.hidden_size * self.dtype.itemsize
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        kv_heads, width = kv_shape(found.config) if found else (0, 0)
        token = (config.num_hidden_layers * latent + kv_heads * width) * self.dtype.itemsize
        self.max_length, tokens, reason = plan(available(self.device) - rotary - hidden, weights, token, self.max_batch, max_length,
                                               config.max_position_embeddings, shape.scratch + page_size)
        reach = self.max_length + shape.scratch
        self.target = Target(config, account.shapes, self.dtype, self.device, reach, account.dtypes)
        self.report += load.fill(account, self.target.parameters, progress).lines
        self.draft, draft_cache = None, None
        self.pages = Pages(1 + -(-tokens // page_size), page_size)
        slots = self.pages.count * page_size
        if found:
            self.draft = Draft(found.config, found.shapes, found.d2t, self.target.embed, self.target.head, self.dtype, self.device, reach)
            self.report += load_draft(found, self.draft.parameters, progress).lines
            draft_cache = Cache(1, slots, kv_heads, width, self.dtype, self.device)[0]
            if found.config.max_position_embeddings < self.max_length:
                self.report.append(f"warning: the draft was trained to {found.config.max_position_embeddings} positions, max_length is "
                                   f"{self.max_length}: expect fewer accepted tokens past that")
        self.hidden = HiddenBuffer(self.max_batch, shape.nodes + 1, self.capture if found else (), config.hidden_size, self.dtype, self.device)
        target_cache = Cache(config.num_hidden_layers, slots, 1, latent, self.dtype, self.device)
        self.speculator = Speculator(self.target, target_cache, self.draft if shape.steps else None, draft_cache, self.hidden, shape)
        self.scheduler = Scheduler(self.pages, self.max_batch, self.chunk, shape.scratch)
        self.assemble = Assembler(page_size, self.max_length, config.vocab_size, self.device, self.exact)
        self._inbox, self.closed = {}, False
        self.report.append(f"max_length {self.max_length} ({reason}); caches hold {slots - page_size} tokens, {token} bytes each, "
                           f"{size(slots * token)}; weights {size(weights)}")
        self.graphs = Graphs(self) if self.cuda_graphs and self.device.type == "cuda" else None
        if self.graphs:
            self.graphs.warm(progress)

    @property
    def draft_steps(self):
        return self.shape.steps

    def plain(self):
        """An engine that shares this one's target and caches and decodes without a draft: the other side of a comparison."""
        self._check_open()
        engine = copy(self)
        engine.shape, engine.draft = Shape(0), None
        engine.speculator = Speculator(self.target, self.speculator.target_cache, None, None, self.hidden, engine.shape)
        engine.scheduler = Scheduler(self.pages, self.max_batch, self.chunk, engine.shape.scratch)
        engine.assemble, engine._inbox, engine.graphs = copy(self.assemble), {}, self.graphs and Graphs(engine)
        return engine

    def generate(self, prompts, params=None):
        """Text, token ids, or a list of either -> Output, or a list of Outputs. params: one SamplingParams for all, or one each."""
        requests, single = self._requests(prompts, params)
        for _ in self._run(requests):
            pass
        outputs = [request.output() for request in requests]
        return outputs[0] if single else outputs

    def stream(self, prompts, params=None):
        """The same, as an iterator of Events while they come: one a request and round, the prefill's first token being the first."""
        return self._run(self._requests(prompts, params)[0])

    @torch.inference_mode()
    def score(self, ids):
        """Logits and captured states after every token of a prompt (ids or text), in one pass without speculation."""
        self._check_open()
        ids = self._ids(0, ids)
        if len(ids) > self.max_length:
            raise MinispecError(f"score: {len(ids)} ids do not fit max_length={self.max_length}")
        count = self.pages.needed(len(ids))
        if count > self.pages.free:
            raise MinispecError(f"score: {len(ids)} ids need {count} pages, {self.pages.free} are free while other requests run")
        pages, parts = self.pages.take(count), []
        try:
            for at in range(0, len(ids), self.chunk):
                batch = self.assemble.batch(self.assemble.tensor([pages]), [at], [0], [0], [0], None)
                hidden, states = self.speculator.forward(batch, self.assemble.tensor([ids[at:at + self.chunk]]), self.capture)
                parts.append((self.target.logits(hidden[0]), states[0]))
        finally:
            self.pages.give(pages)
        return Score(*(torch.cat(part) for part in zip(*parts)))

    def close(self):
        """Frees weights and caches. A closed engine refuses to work."""
        self.closed = True
        self.target = self.draft = self.hidden = self.speculator = self.graphs = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _check_open(self):
        if self.closed:
            raise MinispecError("this engine is closed; make a new one")

    def _requests(self, prompts, params):
        """Everything is checked before the first forward: a bad prompt in a list leaves nothing half-done."""
        self._check_open()
        single = not isinstance(prompts, (list, tuple)) or (len(prompts) > 0 and all(isinstance(p, Integral) for p in prompts))
        prompts = [prompts] if single else list(prompts)
        params = SamplingParams() if params is None else params
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise MinispecError(f"{len(params)} SamplingParams for {len(prompts)} prompts; give one for all, or one each")
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, params)):
            if not isinstance(one, SamplingParams):
                raise MinispecError(f"prompt {index}: parameters are {type(one).__name__}, not SamplingParams")
            one.check_vocab(self.target_config.vocab_size)
            decoder = Decoder(self.tokenizer, one.stop) if self.tokenizer else None
            requests.append(Request(index, self._ids(index, prompt), one, self.stops, self.max_length, decoder))
        return requests, single

    def _ids(self, index, prompt):
        if not isinstance(prompt, (str, list, tuple)):          # bytes, a dict or a set would pass for ids, in some order
            raise MinispecError(f"prompt {index} is {type(prompt).__name__}; give text or a list of token ids")
        if len(prompt) == 0:
            raise MinispecError(f"prompt {index} is empty; give at least one character or token")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise MinispecError(f"prompt {index} is text, but the target has no tokenizer files; give token ids")
            return self.tokenizer.encode(prompt)
        vocab = self.target_config.vocab_size
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab:
                raise MinispecError(f"prompt {index}: {repr(token)[:60]} is not a token id of this target (0 to {vocab - 1})")
        return [int(token) for token in prompt]

    def _run(self, requests):
        """Adds the requests and steps the engine until they end. Streams may be read in turns: a step serves whoever is running."""
        events = {id(request): deque() for request in requests}
        self._inbox |= events
        try:
            for request in requests:
                self.scheduler.add(request)
            while any(not request.finish_reason or events[id(request)] for request in requests):
                if not any(events.values()):
                    self._step()
                for request in requests:
                    while events[id(request)]:
                        event = events[id(request)].popleft()
                        if isinstance(event, MinispecError):
                            raise event
                        yield event
        finally:
            for request in requests:
                self.scheduler.finish(request)
                del self._inbox[id(request)]

    def _step(self):
        """One step of the scheduler: a chunk of one prompt, or a round for all running requests."""
        self._check_open()
        step = self.scheduler.next()
        if step is None:
            raise MinispecError("every cache page is held by requests of another stream of this pair; read that one first, or close it")
        kind, *what = step
        lost = what[0] if kind == "round" else what[:1]
        try:
            self._compute(kind, what)
            lost = []
        finally:        # also of Ctrl-C: what is half done can neither be kept nor repeated, so its requests end
            for request in lost:
                self._inbox[id(request)].append(MinispecError(f"prompt {request.index}: interrupted at position {request.length}; give it again"))
                self.scheduler.finish(request)

    def _compute(self, kind, what):
        """Runs a step and hands its events to the streams."""
        if kind == "prefill":
            request, start, stop = what
            more = request.prompt_ids[stop] if stop < len(request.prompt_ids) else None
            path = self.speculator.prefill(self.assemble([request]), self.assemble.tensor([request.prompt_ids[start:stop]]), more)
            request.length, request.draft_length = stop, stop - (more is None)
            done, emitted, logprobs = ([request], *path.read()) if path else ([], [], [])
        else:
            done = what[0]
            emitted, logprobs = self._round(done)
        for request, (count, *tokens), logs in zip(done, emitted, logprobs):
            # an error waits in the inbox too: the stream that ran this step may be another's, and its own requests go on
            event = request.take(tokens[:count], logs and logs[:count]) if count else MinispecError(
                f"prompt {request.index}: the target's logits are not finite at position {request.length}; "
                "its weights overflow in this dtype: try dtype float32")
            self._inbox[id(request)].append(event)
            if request.finish_reason or not count:
                self.scheduler.finish(request)

    def _round(self, requests):
        """One round: [count, tokens ...] of each request, and its log-probabilities or None."""
        if self.graphs and all(map(self.graphs.fits, requests)):
            found = self.graphs(requests), [None] * len(requests)
        else:
            found = self.speculator.round(self.assemble(requests)).read()
        for request in requests:
            request.draft_length = request.length
        return found

"""The public API: checks what it is given, schedules requests, hands out what they emit."""
import weakref
from collections import deque
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from operator import attrgetter
from pathlib import Path

import torch

from minispec.config import TargetConfig, layer_inputs
from minispec.device import resolve_device, resolve_dtype
from minispec.errors import MinispecError
from minispec.launch import environment, size_of, start
from minispec.mirror import serve
from minispec.params import SamplingParams
from minispec.ranks import Ranks
from minispec.request import Request
from minispec.runner import Runner
from minispec.scheduler import Scheduler
from minispec.speculate import Shape
from minispec.text import Decoder
from minispec.tokenizer import Tokenizer, stop_ids, token_ids
from minispec.weights.draft import open_draft
from minispec.weights.load import DEFAULT, open_target
from minispec.weights.shard import shard_pair


LOCAL = ("self", "progress", "team")        # arguments of Engine that do not travel to other ranks


@dataclass(frozen=True)
class Score:
    """logits fp32 [n, vocab] and states [n, A * hidden] of the captured layers, for n token ids."""
    logits: torch.Tensor
    states: torch.Tensor


class Engine:
    """Speculative decoding of one target with one EAGLE-3 draft.

    target, draft: checkpoint folders; neither: the default pair; draft="none": plain decoding. device: "auto", "cpu", "cuda", "cuda:N".
    dtype: "auto" (float32 on CPU, bfloat16 on CUDA), "float32", "bfloat16", "float16". draft_steps: levels of the draft tree (0: plain);
    topk: children tried per node; nodes: draft tokens verified a round, or "auto" (default): as many as pay on this machine,
    text and batch, none where the draft does not (adapt.py). max_batch: requests at once; max_length: tokens of a request, prompt included
    (default: the target's context or what memory holds); chunk: prompt tokens a forward (default 2048 on CUDA, 256 on CPU); capture,
    capture_convention, d2t, norm_* and fc_norm overrule what the draft's files say (weights/draft.py); latent_norm_eps: 1e-6 or "config".
    cuda_graphs: rounds on CUDA are captured and replayed; exact: there, a row's logits have the same bits in any company. tensor_parallel:
    ranks that share the model (launch.py starts them); expert_parallel: routed experts are dealt whole, not cut; shard_latent: q_a and kv_a
    are cut too, for one more gather a layer. patience: seconds without progress after which a run of several ranks is ended (watch.Team).
    progress(done, total, what): called as tensors are read and rounds captured. Bad input raises MinispecError.
    """

    def __init__(self, target=None, draft=None, *, device="auto", dtype="auto", draft_steps=6, topk=4, nodes=None, tensor_parallel=None,
                 expert_parallel=False, shard_latent=False, max_batch=8, max_length=None, chunk=None, page_size=16, capture=None,
                 capture_convention=None, d2t=None, latent_norm_eps=1e-6, norm_before_residual=None, fc_norm=None, norm_before_fc=None,
                 norm_output=None, cuda_graphs=True, exact=False, patience=20, progress=None, team=None):
        options, size, world = {name: value for name, value in locals().items() if name not in LOCAL}, size_of(tensor_parallel), environment()
        if world and world[0] and not team:
            serve(Engine)               # does not return
        for name, value, most in (("max_batch", max_batch, 1024), ("chunk", 1 if chunk is None else chunk, 2**16), ("page_size", page_size, 2**12),
                                  ("max_length", 1 if max_length is None else max_length, 2**31)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise MinispecError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 1 <= patience <= 86400:
            raise MinispecError(f"patience must be a number of seconds from 1 to 86400, not {patience!r}")
        if size == 1 and (expert_parallel or shard_latent):
            raise MinispecError(f"{'expert_parallel' if expert_parallel else 'shard_latent'}=True says how ranks share the model: give "
                                "tensor_parallel of at least 2, or leave it out")
        for name, value in (("target", target), ("draft", draft)):
            if value == "" or not isinstance(value, (str, Path, type(None))):
                raise MinispecError(f"{name} is {value!r}; give the folder of a checkpoint")
        if draft is None and target is not None:
            raise MinispecError('a target without a draft: give draft=DIR, or draft="none" for plain decoding')
        flags = {"norm_before_residual": norm_before_residual, "fc_norm": fc_norm, "norm_before_fc": norm_before_fc, "norm_output": norm_output}
        overrides = {name: value for name, value in flags.items() if value is not None}
        given = {"nodes": nodes or None, "capture_convention": capture_convention, "d2t": d2t, **overrides}
        if draft == "none" and (unread := [f"{name}={value!r}" for name, value in given.items() if value is not None]):
            raise MinispecError(f'{", ".join(unread)} is about a draft, and draft="none" leaves it out: drop one or the other')
        shape = Shape(draft_steps, topk, nodes)
        self.device = resolve_device(device)
        if size > 1 and self.device.type == "cuda":
            if self.device.index is not None:
                raise MinispecError(f"device {device!r} is one GPU, and {size} ranks need one each: give cuda")
            self.device = resolve_device(f"cuda:{team.local if team else world[2] if world else 0}")
        self.dtype, chunk = resolve_dtype(dtype, self.device), chunk or (2048 if self.device.type == "cuda" else 256)
        if exact and self.device.type == "cpu":
            raise MinispecError("exact=True is about the kernels on CUDA; on the CPU give dtype float32 and leave it out")
        target = Path(DEFAULT / "target" if target is None else target)

        def opened():
            config = TargetConfig.read(target, latent_norm_eps)
            return config, None if draft == "none" else open_draft(
                Path(DEFAULT / "draft" if draft is None else draft), config, capture=capture, capture_convention=capture_convention,
                d2t=d2t or "offset", latent_norm_eps=latent_norm_eps, overrides=overrides)

        split = {"expert_parallel": expert_parallel, "shard_latent": shard_latent}
        if size > 1 and not (team or world):        # before a rank is started: of 1024 the machine would never hear that 2 work
            config, found = opened()
            shard_pair(open_target(target, config), config, found, Ranks(0, size, **split))
        self._number, self.team = 0, team or start(size, patience, options)
        if self.team:
            progress = self.team.progress(progress)
            if not self.team.rank:
                weakref.finalize(self, self.team.close)         # also at the interpreter's end
        with self.team or nullcontext():
            if self.team:               # nobody comes to connect where a rank was refused above
                self.team.meet()
            self.ranks = Ranks.connect(self.team, self.device, **split)
            config, found = opened()
            self.target_config = config
            self.tokenizer = Tokenizer.load(target, config.vocab_size)
            self.stops = stop_ids(target, config.vocab_size, self.tokenizer)
            if draft == "none":
                shape, self.capture = Shape(0, topk), layer_inputs(capture, config.num_hidden_layers)
            else:
                self.capture = found.config.capture
                shape.check(found.config)
            self.draft_config, self.shape, self.max_batch = found and found.config, shape, max_batch
            self.runner = Runner(target, config, found, shape, self.device, self.dtype, self.ranks, capture=self.capture,
                                 max_batch=max_batch, max_length=max_length, chunk=chunk, page_size=page_size, exact=exact,
                                 cuda_graphs=cuda_graphs, progress=progress)
            self.report = [f"device {self.device}, dtype {str(self.dtype).removeprefix('torch.')}",
                           f"tokenizer: {self.tokenizer.source}" if self.tokenizer else "no tokenizer files: prompts are ids, text is None",
                           *(f"stop id {token}: {', '.join(files)}" for token, files in self.stops.items()), *self.runner.report]
            self.max_length, self.pages = self.runner.max_length, self.runner.pages
            self.scheduler = Scheduler(self.pages, max_batch, chunk, shape.scratch)
            self._inbox, self.closed = {}, False
            if self.team:
                self.team.meet()

    target, draft, hidden = (property(attrgetter(f"runner.{name}")) for name in ("target", "draft", "hidden"))

    @property
    def draft_steps(self):
        return self.shape.steps

    def plain(self):
        """An engine that shares this one's target and caches and decodes without a draft: the other side of a comparison."""
        return self.reshaped(0)

    def reshaped(self, draft_steps, topk=4, nodes=None):
        """An engine that shares this one's weights and caches and drafts another tree."""
        self._check_open()
        shape, engine = Shape(draft_steps, topk, nodes), copy(self)
        shape.check(self.draft and self.draft.config)
        engine._whole, engine._number = self, id(engine)        # the ranks end with the engine that has them
        with self._announce("reshaped", engine._number, draft_steps, topk, nodes):
            engine.shape, engine.runner = shape, self.runner.reshaped(shape)
        engine.scheduler, engine._inbox = Scheduler(self.pages, self.max_batch, self.runner.chunk, shape.scratch), {}
        return engine

    def generate(self, prompts, params=None):
        """Text, token ids, or a list of either -> Output, or a list of Outputs. params: one SamplingParams for all, or one each."""
        requests, single = self._requests(prompts, params)
        deque(self._run(requests), maxlen=0)
        return requests[0].output() if single else [request.output() for request in requests]

    def stream(self, prompts, params=None):
        """The same, as an iterator of Events while they come: one a request and round, the prefill's first token being the first."""
        return self._run(self._requests(prompts, params)[0])

    def score(self, ids):
        """Logits and captured states after every token of a prompt (ids or text), in one pass without speculation."""
        self._check_open()
        ids = token_ids(0, ids, self.tokenizer, self.target_config.vocab_size)
        if len(ids) > self.max_length:
            raise MinispecError(f"score: {len(ids)} ids do not fit max_length={self.max_length}")
        if (count := self.pages.needed(len(ids))) > self.pages.free:
            raise MinispecError(f"score: {len(ids)} ids need {count} pages, {self.pages.free} are free while other requests run")
        pages = self.pages.take(count)
        try:
            with self._announce("score", ids):
                return Score(*self.runner.score(ids, pages))
        finally:
            self.pages.give(pages)

    def close(self):
        """Frees weights and caches. A closed engine refuses to work."""
        self.closed, self.runner = True, self.runner and self.runner.release(whole=not self._number)
        if self.team and not self._number:
            self.team.close()
        torch.cuda.empty_cache()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _announce(self, action, *payload):
        """Rank 0 tells the others what it is about to do -> the context in which it does so. Alone nobody listens."""
        if self.team is None or self.team.rank or action == "finish" and self.team.over.is_set():
            return nullcontext()
        return self.team.tell(action, self._number, *payload)

    def _check_open(self):
        if self.team:
            self.team.check()
        if self.closed or self.team and self.team.over.is_set():        # a reshaped engine's ranks end with the engine that has them
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
            ids = token_ids(index, prompt, self.tokenizer, self.target_config.vocab_size)
            requests.append(Request(index, ids, one, self.stops, self.max_length, decoder))
        return requests, single

    def _run(self, requests):
        """Adds the requests and steps the engine until they end. Streams may be read in turns: a step serves whoever is running."""
        events = {id(request): deque() for request in requests}
        self._inbox |= events
        try:
            for request in requests:
                self.scheduler.add(request)
                with self._announce("add", id(request), request.index, request.prompt_ids, request.params):
                    pass
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
            with self._announce("finish", list(map(id, requests))):
                for request in requests:
                    self.scheduler.finish(request)
                    del self._inbox[id(request)]
            if self.runner:
                self.runner.due()

    def _step(self, plans=None):
        """One step of the scheduler: a chunk of one prompt, or a round for all running requests, as rank 0 planned it."""
        self._check_open()
        if (step := self.scheduler.next()) is None:
            raise MinispecError("every cache page is held by requests of another stream of this pair; read that one first, or close it")
        kind, *what = step
        lost = what[0] if kind == "round" else what[:1]
        try:
            self._compute(kind, what, plans)
            lost = []
        finally:        # also of Ctrl-C: what is half done can neither be kept nor repeated, so its requests end
            for request in lost:
                self._inbox[id(request)].append(MinispecError(f"prompt {request.index}: interrupted at position {request.length}; give it again"))
            with self._announce("finish", list(map(id, lost))) if lost else nullcontext():      # their streams may be read much later
                deque(map(self.scheduler.finish, lost), maxlen=0)

    def _compute(self, kind, what, plans):
        """Runs a step and hands its events to the streams. plans: rank 0's, on the others."""
        done = self.runner.due(what[0]) if kind == "round" else what[:1]
        if plans is None:
            plans = self.runner.plan(done, len(done) == len(what[0])) if kind == "round" else []
        with self._announce("step", plans := list(plans) if self.team else plans):
            emitted, logprobs = self.runner.round(done, plans) if kind == "round" else self.runner.prefill(*what)
        for request, (count, *tokens), logs in zip(done, emitted, logprobs):
            # an error waits in the inbox too: the stream that ran this step may be another's, and its own requests go on
            event = request.take(tokens[:count], logs and logs[:count]) if count else MinispecError(
                f"prompt {request.index}: the target's logits are not finite at position {request.length}; "
                "its weights overflow in this dtype: try dtype float32")
            self._inbox[id(request)].append(event)
            if request.finish_reason or not count:
                self.scheduler.finish(request)

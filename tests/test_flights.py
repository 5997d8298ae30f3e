"""Rounds that are queued ahead, among all that may come in between: streams that are read in turns, dropped and interrupted, broken logits,
scores, other engines of the same pair. Whatever happens, ids, reasons and (of a fixed shape) accepted counts are the eager engine's."""
import random
from collections import Counter
from contextlib import suppress
from functools import cache

import pytest
import torch

from minispec import Engine, MinispecError, SamplingParams, adapt, graphs
from minispec.draft import Pool
from minispec.speculate import Speculator

from . import spy
from .test_graphs import Event, record
from .tiny_draft import DIALECTS

SHAPES = {"tree": dict(draft_steps=3, topk=3, nodes=8), "auto": dict(draft_steps=4, topk=3, nodes="auto")}
OPTIONS = dict(max_batch=3, max_length=64, page_size=4, chunk=16)
PROMPTS = [[7, 301, 45], [12], list(range(100, 120)), [500, 4, 4, 88], list(range(200, 258))]
KINDS = [{}, {}, {}, dict(temperature=0.7), dict(temperature=0.7), dict(temperature=0.9, top_k=9, logprobs=True)]


def twice(run, device, pool):
    """As graphs.record: what is captured has run before."""
    run()
    return record(run, device, pool)


class World:
    """A replayed engine, the streams that are open on it and on a plain engine of its pair, and what an eager engine says of every prompt."""

    def __init__(self, engine, eager, shape, seed):
        self.engine, self.eager, self.shape, self.g = engine, eager, shape, random.Random(seed)
        self.engines, self.open, self.seen, self.accepted, self.rounds = [engine, engine.plain()], [], Counter(), 0, 0
        self.whole = cache(lambda prompt, kind: eager.generate(
            PROMPTS[prompt], SamplingParams(max_tokens=60, ignore_eos=True, seed=prompt, **KINDS[kind])))
        if shape == "auto":
            adaptive, self.left, self.now = engine.runner.adaptive, 0, None
            adaptive.plan, adaptive.trying, adaptive.saw = self.plan, lambda *kind: self.g.random() < 0.1, self.saw

    def plan(self, captured, size, requests):
        """Long runs of plain rounds, and trees of all that are captured."""
        if not self.left:
            self.now, self.left = self.g.choice([[0], [0], [1], [2], [4], [4]]), self.g.choice([1, 1, 2, 3, 9, 50])
        self.left -= 1
        if not self.now[0]:
            return [0]
        if captured and self.now == [4] and self.g.random() < 0.5:
            return [4, True]
        nodes, budget = self.g.randint(1, 6), self.engine.runner.adaptive.budget(size)
        price = [0.0] * (nodes + 1) + [adapt.NEVER] * (len(budget.price) - nodes - 1)
        return [*self.now, price, 0.0] if self.g.random() < 0.5 or not captured else self.now

    def saw(self, captured, size, depth, nodes, counts, *seconds):
        assert 0 <= nodes <= size * self.engine.shape.nodes and (depth or not nodes) and all(count <= depth + 1 for count in counts)

    def params(self):
        kind, prompt, most = self.g.randrange(len(KINDS)), self.g.randrange(len(PROMPTS)), self.g.choice([1, 2, 5, 17, 40, 60])
        whole, stop = self.whole(prompt, kind), ()
        ids, reason = whole.ids[:most], "length"
        if self.g.random() < 0.4:
            stop = self.g.choice(whole.ids),
            if stop[0] in ids:
                ids, reason = ids[:ids.index(stop[0]) + 1], "stop"
        params = SamplingParams(max_tokens=most, ignore_eos=True, seed=prompt, stop_ids=stop, **KINDS[kind])
        return params, PROMPTS[prompt], ids, reason, whole.accepted

    def begin(self):
        engine = self.g.choice(self.engines[:1] * 3 + self.engines[1:])
        asked = [self.params() for _ in range(self.g.choice([1, 1, 2, 3]))]
        stream = engine.stream([prompt for _, prompt, *_ in asked], [params for params, *_ in asked])
        self.open.append((engine, stream, asked, [[] for _ in asked]))

    def check(self, one, ended):
        engine, _, asked, events = one
        for (params, prompt, want, reason, accepted), found in zip(asked, events):
            ids, uncut = [token for event in found for token in event.ids], [event.accepted for event in found[1:] if not event.finish_reason]
            assert ids == want[:len(ids)], (params, prompt, ids, want)
            assert self.shape == "auto" or engine is not self.engine or uncut == accepted[:len(uncut)], (params, prompt, uncut, accepted)
            assert not ended or (ids, found[-1].finish_reason) == (want, reason), (params, prompt, ids, want)

    def read(self, events=None):
        """Some events of some stream: as `expected`, or what has been done to it."""
        if not self.open:
            return
        one = self.g.choice(self.open)
        engine, stream, _, found = one
        for _ in range(events or self.g.choice([1, 1, 2, 5, 20])):
            try:
                event = next(stream, None)
            except MinispecError as error:
                said, = [words for words in ("interrupted", "not finite", "every cache page") if words in str(error)]
                self.seen[said] += 1
                self.open.remove(one)
                return self.check(one, False)
            except KeyboardInterrupt:
                self.seen["Ctrl-C"] += 1
                self.open.remove(one)
                return self.check(one, False)
            if event is None:
                self.seen["whole"] += 1
                self.open.remove(one)
                return self.check(one, True)
            found[event.index].append(event)
            if event.accepted is not None and engine is self.engine:
                self.accepted, self.rounds = self.accepted + event.accepted, self.rounds + 1
        self.check(one, False)

    def drop(self):
        if self.open:
            one = self.open.pop(self.g.randrange(len(self.open)))
            if self.g.random() < 0.5:
                one[1].close()
            self.check(one, False)

    def interrupt(self):
        """Ctrl-C before or after a place that a step passes."""
        runner = type(self.engine.runner)
        place, name = self.g.choice([*((graphs.Round, name) for name in ("start", "__init__")), (graphs.Places, "seat"), (Speculator, "round"),
                                     *((runner, name) for name in ("round", "plan", "due", "_start", "prefill"))])
        real, after, left = getattr(place, name), self.g.random() < 0.5, [self.g.choice([1, 1, 2, 3])]

        def interrupted(*args, **kwargs):
            left[0] -= 1
            if not left[0] and not after:
                raise KeyboardInterrupt
            found = real(*args, **kwargs)
            if not left[0]:
                raise KeyboardInterrupt
            return found
        setattr(place, name, interrupted)
        try:
            self.read(5)
        finally:
            setattr(place, name, real)

    def broken(self):
        """The first token of some running request becomes NaN."""
        running = self.engine.scheduler.running
        if running:
            self.engine.runner.speculator.target_cache.data[:, self.g.choice(running).pages[0] * self.engine.pages.page_size] = float("nan")
            self.seen["broken"] += 1

    def score(self):
        ids = self.g.choice(PROMPTS)[:30]
        try:
            assert torch.allclose(self.engine.score(ids).logits, self.eager.score(ids).logits, atol=1e-4)
        except MinispecError:
            self.seen["no room"] += 1

    def other(self):
        """Another shape of the same pair comes, and goes half-way."""
        if len(self.engines) < 5:
            self.engines.append(self.engine.reshaped(self.g.choice([1, 2]), self.g.choice([1, 2])))
        else:
            self.engines.pop().close()
            for one in [one for one in self.open if one[0].closed]:
                self.open.remove(one)
                with suppress(MinispecError):       # closed, or of what came before
                    list(one[1])

    def states(self):
        """The draft's cache holds what one that reads the tokens so far holds."""
        running = [request for request in self.engine.scheduler.running if request.draft_length > 1 and request.ids]
        if not running or self.seen["broken"]:
            return
        request = self.g.choice(running)
        known = (request.prompt_ids + request.ids)[:request.draft_length + 1]
        found = spy.draft_kv(self.engine, request, request.draft_length)
        stream = self.eager.stream(known, SamplingParams(max_tokens=2, ignore_eos=True))
        next(stream)
        fresh, = self.eager.scheduler.running
        kept = spy.draft_kv(self.eager, fresh, request.draft_length)
        stream.close()
        assert torch.allclose(found, kept, atol=1e-4), (found - kept).abs().amax((1, 2))
        self.seen["states"] += 1

    def run(self, steps):
        deeds = {self.begin: 6, self.read: 18, self.drop: 2, self.interrupt: 2, self.broken: 0.3, self.score: 0.5, self.other: 0.5, self.states: 1.5}
        for _ in range(steps):
            deed, = self.g.choices(list(deeds), deeds.values())
            self.seen[deed.__name__] += 1
            deed()
            for engine in self.engines:         # a Ctrl-C may have come where it waits for a round of which nobody is left
                assert engine.scheduler.running or all(one.slot is None for flight in engine.runner.flights for one in flight.requests)
        while self.open:
            self.read(50)
        for engine in self.engines:
            assert not engine.scheduler.running
        assert self.engine.pages.free == self.engine.pages.total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_whatever_comes_between(shape, seed, checkpoints, monkeypatch):
    monkeypatch.setattr(graphs, "record", twice)
    monkeypatch.setattr(graphs, "Event", Event)
    monkeypatch.setattr(Pool, "settled", lambda *_: False)
    monkeypatch.setattr(adapt, "factors", lambda trust: trust[0, :0])      # nothing is decided on the host
    target = checkpoints.target()
    draft = checkpoints.fitted(target, **DIALECTS["torchspec"])
    with Engine(target, draft, **OPTIONS, **SHAPES[shape]) as eager, Engine(target, draft, **OPTIONS, **SHAPES[shape]) as engine:
        engine.runner.graphs = graphs.Graphs(engine.runner)
        world = World(engine, eager, shape, seed)
        world.run(100 if not seed else 400)
        assert 0 < world.accepted < world.rounds * engine.shape.steps and {"Ctrl-C", "whole", "states"} <= world.seen.keys(), world.seen

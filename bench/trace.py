"""Rounds looked into: what the draft and the target take, and which experts the verified rows want."""
from copy import copy, deepcopy
from statistics import mean
from time import perf_counter
from typing import NamedTuple

import torch

from minispec.graphs import Graphs


class Traced(NamedTuple):
    """A round: seconds of it in all, drafting, verifying (tree to choice); mean number of distinct experts a MoE layer, None without one;
    levels drafted."""
    total: float
    draft: float
    verify: float
    experts: float | None
    levels: int


class Trace:
    """While entered, the engine's rounds leave marks and the router's choices. Nothing of it is there while a clock runs for a result.

    On CUDA the marks are events inside of graphs captured anew; what the router chose then lies in the graph's memory after each replay.
    Not for several ranks on CUDA: the others would not take part in the capture.
    """

    def __init__(self, engine):
        self.engine, self.cuda, self.on, self.marks, self.chosen, self.levels = engine, engine.device.type == "cuda", False, {}, {}, []

    def __enter__(self):
        runner = self.engine.runner
        self.kept, speculator = (runner.speculator, runner.graphs), copy(runner.speculator)
        self.learnt = deepcopy(runner.adaptive.curves) if runner.adaptive else None         # rounds that are looked into take longer
        speculator.target = copy(speculator.target)
        speculator.target.trace = self.route
        if speculator.draft:
            speculator.draft = copy(speculator.draft)
            speculator.draft.children = self.level(speculator.draft.children)
            speculator.draft.grow = self.then("draft", speculator.draft.grow)
        speculator.choose = self.then("verify", speculator.choose)
        speculator.round = self.round(speculator.round)
        runner.speculator = speculator
        if runner.graphs:
            runner.graphs = Graphs(runner)
            runner.graphs.ahead = False
            runner.graphs.round = self.captured(runner.graphs.round, {})
        return self

    def __exit__(self, *error):
        self.engine.runner.speculator, self.engine.runner.graphs = self.kept
        if adaptive := self.engine.runner.adaptive:
            adaptive.curves, adaptive.unseen, adaptive.usual = self.learnt, None, None       # the next plan uploads prices of what was learnt

    def captured(self, run, known):
        """Marks and choices of the round that is replayed next, which is not the one captured last."""
        def round(*kind):
            found = run(*kind)
            self.marks, self.chosen, self.levels = known.setdefault(kind, (self.marks, self.chosen, self.levels))
            return found
        return round

    def mark(self, name):
        if self.on:
            self.marks[name] = torch.cuda.Event(enable_timing=True, external=True) if self.cuda else perf_counter()
            if self.cuda:
                self.marks[name].record()

    def level(self, run):
        def counted(*args):
            self.levels.append(1)
            return run(*args)
        return counted

    def then(self, name, run):
        def marked(*args, **kwargs):
            found = run(*args, **kwargs)
            self.mark(name)
            return found
        return marked

    def round(self, run):
        def marked(*args):
            self.on, self.marks, self.chosen, self.levels = True, {}, {}, []
            self.mark("began")
            try:
                return run(*args)
            finally:
                self.on = False         # the prompt of the next request passes through the same target
        return marked

    def route(self, layer, ids):
        if self.on:
            self.chosen.setdefault(id(layer), []).append(ids)

    def read(self, total):
        """The last round, which took `total` seconds."""
        times = list(self.marks.values())
        if self.cuda:
            torch.cuda.synchronize()
            spans = [first.elapsed_time(second) / 1e3 for first, second in zip(times, times[1:])]
        else:
            spans = [second - first for first, second in zip(times, times[1:])]
        none = self.engine.target_config.n_routed_experts          # what rows take that nobody verifies
        taken = [int((torch.cat(ids).unique() != none).sum()) for ids in self.chosen.values()]
        return Traced(total, sum(spans[:-1]), spans[-1], mean(taken) if taken else None, len(self.levels))

    def rounds(self, prompt, params):
        """Traced of each round of one prompt."""
        found, began = [], perf_counter()
        for event in self.engine.stream(prompt, params):
            total = perf_counter() - began
            if event.accepted is not None:
                found.append(self.read(total))
            began = perf_counter()
        return found

"""A round as one CUDA graph, captured once per batch size and depth, greedy or sampled, replayed with no word from the host until it is read."""
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Callable, NamedTuple

import torch

from minispec.batch import Batch
from minispec.kernels.accept import publish
from minispec.kernels.choose import Sampling
from minispec.params import SamplingParams


READ = -1           # levels of what only lets the draft read
SLOTS = 4           # of a ring of results: more rounds than may be under way
Event = partial(torch.cuda.Event, enable_timing=True)


def record(run, device, pool):
    """`run` as a CUDA graph, a function that replays it. Its first calls compile, outside of the capture."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):      # nccl's own thread looks at events meanwhile
        run()
    return graph.replay


class Places:
    """Who is in the captured rounds of up to `size` requests, greedy or sampled: what all of these rounds read, so that one follows another
    with nothing uploaded.

    table int64 [size, pages] and state int64 [6, size] (length, pending, room, seat, alive, turn); every round advances length, pending, room and
    turn, the number of rounds so far, which the host counts too. A place without a request is not alive: it computes on the dump page and in
    the hidden buffer's last seat, its room of 1 lets no node count, and its length stays.
    """

    def __init__(self, runner, size, sampled):
        self.last, self.idle, self.turn, self.sampled = runner.max_length - 1, (1, 0, 1, runner.max_batch, 0), 0, sampled
        self.events = [(Event(), Event()) for _ in range(SLOTS)]        # making two takes the host as long as launching a round
        pages, device = runner.pages.needed(runner.max_length + runner.shape.scratch), runner.device
        self.seats = torch.zeros(6 + pages, size, dtype=torch.int64, device=device)        # in one piece: an upload takes the host 30 us
        self.state, self.table = self.seats[:6], self.seats[6:].view(size, pages)
        params = [SamplingParams(temperature=1.0 if sampled else 0.0)] * size
        self.sampling = Sampling.build(params, [[0]] * size, [[]] * size, runner.target_config.vocab_size, device)
        self.clear()

    def clear(self):
        self.members = None         # (request, the length at which the last round left it)
        self.seat([])

    def seat(self, requests):
        """Nothing is uploaded where the last round was theirs too; else one tensor, three where they are sampled."""
        members = [(request, request.length) for request in requests]
        if self.members != members:
            (size, width), missing = self.table.shape, len(self.table) - len(requests)
            pages = sum((r.pages + [0] * (width - len(r.pages)) for r in requests), []) + [0] * width * missing
            rows = [(r.length, r.ids[-1], self.last - r.length, r.slot, 1) for r in requests] + [self.idle] * missing
            # the turn too: a capture that was interrupted has moved it on
            self.upload(self.seats.view(-1), [*chain(*zip(*rows)), *[self.turn] * size, *pages])
            if self.sampled and requests:
                self.upload(self.sampling.temperature, [r.params.temperature for r in requests] + [1.0] * missing)
                self.upload(self.sampling.seed, [r.params.seed for r in requests] + [0] * missing)
            self.members = members

    @staticmethod
    def upload(place, values):
        place.copy_(torch.tensor(values, dtype=place.dtype, pin_memory=place.is_cuda), non_blocking=True)


class Flight(NamedTuple):
    """A round under way for `requests`: rank 0's plan; whether the draft read before it what waited; how its result is read, if captured."""
    requests: list
    plan: list
    caught: bool
    read: Callable | None = None


class Round:
    """One captured round. steps: levels drafted, none in a plain round of an adaptive shape, which leaves states for the draft to read later;
    READ: the draft reads what waits, nothing else. uncut: an adaptive round all of whose nodes are verified, without the two launches that say
    which of them pay and learn from it."""

    @torch.inference_mode()
    def __init__(self, runner, places, pool, steps, uncut):
        self.places, speculator, adaptive, self.ring = places, runner.speculator, runner.adaptive, None
        kept = places.seats.clone(), places.members
        places.clear()          # the rounds that come before the capture shall be nobody's
        unread = runner.shape.unread if steps == READ else runner.shape.nodes + 1
        batch = Batch(places.table, runner.pages.page_size, *places.state[:4], runner.max_length, unread, places.sampling, runner.exact)
        budget = replace(adaptive.budget(len(places.table)), steps=steps, cuts=not uncut) if steps > 0 and adaptive else None
        run = partial(speculator.catch_up, batch) if steps == READ else partial(self._round, speculator, batch, budget)
        self.replay = record(run, runner.device, pool)
        places.seats.copy_(kept[0])         # another of their rounds may be under way
        places.members = kept[1]

    def _round(self, speculator, batch, budget):
        path = speculator.round(batch, budget)
        if self.ring is None:
            size, rows = path.tokens.shape
            self.ring = torch.zeros(SLOTS, size, rows + 2, dtype=torch.int64, pin_memory=path.tokens.is_cuda)
        publish(path.count, path.tokens, path.valid, self.places.state, self.ring)

    @torch.inference_mode()
    def start(self, requests, follows):
        """Queue it -> read() -> [count, tokens ..., rows verified] of each request, and the seconds that the device took.

        follows: behind a round of the same requests, which leaves in the places what this one reads.
        """
        slot = self.places.turn % SLOTS
        began, ended = self.places.events[slot]
        if not follows:
            self.places.seat(requests)
        began.record()
        self.replay()
        ended.record()
        self.places.turn += self.ring is not None

        def read():
            ended.synchronize()
            out = self.ring[slot, :len(requests)].tolist()
            self.places.members = [(request, request.length + count) for request, (count, *_) in zip(requests, out)]
            return out, began.elapsed_time(ended) / 1e3
        return read


class Graphs:
    """Rounds by batch size, powers of two up to max_batch, greedy or sampled; `fits` tells which requests can be in one."""

    def __init__(self, runner):
        self.runner, self.places, self.rounds = runner, {}, {}
        self.flights, self.ahead = [], True         # rounds that nobody has read yet; whether one may be queued behind another
        self.pool = torch.cuda.graph_pool_handle() if runner.device.type == "cuda" else None    # one for all: results leave it within the round

    @staticmethod
    def fits(request):
        """Filters, penalties, bias and log-probabilities change shape with the request: those rounds run without a graph, with the same ids."""
        p = request.params
        penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
        filtered = p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p > 0)
        return not (p.logprobs or p.logit_bias or penalised or filtered)

    def warm(self, progress):
        """Capture every greedy size now, so that no request pays for it. progress(done, total, what)."""
        sizes = {self.size(count) for count in range(1, self.runner.max_batch + 1)}
        steps, adaptive = self.runner.shape.steps, self.runner.adaptive
        arms = [*((arm, False) for arm in (0, READ, *adaptive.arms)), (steps, True)] if adaptive else [(steps, False)]
        rounds = [(size, *arm) for size in sorted(sizes) for arm in arms]
        for done, (size, *arm) in enumerate(rounds, 1):
            self.round(size, False, *arm)
            if progress:
                progress(done, len(rounds), "rounds captured")

    def size(self, count):
        return min(1 << (count - 1).bit_length(), self.runner.max_batch)

    def round(self, *kind):
        """kind: size, sampled, steps, uncut."""
        if kind[:2] not in self.places:
            self.places[kind[:2]] = Places(self.runner, *kind[:2])
        if kind not in self.rounds:
            self.rounds[kind] = Round(self.runner, self.places[kind[:2]], self.pool, *kind[2:])
        return self.rounds[kind]

    def of(self, requests, steps, uncut=False):
        """The round for these requests."""
        return self.round(self.size(len(requests)), any(request.params.temperature > 0 for request in requests), steps, uncut)

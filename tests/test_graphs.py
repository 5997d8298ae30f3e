"""Rounds that are replayed: on the CPU a call stands for the graph, with the same tensors in place; ids and counts are the eager path's."""
import gc
import itertools
import weakref
from time import perf_counter

import pytest
import torch

from minispec import Engine, SamplingParams, graphs
from minispec.draft import Pool
from minispec.kernels.linear import linear, rowwise

from .tiny_draft import DIALECTS

SHAPES = {"chain": dict(draft_steps=4, topk=1), "tree": dict(draft_steps=3, topk=3, nodes=8), "plain": dict(draft_steps=0)}
GREEDY, WARM = SamplingParams(max_tokens=17, ignore_eos=True), SamplingParams(max_tokens=23, ignore_eos=True, temperature=0.7, seed=5)
FILTERED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=6, top_k=9)


def record(run, device, pool):
    """As graphs.record: later runs read what lies there then."""
    run()
    return run


class Event:
    """Of a stream that has done at once what it is asked for."""

    def record(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.at = perf_counter()

    def synchronize(self):
        assert self.at

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def replayed(monkeypatch):
    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "Event", Event)


@pytest.fixture
def pair(checkpoints, monkeypatch):
    """pair(shape, **options) -> an engine, and one for the same files whose rounds are replayed."""
    replayed(monkeypatch)
    monkeypatch.setattr(Pool, "settled", lambda *_: False)      # as on CUDA
    target, made = checkpoints.target(), []

    def make(shape, **options):
        for _ in range(2):
            made.append(Engine(target, checkpoints.fitted(target, **DIALECTS["torchspec"]), max_length=96, **options, **SHAPES[shape]))
        made[-1].runner.graphs = graphs.Graphs(made[-1].runner)
        made[-1].runner.graphs.warm(None)
        return made[-2:]
    yield make
    for engine in made:
        engine.close()


def told(engine, *streams):
    """Events of streams that are read in turns: by stream and prompt, all ids, accepted counts and reasons."""
    streams, out = [engine.stream(*stream) for stream in streams], {}
    running = dict(enumerate(streams))
    while running:
        for i, stream in list(running.items()):
            event = next(stream, None)
            if event is None:
                del running[i]
            else:
                out.setdefault((i, event.index), []).append((event.ids, event.accepted, event.finish_reason))
    engine.scheduler.check()
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("params", [GREEDY, WARM, [GREEDY, WARM, GREEDY, WARM, GREEDY]], ids=["greedy", "sampled", "mixed"])
def test_a_batch(shape, params, pair):
    """Five prompts for three places: requests join and end while others run, so that every size and every idle place comes up."""
    eager, replayed = pair(shape, max_batch=3)
    prompts = [[7, 301, 45], [12], list(range(100, 140)), [500, 4, 4, 88], [9] * 16]
    some = [params] * 5 if isinstance(params, SamplingParams) else params
    some = [SamplingParams(**{**vars(one), "max_tokens": one.max_tokens + 3 * i}) for i, one in enumerate(some)]
    assert told(eager, (prompts, some)) == told(replayed, (prompts, some))
    assert len(replayed.runner.graphs.rounds) >= 3 and replayed.pages.free == replayed.pages.total
    if shape != "plain":
        out = replayed.generate(prompts, some)
        assert 0 < sum(sum(one.accepted) for one in out) < sum(len(one.accepted) for one in out) * replayed.draft_steps


def test_requests_that_no_graph_takes_come_and_go(pair):
    """A filtered request makes its company's rounds eager: what the graph knew of the others is then out of date."""
    eager, replayed = pair("tree", max_batch=4)
    streams = ([[7, 301], [12, 5]], GREEDY), ([[4, 2, 9]], FILTERED), ([[33]], WARM), ([[33, 8]], FILTERED)
    assert told(eager, *streams) == told(replayed, *streams)


def test_requests_that_are_dropped(pair):
    """A stream closed in the middle frees its place; the next request takes its seat, slots and pages."""
    eager, replayed = pair("tree", max_batch=2)
    seen = []
    for engine in (eager, replayed):
        stream = engine.stream([[7, 301, 45], [12]], GREEDY)
        first = [[], []]
        for event in itertools.islice(stream, 6):
            first[event.index] += event.ids
        stream.close()
        seen.append((*first, told(engine, ([[12], [7, 301, 45]], WARM))))
    assert seen[0][2] == seen[1][2]
    for one, two in zip(seen[0][:2], seen[1][:2]):         # who joins while a round is under way waits for the next
        assert len(one) > 1 < len(two) and all(a == b for a, b in zip(one, two))


def test_the_context_ends(pair):
    """Trees shrink at the edge and requests stop exactly there."""
    eager, replayed = pair("tree", max_batch=4)
    prompts = [torch.randint(2, 512, (n,)).tolist() for n in (95, 94, 92, 80)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    found = replayed.generate(prompts, params)
    assert [len(out.ids) for out in found] == [1, 2, 4, 16] and [out.ids for out in found] == [out.ids for out in eager.generate(prompts, params)]


@pytest.mark.parametrize("shape", ["chain", "plain"])
def test_a_round_is_queued_behind_the_one_that_runs(shape, pair, monkeypatch):
    """Not behind one that may be the last; who stops before has one computed for nothing, which is waited for."""
    log, start = [], graphs.Round.start

    def spied(*args):
        log.append("start")
        read = start(*args)
        return lambda: log.append("read") or read()
    monkeypatch.setattr(graphs.Round, "start", spied)
    _, replayed = pair(shape, max_batch=2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    out = replayed.generate([7, 301, 45], params)
    assert log[:6] == ["start", "start", "read", "start", "read", "start"] and log.count("start") == log.count("read") == len(out.accepted)
    log.clear()
    stop = next(token for i, token in enumerate(out.ids) if i > 9 and token not in out.ids[:i])
    cut = replayed.generate([7, 301, 45], SamplingParams(max_tokens=40, ignore_eos=True, stop_ids=[stop]))
    assert cut.ids == out.ids[:len(cut.ids)] and cut.finish_reason == "stop" and not replayed.runner.flights
    assert log.count("start") == log.count("read") == len(cut.accepted) + 1
    assert replayed.generate([7, 301, 45], params).ids == out.ids


def test_a_capture_that_is_interrupted(pair, monkeypatch):
    """Ctrl-C after the round has run, before it is captured: later rounds write their results where the host reads them."""
    eager, replayed = pair("chain", max_batch=2)

    def interrupted(run, device, pool):
        run()
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(graphs, "record", interrupted)
        replayed.generate([7, 301, 45], WARM)
    assert told(replayed, ([[7, 301, 45]], WARM)) == told(eager, ([[7, 301, 45]], WARM))


def test_plain_shares_the_caches(pair):
    _, replayed = pair("chain", max_batch=2)
    plain = replayed.plain()
    assert plain.runner.graphs.runner is plain.runner
    outputs = [engine.generate([[7, 301], [5]], GREEDY) for engine in (replayed, plain, replayed)]
    assert len({tuple(map(tuple, (one.ids for one in out))) for out in outputs}) == 1 and outputs[0][0].accepted == outputs[2][0].accepted


@pytest.mark.parametrize("steps", [0, 2])
def test_who_shares_a_closed_engines_models_goes_on(steps, pair):
    """Its captured rounds go too, with one that was under way."""
    eager, replayed = pair("chain", max_batch=2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    other, whole = replayed.reshaped(steps, 1), eager.reshaped(steps, 1).generate([7, 301, 45], params)
    stream = other.stream([7, 301, 45], params)
    ids = [token for _ in range(4) for token in next(stream).ids]
    assert other.runner.flights
    replayed.close()
    events = list(stream)
    assert ids + [token for event in events for token in event.ids] == whole.ids and sum(event.accepted for event in events) >= 5 * (steps > 0)


def test_events_are_read_before_they_are_recorded_again(pair, monkeypatch):
    _, replayed = pair("chain", max_batch=2)
    start, reads = graphs.Round.start, []

    def started(self, requests, follows):
        slot, read = self.places.turn % graphs.SLOTS, start(self, requests, follows)
        then = [event.at for event in self.places.events[slot]]

        def later():
            reads.append(slot)
            assert [event.at for event in self.places.events[slot]] == then
            return read()
        return later
    monkeypatch.setattr(graphs.Round, "start", started)
    replayed.generate([[7, 301], [5, 6, 7]], GREEDY)
    assert set(reads) == set(range(graphs.SLOTS))


def test_nothing_is_uploaded_while_the_requests_stay(pair, monkeypatch):
    """One tensor a change of company, of table and state."""
    _, replayed = pair("chain", max_batch=2)
    made, upload = [], graphs.Places.upload
    monkeypatch.setattr(graphs.Places, "upload", staticmethod(lambda place, values: made.append(place) or upload(place, values)))
    out = replayed.generate([[7, 301], [5, 6, 7]], GREEDY)
    rounds = max(len(one.accepted) for one in out)
    assert rounds > 4 and 2 <= len(made) <= 3, "when the first comes, when the second joins, when one ends"


def test_logits_that_are_not_finite(pair):
    """The stream says so; the idle place of its graph, and who takes the seats next, see nothing of it."""
    _, replayed = pair("tree", max_batch=4)
    stream = replayed.stream([[7, 301], [12, 5], [9]], GREEDY)
    for _ in range(6):
        next(stream)
    page = replayed.scheduler.running[1].pages[0]
    replayed.runner.speculator.target_cache.data[:, page * replayed.pages.page_size] = float("nan")
    with pytest.raises(Exception, match="not finite"):
        list(stream)
    assert replayed.generate([9, 4], GREEDY).finish_reason == "length"


def test_what_fits():
    one = type("Request", (), {})
    for params, fits in ((GREEDY, True), (WARM, True), (FILTERED, False), (SamplingParams(top_k=5), True), (SamplingParams(logprobs=True), False),
                         (SamplingParams(presence_penalty=1.0), False), (SamplingParams(logit_bias={3: 1.0}), False)):
        one.params = params
        assert graphs.Graphs.fits(one) == fits


def test_rows_in_blocks():
    """Engine's `exact`: the products of the target see 16 rows always."""
    x, weight, seen = torch.randn(3, 7, 33), torch.randn(50, 33), []
    together = rowwise(lambda x: seen.append(x.shape) or linear(x, weight), x, True)
    assert set(seen) == {(1, 16, 33)} and together.shape == (3, 7, 50)
    assert torch.equal(together[1:2, 2:4], rowwise(lambda x: linear(x, weight), x[1:2, 2:4], True))
    torch.testing.assert_close(together, linear(x, weight))


def test_an_exact_forward_is_the_forward(pair):
    """On CUDA its bits are compared (bench/kernels.py); here that the blocks change nothing but rounding."""
    eager, _ = pair("tree", max_batch=2)
    out = eager.generate([[7, 301], [5, 6, 7]], GREEDY)
    eager.runner.assemble.exact = True
    eager.runner.assemble.requests = None
    assert [one.ids for one in out] == [one.ids for one in eager.generate([[7, 301], [5, 6, 7]], GREEDY)]


def test_a_closed_engine_holds_no_captured_round(checkpoints, monkeypatch):
    """Of its own and of those that share its models: nccl would wait without end for a graph that holds one of its calls."""
    replayed(monkeypatch)
    target = checkpoints.target()
    engine = Engine(target, checkpoints.fitted(target, **DIALECTS["safeailab"]), max_batch=2)
    runner = engine.runner
    runner.graphs = graphs.Graphs(runner)
    runner.graphs.warm(None)
    plain = engine.plain()
    plain.runner.graphs.warm(None)
    kept = [weakref.ref(one) for found in (runner.graphs, plain.runner.graphs) for one in found.rounds.values()]
    assert len(kept) == 4
    other = weakref.ref(engine.reshaped(1).runner.hidden)
    gc.collect()
    assert not other(), "what a reshaped engine held is held no longer"
    engine.close()
    gc.collect()            # of what stands for a graph here
    assert not any(one() for one in kept)

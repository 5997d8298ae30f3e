"""How much of a tree is verified: the choice against brute force, what is learnt against a world that is known, and the ids, always."""
import itertools
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minispec import Engine, MinispecError, SamplingParams, adapt, graphs
from minispec.adapt import Adaptive
from minispec.curve import LIMIT, PLAIN, STRANGERS, Curve
from minispec.kernels.growth import AHEAD, Growth
from minispec.kernels.prune import BINS, PRIOR, factors, learn, prune
from minispec.speculate import Shape
from minispec.tree import Tree

from . import oracle, spy
from .test_graphs import Event, record
from .test_lossless import PARAMS, PROMPTS
from .test_tree import make_batch
from .tiny_draft import DIALECTS

AUTO = dict(draft_steps=4, topk=3, nodes="auto")
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@st.composite
def forests(draw):
    """Trees of one size with the draft's probabilities, for 1 to 3 requests: parents (0 the root), p, room."""
    size = draw(st.integers(1, 4))
    probability = st.sampled_from([1.0, 0.9, 0.6, 0.6, 0.3, 0.05, 0.0])
    return [([draw(st.integers(0, i)) for i in range(size)], [draw(probability) for _ in range(size)], draw(st.sampled_from([1, 2, 3, 9])))
            for _ in range(draw(st.integers(1, 3)))]


def laid_of(forest):
    batch, depths = make_batch([3 + i for i in range(len(forest))], [room for *_, room in forest]), []
    for parents, _, _ in forest:
        depth = []
        for parent in parents:
            depth.append(1 + (depth[parent - 1] if parent else 0))
        depths.append(depth)
    parents = torch.tensor([parents for parents, *_ in forest])
    tree = Tree.build(batch, parents * 0 + torch.arange(parents.shape[1]), parents, torch.tensor(depths), False)
    scores = torch.zeros(len(forest), parents.shape[1] + 1)
    for b, (above, p, _) in enumerate(forest):
        for node, parent in enumerate(above, 1):
            scores[b, node] = scores[b, parent] + (math.log(p[node - 1]) if p[node - 1] else -math.inf)
    return batch, tree.laid._replace(scores=scores), depths


@settings(max_examples=150, deadline=None)
@given(forests(), st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.3, 0.9]), min_size=13, max_size=13), st.integers(0, 9))
def test_the_choice_is_the_best_of_all_subtrees(forest, steps, seed):
    """Known probabilities and costs, convex or not: no set of nodes that is closed under parents, over all requests, is worth more."""
    batch, laid, depths = laid_of(forest)
    trust = torch.rand(2, 4, BINS, generator=torch.Generator().manual_seed(seed)) * 6
    price = torch.tensor(list(itertools.accumulate(steps)))
    nodes, gain = [], {}
    for b, (parents, p, room) in enumerate(forest):
        for node, parent in enumerate(parents, 1):
            depth = depths[b][node - 1]
            if depth < room and p[node - 1] and (not parent or (b, parent) in gain):
                expected, accepted = trust[:, depth - 1, min(int(-1.5 * math.log(p[node - 1])), BINS - 1)].tolist()
                gain[b, node] = gain.get((b, parent), 1.0) * min(1.0, p[node - 1] * (accepted + PRIOR) / (expected + PRIOR))
                nodes.append((b, node, parent))
    best = -math.inf
    for count in range(len(nodes) + 1):
        for some in itertools.combinations(nodes, count):
            chosen = {(b, node) for b, node, _ in some}
            if all(not parent or (b, parent) in chosen for b, _, parent in some):
                best = max(best, sum(gain[one] for one in chosen) - price[count].item())
    out = prune(laid, batch.length, trust, price)
    kept = {(b, node) for b, node in out.valid.nonzero().tolist() if node}
    assert out.valid[:, 0].all() and kept <= gain.keys()
    assert all(not forest[b][0][node - 1] or (b, forest[b][0][node - 1]) in kept for b, node in kept)
    assert sum(gain[one] for one in kept) - price[len(kept)].item() == pytest.approx(best, abs=1e-5)


PROBABILITIES = st.sampled_from([1.0, 0.9, 0.6, 0.6, 0.5, 0.3, 0.05, 0.0])


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0.0, 0.1, 0.4]), st.sampled_from([0.0, 0.3, 0.8]))
def test_a_tree_on_the_host(data, count, steps, topk, row, level):
    """What is expanded, and what is verified, is what its gains are worth; rows, words and slots are as in a walk."""
    batch = make_batch([3 + 2 * b for b in range(count)], data.draw(st.lists(st.sampled_from([1, 2, 3, 9]), min_size=count, max_size=count)))
    trust = torch.rand(2, steps, BINS, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9)))) * 6
    most = data.draw(st.integers(1, 6))
    price = list(itertools.accumulate(data.draw(st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.5]), min_size=1 + count * most, max_size=1 + count * most))))
    budget = adapt.Budget(most, steps, topk, trust, None, level, row, factors(trust).tolist(), price)
    growth, fresh = Growth(budget, batch, 20), itertools.count(1000)
    parent, p, gain, depths = {}, {}, {}, {}            # by token
    front, entry, start = [[pending] for pending in batch.pending.tolist()], [{} for _ in range(count)], 0
    gain |= {one: 1.0 for one, in front}
    depths |= dict.fromkeys(gain, 0)
    trees = [[] for _ in range(count)]
    for depth in range(1, steps + 1):
        tokens, logs = [], []
        for b in range(count):
            tokens.append([[next(fresh) for _ in range(topk)] for _ in front[b]])
            logs.append([sorted(data.draw(st.lists(PROBABILITIES, min_size=topk, max_size=topk)), reverse=True) for _ in front[b]])
            for above, some, ps in zip(front[b], tokens[b], logs[b]):
                for token, one in zip(some, ps):
                    expected, accepted = trust[:, depth - 1, min(int(-1.5 * math.log(one)), BINS - 1) if one else -1].tolist()
                    parent[token], p[token], depths[token] = above, one, depth
                    gain[token] = gain[above] * min(1.0, one * (accepted + PRIOR) / (expected + PRIOR))
                    trees[b].append(token)
        out = growth.add(torch.tensor(tokens), torch.tensor(logs).log())
        best = [sorted((gain[t] for t in sum(some, [])), reverse=True)[:topk] for some in tokens]
        paying = [sum(one * AHEAD > row + 1e-6 for one in some) for some in best]
        promise = sum(max(one * AHEAD - row, 0) for some in best for one in some)
        assert budget.grown == depth and (out is None) == (depth == steps or promise <= level + 1e-6)
        if out is None:
            break
        assert out.tokens.shape == (count, max(paying)) == out.slots.shape
        for b in range(count):
            before, front[b] = front[b], out.tokens[b].tolist()
            assert [gain[t] for t in front[b]] == pytest.approx(best[b][:max(paying)]) and len(set(front[b])) == max(paying)
            for k, token in enumerate(front[b]):
                entry[b][token] = start + k
                assert out.take[b, k] == b * len(before) + before.index(parent[token])
                word, at = 1 << start + k, parent[token]
                while at in entry[b]:
                    word, at = word | 1 << entry[b][at], parent[at]
                length = batch.length[b].item()
                index = length + start + k
                assert out.words[b, k] == word and out.slots[b, k] == batch.table[b, index // 4] * 4 + index % 4
                assert (out.positions[b, k], out.above[b, k]) == (length + depth - 1, length + depth)
        start += max(paying)
        assert growth.rows == start
    worth = []              # of each request, by number of nodes: the most that any set that is closed under parents gains
    for b, room in enumerate(batch.room.tolist()):
        nodes, sizes = [t for t in trees[b] if depths[t] < room and gain[t]], {0: 0.0}
        for many in range(1, min(most, len(nodes)) + 1):
            for some in itertools.combinations(nodes, many):
                if all(parent[t] in some or depths[t] == 1 for t in some):
                    sizes[many] = max(sizes.get(many, 0.0), sum(map(gain.get, some)))
        worth.append(sizes)
    best = max(sum(one[n] for one, n in zip(worth, some)) - price[sum(some)] for some in itertools.product(*worth))
    laid = growth.lay()
    kept = [[t for t, valid in zip(some, live) if valid][1:] for some, live in zip(laid.tokens.tolist(), laid.valid.tolist())]
    assert sum(gain[t] for some in kept for t in some) - price[sum(map(len, kept))] == pytest.approx(best, abs=1e-5)
    assert laid.valid[:, 0].all() and laid.tokens.shape[1] == 1 + max(map(len, kept))
    for b, some in enumerate(kept):
        length, rows = batch.length[b].item(), {batch.pending[b].item(): 0} | {t: i for i, t in enumerate(some, 1)}
        for token, i in rows.items():
            word, at = 1 << i, token
            while i and rows[at]:
                at = parent[at]
                word |= 1 << rows[at]
            index = length + i
            assert laid.words[b, i] == laid.seen[b, i] == word and laid.slots[b, i] == batch.table[b, index // 4] * 4 + index % 4
            assert [laid.depth[b, i], laid.positions[b, i]] == [depths[token], length + depths[token]]
            assert laid.parents[b, i] == (rows[parent[token]] if i else 0) < max(i, 1)
            score, at = 0.0, token
            while i and depths[at]:
                score, at = score + math.log(p[at]), parent[at]
            assert laid.scores[b, i].item() == pytest.approx(score, abs=1e-5)
        assert not laid.seen[b, len(rows):].any() and not laid.slots[b, len(rows):].any() and (laid.positions[b, len(rows):] == length).all()


def test_calibration_converges():
    """A draft whose p is right at depth 1, too high at 2, too low at 3: after 600 rounds the gains are the true ones."""
    true, g = {1: lambda p: p, 2: lambda p: 0.4 * p, 3: lambda p: min(1.0, 1.6 * p)}, random.Random(0)
    trust = torch.zeros(2, 3, BINS)
    for _ in range(600):
        p = [g.choice([0.9, 0.5, 0.2]) for _ in range(3)]
        _, laid, _ = laid_of([([0, 1, 2], p, 9)])
        count = 1
        while count <= 3 and g.random() < true[count](p[count - 1]):
            count += 1
        learn(laid, torch.arange(4)[None], torch.tensor([count]), trust)
    for depth, tolerance in ((1, 0.12), (2, 0.12), (3, 0.25)):
        for p in (0.9, 0.5):
            expected, accepted = trust[:, depth - 1, min(int(-1.5 * math.log(p)), BINS - 1)].tolist()
            assert min(1.0, p * (accepted + PRIOR) / (expected + PRIOR)) == pytest.approx(true[depth](p), abs=tolerance)


def world(curve, rounds, cost, accept, seed=0, level=0.1, speed=lambda i: 1.0, wanted=None):
    """Rounds of a machine: cost(n) seconds of a round that verifies n nodes, level those of a level, accept(levels, nodes) tokens:
    (tokens, seconds, what was drafted in each round)."""
    g, tokens, seconds, depths = random.Random(seed), 0, 0.0, []
    for i in range(rounds):
        depth, nodes = curve()
        nodes = (wanted(g) if wanted else min(depth, curve.nodes)) if depth and nodes is None else nodes
        emitted = accept(depth, nodes, g) if depth else 1
        if not curve.whole and not wanted:      # such a draft sees, one level too late, where it is wrong
            depth = nodes = min(depth, emitted)
        drafting = depth * level
        took = (cost(nodes) + drafting) * speed(i) * g.choice([1, 1, 1, 1.05, 1.1, 3.0 if i % 17 == 0 else 1])
        curve.saw(depth, nodes, [emitted], took, *() if curve.whole else (drafting * speed(i), level * speed(i) * (depth > 1)))
        tokens, seconds = tokens + emitted, seconds + cost(nodes) + drafting
        depths.append(depth)
    return tokens, seconds, depths


ARMS = [1, 2, 4, 6]


def chain(hits):
    """accept of a draft whose level k + 1 is right with probability hits[k], given the ones before."""
    def accept(depth, nodes, g):
        count = 1
        while count <= min(depth, nodes) and g.random() < hits[count - 1]:
            count += 1
        return count
    return accept


@pytest.mark.parametrize("speed", [lambda i: 1.0, lambda i: 1.0 if i < 100 else 2.5], ids=["steady", "slower from round 100 on"])
def test_prices_are_the_costs(speed):
    """In tokens: the costs times the tokens a second, whatever the machine's speed, and never falling."""
    curve, true = Curve(1, 15, ARMS[-1:], False), lambda n: 1 + 0.2 * n**0.6
    world(curve, 2000, true, lambda *_: 3, level=0.02, speed=speed, wanted=lambda g: g.choice([1, 2, 3, 3, 4, 6, 6, 8, 10]))
    price, _ = curve.prices(1)
    rate = curve.gain / (curve.spent / curve.cost[3] * true(3))
    assert price == sorted(price) and len(price) == 16
    assert [price[n] - price[1] for n in (3, 6, 10)] == pytest.approx([rate * (true(n) - true(1)) for n in (3, 6, 10)], rel=0.25)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("whole", [False, True])
def test_a_worthless_draft_costs_little_and_may_come_back(whole, seed):
    """Plain rounds when no draft token is accepted: under 1 % lost, probes included; when the draft is good again, it drafts again, after
    128 rounds and a few probes at most, of which one in ten misses."""
    curve, true = Curve(1, 15, ARMS if whole else ARMS[-1:], whole), lambda n: 1 + 0.3 * (n > 0) + 0.05 * n
    world(curve, 60, true, chain([0] * 6), seed)
    tokens, seconds, depths = world(curve, 1000, true, chain([0] * 6), seed)
    assert 6 < sum(map(bool, depths)) < 25 and depths.count(1) > 6 and tokens / seconds > 0.99
    assert sum(map(bool, world(curve, 700, true, chain([0.9] * 6), seed)[2])) > 250 and curve.interval == 0
    assert sum(map(bool, world(curve, 300, true, chain([0.8, 0.8, 0.6, 0.6, 0, 0]), seed)[2])) > 280      # 1.3 times plain or more


def test_rounds_that_are_under_way_when_a_draft_rests():
    """They are seen later: they say nothing that is new, wins let it draft again; nor is a probe sent after one that nobody has seen."""
    curve, true = Curve(1, 15, ARMS, True), lambda n: 1 + 0.05 * n
    world(curve, len(curve.trials), true, chain([0] * 6))
    while not curve.interval:
        world(curve, 1, true, chain([0] * 6))
    before = curve.interval, curve.rest
    for _ in range(3):
        curve.saw(6, 6, [1], true(6) + 0.6)
    assert (curve.interval, curve.rest) == before == (8, 8)
    curve.rest = 0
    assert [curve()[0] for _ in range(4)] == [1, 0, 0, 1]
    curve.saw(6, 6, [7], true(6) + 0.6)
    assert (curve.interval, curve.rest) == (0, 0) and curve()[0] > 0


@pytest.mark.parametrize("whole", [True, False])
def test_patience_with_new_requests_ends_and_comes_back(whole):
    """Two to four probes at the begin of a request, one where many have found nothing; after one that won as before."""
    curve, true, never = Curve(1, 15, ARMS if whole else ARMS[-1:], whole), lambda n: 1 + 0.05 * n, chain([0] * 6)
    world(curve, 300, true, never, level=0.2)

    def probes(accept):
        curve.newcomer()
        return sum(depth > 0 for depth in world(curve, 25, true, accept, level=0.2)[2])
    first, then = [probes(never) for _ in range(STRANGERS - 1)], [probes(never) for _ in range(5)]
    assert set(first) <= {2, 3, 4} and set(then) == {1}, (first, then)
    assert probes(chain([1] * 6)) > 9
    world(curve, 100, true, never, level=0.2)
    assert curve.interval and probes(never) in (2, 3, 4)


@pytest.mark.parametrize("row, level", itertools.product((0.003, 0.02, 0.08), (0.03, 0.1, 0.3)))
def test_a_draft_that_is_nearly_always_wrong_is_left_alone(row, level):
    """Where nobody can look inside of it: never under 0.97 of plain decoding, whatever rows and levels cost."""
    for hit in (0.0, 0.06):
        curve, true = Curve(1, 15, ARMS, True), lambda n: 1 + row * n
        world(curve, 100, true, chain([hit] * 6), level=level)
        tokens, seconds, _ = world(curve, 2000, true, chain([hit] * 6), level=level)
        assert tokens / seconds > 0.97, (hit, tokens / seconds)


@pytest.mark.parametrize("hits, best", [([0.95] * 6, 6), ([0.9, 0.9, 0.85, 0.1, 0.1, 0.1], 4), ([0.8, 0.8, 0.3, 0.3, 0.1, 0.1], 2),
                                         ([0.7, 0.1, 0, 0, 0, 0], 1), ([0.05] * 6, 0)])
def test_whole_trees_are_those_that_pay(hits, best):
    """Where nobody can look inside of a draft, the usual tree is the one that exact expectation says, also after the text has changed;
    a deeper one is tried now and then."""
    level, true, rates = 0.1, lambda n: 1 + 0.02 * n, {0: 1.0}
    for depth in ARMS:
        rates[depth] = sum(math.prod(hits[:k]) for k in range(depth + 1)) / (true(depth) + depth * level)
    assert best == max(rates, key=rates.get)
    for before in ([0.95] * 6, [0.3] * 6):
        curve = Curve(1, 24, ARMS, True)
        for accept, rounds in ((chain(before), 200), (chain(hits), 2400)):
            found = world(curve, rounds, true, accept, level=level)[2][-300:]
        assert max(set(found), key=found.count) == best and found.count(best) > 180, found


@pytest.mark.parametrize("captured, depth", [(False, 4), (True, 1)])
def test_a_new_request_is_worth_a_probe(captured, depth):
    """At once, also where the one before it ended with a probe that nobody has looked at yet."""
    known = Adaptive(Shape(4, 2, "auto"), torch.device("cpu"))
    one, two, three = (SimpleNamespace(room=9) for _ in range(3))
    known.plan(captured, 1, [one])
    curve = known.curves[captured, 1]
    curve.trials, curve.rest, curve.interval, curve.cost, curve.base, curve.lost = [], 40, 128, {PLAIN: 1.0, 1: 1.5, 2: 1.6}, 1.0, LIMIT
    curve.seen = {PLAIN: 9, 1: 9, 2: 9}
    assert known.plan(captured, 1, [one]) == [0] and known.plan(captured, 1, [two])[0] == depth and curve.rest == 0
    curve.lost = LIMIT - 0.1
    known.saw(captured, 1, depth, 1, [1], 2.5)
    assert known.plan(captured, 1, [three])[0] == depth
    known.look()
    assert curve.rest == 0 < curve.interval


@pytest.mark.parametrize("captured, depths", [(False, [0, 1, 2, 3, 4, 4]), (True, [0, 1, 2, 4, 4, 4])])
def test_no_level_is_drafted_that_nobody_has_room_for(captured, depths):
    """A level more than there is room for tokens after the root's own; captured rounds have 1, 2 or 4."""
    adaptive = Adaptive(Shape(4, 2, "auto"), torch.device("cpu"))
    requests = [SimpleNamespace(room=1), SimpleNamespace(room=9)]
    adaptive.plan(captured, 2, requests)
    curve = adaptive.curves[captured, 2]
    curve.trials, curve.cost, curve.base, curve.seen = [], {PLAIN: 1.0, 1: 1.1, 4: 1.2}, 1.0, {PLAIN: 9, 1: 9, 4: 9}
    found = []
    for requests[1].room in range(1, 7):
        found.append(adaptive.plan(captured, 2, requests)[0])
    assert found == depths


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_tree_is_cut_where_that_pays(share):
    """Where looks find nothing to cut only one round in OTHER is one; it goes by prices of then. Where they do all are cut."""
    adaptive, request = Adaptive(Shape(4, 2, "auto"), torch.device("cpu")), SimpleNamespace(room=90)
    adaptive.plan(True, 1, [request])
    curve = adaptive.curves[True, 1]
    curve.trials, curve.cost, curve.base, curve.seen, curve.age = [], {PLAIN: 1.0, 14: 1.1}, 1.0, {PLAIN: 9, 14: 9}, 3
    plans = []
    for _ in range(600):
        plans.append(adaptive.plan(True, 1, [request]))
        adaptive.saw(True, 1, plans[-1][0], 14 if len(plans[-1]) == 2 else round(14 * share), [5], 1.3)
        adaptive.look()
    uncut = [plan == [4, True] for plan in plans]
    assert all(plan[0] == 4 for plan in plans) and (uncut[100:].count(True) > 480 if share == 1 else not any(uncut)), uncut.count(True)
    looks = [plan for before, plan in zip(plans, plans[1:]) if before == [4, True] != plan]
    assert len(looks) >= (8 if share == 1 else 0) and all(len(plan) == 3 for plan in looks)
    if share == 1:
        adaptive.saw(True, 1, 4, 10, [1], 1.3)
        adaptive.look()
        assert 4.9 < curve.gain < 5, "one round of 64"
        assert [4, True] not in [adaptive.plan(True, 1, [request]) for _ in range(3)]


@pytest.fixture
def costs(monkeypatch):
    """costs(row, level): a world in which a row and a level of the draft cost that share of a plain round, so that no clock decides."""
    saw = Curve.saw

    def set(row, level):
        def modelled(self, depth, nodes, counts, seconds, drafting=0.0, took=0.0):
            drafted = level * depth
            saw(self, depth, nodes, counts, 1 + row * max(nodes, 0) + drafted, drafted, level if took else 0.0)
        monkeypatch.setattr(Curve, "saw", modelled)
    return set


def kinds(engine):
    """Fills with the rows of every forward of a round: 0 for a plain one."""
    seen, run = [], engine.runner.speculator.round

    def round(batch, budget=None):
        path = run(batch, budget)
        seen.append(int(path.valid.sum()) if budget else 0)
        return path
    engine.runner.speculator.round = round
    return seen


def planning(engine, plan):
    """Its rounds are as plan(requests) says, and one is queued behind another."""
    adaptive = engine.runner.adaptive
    adaptive.plan, adaptive.trying = lambda captured, size, requests: plan(requests), lambda *kind: False


@pytest.fixture
def replayed(monkeypatch):
    """replayed(engine) -> its Graphs: rounds are replayed as in tests/test_graphs.py, rows stay in place and levels are all drafted, as on CUDA."""
    def replayed(engine, record=record):
        monkeypatch.setattr(graphs, "record", record)
        monkeypatch.setattr(graphs, "Event", Event)
        monkeypatch.setattr(adapt, "factors", lambda trust: trust[0, :0])
        engine.runner.graphs = graphs.Graphs(engine.runner)
        return engine.runner.graphs
    return replayed


@pytest.mark.parametrize("dialect", ["safeailab", "torchspec"])
def test_on_is_off(dialect, checkpoints, costs):
    """Alone and in a batch of four: greedy, sampled, filtered, penalised; caches poisoned; trees of many sizes, accepted and rejected."""
    target = checkpoints.target()
    costs(0.05, 0.02)
    with Engine(target, "none") as off, Engine(target, checkpoints.fitted(target, **DIALECTS[dialect]), page_size=4, **AUTO) as engine:
        seen, expected = kinds(engine), [off.generate(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)]
        with spy.poisoned(engine):
            for outputs in ([engine.generate(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)], engine.generate(PROMPTS, PARAMS)):
                for one, two, params in zip(expected, outputs, PARAMS):
                    oracle.assert_same(one, two, off, params)
                oracle.assert_mixed(outputs, 4)
        assert len(set(seen)) > 6 and 0 in seen
        assert engine.pages.free == engine.pages.total


def test_a_random_draft_is_left_alone(checkpoints, costs):
    """It is probed now and then; more states wait than the buffer holds, and the draft catches up; the ids are plain decoding's."""
    target = checkpoints.target()
    costs(0.2, 0.2)
    draft = checkpoints.draft(target, **DIALECTS["safeailab"])
    params = [SamplingParams(max_tokens=210, ignore_eos=True), SamplingParams(max_tokens=210, ignore_eos=True, temperature=0.8, seed=4)]
    with Engine(target, "none") as off, Engine(target, draft, max_length=256, page_size=4, **AUTO) as engine:
        seen, read, catch_up = kinds(engine), [], engine.runner.speculator.catch_up
        engine.runner.speculator.catch_up = lambda batch: read.append(batch.unread) or catch_up(batch)
        with spy.poisoned(engine):
            for one, two, param in zip(off.generate(PROMPTS[:2], params), engine.generate(PROMPTS[:2], params), params):
                oracle.assert_same(one, two, off, param)
        late = seen[40:]
        assert 0 < sum(rows > 0 for rows in late) < 0.1 * len(late) and read and set(read) == {64}


@pytest.mark.parametrize("rest, captured", [(1, False), (5, False), (63, False), (64, False), (70, False), (5, True), (17, True), (70, True)])
def test_the_draft_comes_back_as_if_it_had_never_left(rest, captured, checkpoints, costs, replayed):
    """After plain rounds the draft's cache is that of one that read every state: what it accepts then is what it accepts from a fresh prompt."""
    target = checkpoints.target()
    costs(0.0, 0.0)
    with Engine(target, checkpoints.fitted(target, **DIALECTS["nvidia"]), **AUTO) as engine:
        if captured:
            replayed(engine)
        engine.generate(PROMPTS[2], GREEDY)
        left, engine.runner.adaptive.trust[:] = [rest], 0

        def planned():
            left[0] -= 1
            return left[0] >= 0
        planning(engine, lambda requests: [0] if planned() else [4, [0.0] * 9 + [adapt.NEVER] * 7, 0.0])
        out = engine.generate(PROMPTS[2], SamplingParams(max_tokens=100, ignore_eos=True))
        assert out.accepted[:rest] == [0] * rest and sum(out.accepted) > 0
        left[0], engine.runner.adaptive.trust[:] = 0, 0
        fresh = engine.generate(out.prompt_ids + out.ids[:rest], SamplingParams(max_tokens=100 - rest, ignore_eos=True))
        assert fresh.ids == out.ids[rest:] and fresh.accepted == out.accepted[rest:]


@pytest.mark.parametrize("row, level", [(0.0, 0.0), (0.05, 0.02), (0.6, 0.6)], ids=["free", "cheap", "dear"])
def test_replayed_rounds(row, level, checkpoints, costs, replayed):
    """As tests/test_graphs.py: rows stay in place and are masked, prices change between replays; plain rounds are replayed too."""
    target = checkpoints.target()
    costs(row, level)
    prompts = [[7, 301, 45], [12], list(range(100, 140)), [500, 4, 4, 88], [9] * 16]
    params = [SamplingParams(max_tokens=40 + 7 * i, ignore_eos=True, temperature=0.7 * (i % 2), seed=i) for i in range(5)]
    with Engine(target, "none") as off, Engine(target, checkpoints.fitted(target, **DIALECTS["torchspec"]), max_batch=3, **AUTO) as engine:
        replayed(engine).warm(None)
        every, plans, adaptive = [], [], engine.runner.adaptive
        adaptive.plan = lambda *args, plan=adaptive.plan: plans.append(plan(*args)) or plans[-1]
        for some in (slice(0, 5), slice(2, 3)):
            outputs = engine.generate(prompts[some], params[some])
            for one, two, param in zip(off.generate(prompts[some], params[some]), outputs, params[some]):
                oracle.assert_same(one, two, off, param)
            every += outputs
        oracle.assert_mixed(every, 4)
        curves = engine.runner.adaptive.curves
        assert {size for _, size in curves} >= {1, 2, 3} and all(captured for captured, _ in curves)
        seen = [sum(curve.seen.get(n, 0) for curve in curves.values()) for n in (PLAIN, *range(16))]
        assert seen[0] > (60 if row > 0.1 else 3) and sum(seen[1:]) > 20
        assert ([4, True] in plans) == (not row) and any(plan[0] and plan != [4, True] for plan in plans)


def test_when_rounds_are_planned_and_queued(checkpoints, costs, replayed, monkeypatch):
    """The second round of a request is planned when the first has started; the last round of the one before it is looked at while its prompt
    is read; none is queued behind one after which only a token or two may be left."""
    costs(0.0, 0.0)
    target, done, ahead = checkpoints.target(), [], []
    start, plan = graphs.Round.start, Adaptive.plan

    def started(self, requests, follows):
        done.append("start")
        for flight in engine.runner.flights:
            ahead.append((flight.plan[0], requests[0].room - flight.plan[0] - 1))
        return start(self, requests, follows)
    monkeypatch.setattr(graphs.Round, "start", started)
    monkeypatch.setattr(Adaptive, "plan", lambda *args: done.append("plan") or plan(*args))
    with Engine(target, checkpoints.fitted(target, **DIALECTS["torchspec"]), max_batch=1, **AUTO) as engine:
        replayed(engine)
        for size in range(20, 32):
            engine.generate([7, 301, 45], SamplingParams(max_tokens=size, ignore_eos=True))
        assert engine.runner.adaptive.unseen
        stream = engine.stream([7, 301, 45], SamplingParams(max_tokens=30, ignore_eos=True))
        next(stream)
        assert engine.runner.adaptive.unseen is None
        done.clear()
        next(stream)
        assert done == ["plan", "start", "plan", "start"]
        stream.close()
    assert len(ahead) > 20 and all(left > (depth > 0) for depth, left in ahead) and min(left for depth, left in ahead if depth) == 2


@pytest.mark.parametrize("options", [dict(nodes="many"), dict(nodes="auto", draft="none"), dict(nodes=[4])])
def test_what_is_refused(options, checkpoints):
    with pytest.raises(MinispecError, match="nodes"):
        Engine(checkpoints.target(), **{"draft": checkpoints.draft(checkpoints.target()), **options})


def test_auto_is_what_who_asks_for_nothing_gets():
    code = "from minispec.speculate import Shape; print(Shape().adaptive, Shape(3, 2).adaptive, Shape(3, 2, 3).adaptive, Shape(0).adaptive)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["True", "True", "False", "False"]


def test_auto_of_no_steps_is_plain():
    assert (Shape(0, 4, "auto").nodes, Shape(0, 4, "auto").adaptive) == (0, False)
    assert (Shape(6, 4, "auto").nodes, Shape(2, 1, "auto").nodes, Shape(6, 4, "auto").adaptive) == (15, 2, True)


def thrice(run, device, pool):
    """As graphs.record on a GPU: the round runs before it is captured."""
    run(), run()
    return record(run, device, pool)


@pytest.mark.parametrize("rec", [record, thrice])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_places_without_a_request_wait_without_harm(rec, temperature, checkpoints, replayed):
    """They share a seat, in which states gather that nobody reads: more than it holds."""
    target = checkpoints.target()
    with Engine(target, checkpoints.fitted(target, **DIALECTS["nvidia"]), max_batch=4, **AUTO) as engine:
        replayed(engine, rec).warm(None)
        planning(engine, lambda requests: [0])
        p = SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature)
        assert [len(out.ids) for out in engine.generate([[7, 301], [12, 5], [9]], p)] == [60] * 3


def test_a_request_that_leaves_leaves_its_place(checkpoints, replayed):
    """No sampling: a fourth request is there for the drafting round, so the idle seat is not reset with the others."""
    target = checkpoints.target()
    with Engine(target, checkpoints.fitted(target, **DIALECTS["nvidia"]), max_batch=4, **AUTO) as engine:
        replayed(engine).warm(None)
        planning(engine, lambda requests: [4, [0.0] * 9 + [adapt.NEVER] * 52, 0.0] if len(requests) == 4 else [0])
        long, short = SamplingParams(max_tokens=90, ignore_eos=True), SamplingParams(max_tokens=20, ignore_eos=True)
        s = engine.stream([[7, 301], [12, 5], [9]], long)
        for _ in range(60):
            next(s)
        engine.generate([5, 6], short)
        assert sum(len(event.ids) for event in s) > 90

"""Trees, acceptance and the KV move, against walks written out in plain Python."""
from types import SimpleNamespace

import torch
from hypothesis import given, settings, strategies as st

from minispec.batch import Batch
from minispec.cache import Cache
from minispec.errors import MinispecError
from minispec.kernels.choose import Sampling
from minispec.params import SamplingParams
from minispec.speculate import Shape
from minispec.kernels.tree import Pool, plant, select
from minispec.tree import Tree
from minispec.verify import accept

import pytest

SCORES = st.sampled_from([0.0, -0.5, -1.0, -1.0, -2.0, float("-inf")])      # few values, so that ties are the rule


def make_batch(lengths, rooms=None, pages=8, page_size=4):
    count = len(lengths)
    table = torch.randperm(count * pages, generator=torch.Generator().manual_seed(0)).view(count, pages) + 1
    lengths = torch.tensor(lengths)
    rooms = torch.tensor(rooms or [1000] * count)
    sampling = Sampling.build([SamplingParams()] * count, [[1]] * count, [[]] * count, 8)
    return Batch(table, page_size, lengths, torch.arange(count) + 500, rooms, torch.arange(count), int(lengths.max()), 1, sampling)


@st.composite
def pools(draw):
    """A pool as Draft.grow builds it: every level's parents lie in the level before; a child's score is at most its parent's."""
    width, levels = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    scores, parents, depth = [], [], []
    before = [-1]
    for level in range(1, levels + 1):
        now = []
        for parent in before:
            for _ in range(width):
                now.append(len(scores))
                above = 0.0 if parent < 0 else scores[parent]
                scores.append(above + draw(SCORES))
                parents.append(parent)
                depth.append(level)
        before = draw(st.permutations(now))[:width]
    return scores, parents, depth, draw(st.integers(1, min(len(scores), 63))), width


@settings(max_examples=200, deadline=None)
@given(pools())
def test_select_is_closed_under_parents(pool):
    scores, parents, depth, nodes, width = pool
    batch, chosen = make_batch([3], pages=99), select(scores, nodes)
    laid = plant(Pool(*(torch.tensor([part]) for part in (list(range(len(scores))), scores, parents))), nodes, width, batch.pending, batch.length,
                 batch.room, batch.table, 4)
    rows = laid.parents[0, 1:].tolist()
    assert laid.tokens[0].tolist() == [batch.pending.item(), *chosen] and laid.depth[0].tolist() == [0, *(depth[i] for i in chosen)]
    assert len(chosen) == nodes and chosen == sorted(set(chosen))
    for row, entry in enumerate(chosen, 1):
        above = rows[row - 1]
        assert above < row
        assert above == 0 if parents[entry] < 0 else chosen[above - 1] == parents[entry]
    assert sorted((scores[i] for i in chosen), reverse=True) == sorted(scores, reverse=True)[:nodes]      # the best, by value


@st.composite
def trees(draw):
    size = draw(st.integers(1, 9))
    parents = [draw(st.integers(0, i)) for i in range(size)]
    tokens, used = [], {}
    for parent in parents:
        token = draw(st.sampled_from([t for t in range(12) if t not in used.setdefault(parent, set())]))
        used[parent].add(token)
        tokens.append(token)
    return parents, tokens


@settings(max_examples=200, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3).filter(lambda ts: len({len(t[0]) for t in ts}) == 1), st.integers(1, 9), st.randoms())
def test_build_accept_and_commit_equal_a_walk(found, room, random):
    count, size = len(found), len(found[0][0])
    depth = []
    for parents, _ in found:
        ds = []
        for parent in parents:
            ds.append(1 if parent == 0 else ds[parent - 1] + 1)
        depth.append(ds)
    batch = make_batch([random.randrange(1, 12) for _ in range(count)], [room] * count)
    tree = Tree.build(batch, torch.tensor([t for _, t in found]), torch.tensor([p for p, _ in found]), torch.tensor(depth), False)
    choice = torch.tensor([[random.randrange(12) for _ in range(size + 1)] for _ in range(count)])
    for b in range(count):      # make acceptance likely: the choice after a row is often one of its children
        for node, parent in enumerate(found[b][0], 1):
            if random.random() < 0.6:
                choice[b, parent] = found[b][1][node - 1]
    path = accept(tree, choice, None, torch.ones(choice.shape, dtype=torch.bool))

    cache = Cache(2, 64 * count + 64, 1, 1, torch.float32, "cpu")
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    before = cache.data.clone()
    rows = tree.rows(batch)
    cache.commit(batch, path)
    for b in range(count):
        parents, tokens = found[b]
        walk, at = [0], 0
        while True:
            child = next((n for n, p in enumerate(parents, 1) if p == at and tokens[n - 1] == choice[b, at] and depth[b][n - 1] < room), None)
            if child is None:
                break
            walk.append(child)
            at = child
        assert path.count[b] == len(walk)
        assert path.rows[b, :len(walk)].tolist() == walk
        assert path.tokens[b, :len(walk)].tolist() == [choice[b, row] for row in walk]
        length = batch.length[b].item()
        assert rows.positions[b].tolist() == [length + (d if d < room else 0) for d in [0] + depth[b]]
        for node in range(size + 1):
            seen, at = set(), node
            while True:
                seen.add(at)
                if at == 0:
                    break
                at = parents[at - 1]
            valid = ([0] + depth[b])[node] < room
            visible = {i for i in range(rows.view.extent) if rows.view.visible[b, node, i]}
            assert visible == set(range(length)) | ({length + s for s in seen} if valid else set())
        for to, row in enumerate(walk):
            slot = [batch.table[b, i // 4] * 4 + i % 4 for i in (length + to, length + row)]
            assert torch.equal(cache.data[:, slot[0]], before[:, slot[1]])
        kept = [batch.table[b, i // 4] * 4 + i % 4 for i in range(length)]
        assert torch.equal(cache.data[:, kept], before[:, kept])


def test_not_finite_is_no_token():
    batch = make_batch([3, 5])
    tree = Tree.build(batch, torch.tensor([[1], [1]]), torch.tensor([[0], [0]]), torch.tensor([[1], [1]]), True)
    finite = torch.tensor([[True, True], [True, False]])
    assert accept(tree, torch.tensor([[1, 2], [1, 2]]), None, finite).count.tolist() == [2, 0]


def test_63_nodes_use_the_sign_bit():
    batch = make_batch([2], pages=40)
    parents = torch.arange(63)[None]
    tree = Tree.build(batch, torch.arange(63)[None], parents, parents + 1, True)
    visible = tree.rows(batch).view.visible[0]
    assert torch.equal(visible[:, 2:], torch.ones(64, 64).tril().bool()) and visible[:, :2].all()


@pytest.mark.parametrize("shape", [(6, 4, 64), (1, 4, 5), (2, 1, 3), (0, 4, 1), (3, 4, 0), (-1, 4, None), (6, 0, None), (True, 4, None),
                                   (6, 4, 2.0), (40, 4, 6), (64, 1, None)])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(MinispecError, match="draft_steps|topk|nodes"):
        Shape(*shape)


@pytest.mark.parametrize("nodes", ["AUTO", "many", -1, 1.5, True, []])
def test_who_misspells_auto_is_told_how_it_is_spelt(nodes):
    with pytest.raises(MinispecError, match="nodes must be a whole number of at least 0 or auto, not"):
        Shape(6, 4, nodes)


@pytest.mark.parametrize("shape", [(6, 4, None), (0, 4, None), (63, 1, None), (1, 4, 4), (2, 4, 20), (6, 1, 3), (5, 16, 63)])
def test_possible_shapes(shape):
    made = Shape(*shape)
    assert made.nodes == (shape[0] if shape[2] is None else shape[2]) and made.scratch >= made.nodes + 1

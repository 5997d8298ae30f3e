"""Faults that other engines shipped in KV caches, pages and trees, by their number in the list of public reports (B..)."""
import pytest
import torch

from minispec import Engine, MinispecError, SamplingParams

from . import naive, oracle, spy, tiny
from .conftest import assert_close
from .mutants import PROMPT, greedy, mutate
from .tiny_draft import write_draft


def perfect_pair(tmp_path):
    """A target whose layers add nothing, so that each token has one successor, and a draft that holds the same table.

    The draft's rows attend to themselves alone (large equal queries and keys of the embedding) and carry v = embedding - hidden,
    which with the residual leaves the embedding: by construction it agrees always, whatever was recycled.
    """
    source = tiny.write_target(tmp_path / "t", branch=0.0, max_position_embeddings=600)
    target = mutate(source, tmp_path / "target", lambda w: w["model.norm.weight"].fill_(1))
    head = naive.Target(target, torch.float32).head

    def table(w):
        eye, nothing = torch.eye(64), torch.zeros(64, 64)
        for name in w:
            w[name] = torch.ones_like(w[name]) if name.endswith("norm.weight") else torch.zeros_like(w[name])
        w["lm_head.weight"] = head
        w["midlayer.self_attn.k_proj.weight"] = torch.cat([4 * eye, nothing], 1)
        twice = [*range(32), *range(32), *range(32, 64), *range(32, 64)]     # two query heads for each half
        w["midlayer.self_attn.q_proj.weight"] = torch.cat([4 * eye[twice], torch.zeros(128, 64)], 1)
        w["midlayer.self_attn.v_proj.weight"] = torch.cat([eye, -eye], 1)
        out = torch.zeros(64, 128)
        out[:32, :32], out[32:, 64:96] = torch.eye(32), torch.eye(32)
        w["midlayer.self_attn.o_proj.weight"] = out
    return target, mutate(write_draft(tmp_path / "d", target, max_position_embeddings=600), tmp_path / "draft", table)


def test_b34_a_perfect_pair_stays_perfect(tmp_path):
    """Acceptance is exactly 1 for 500 tokens, and again 1 in the round after a forced reject at each depth."""
    target, draft = perfect_pair(tmp_path)
    with Engine(target, draft, draft_steps=4, topk=1, page_size=4) as engine:
        out = engine.generate(PROMPT, greedy(501))
        assert out.accepted == [4] * 100
        for reject in range(1, 5):
            inner, rounds = engine.draft.children, []

            def children(normed, batch, above, topk):
                depth = (above[0, 0] - batch.length[0]).item() + 1
                if depth == 1:
                    rounds.append(batch.length[0].item())
                ids, scores = inner(normed, batch, above, topk)
                return (ids ^ (len(rounds) % 3 == 2 and depth == reject)), scores
            engine.draft.children = children
            again = engine.generate(PROMPT, greedy(120))
            del engine.draft.children
            assert again.ids == out.ids[:120]
            assert all(a == (reject - 1 if i % 3 == 1 else 4) for i, a in enumerate(again.accepted[:-1]))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shape", [dict(draft_steps=3, topk=1), dict(draft_steps=3, topk=3, nodes=8)], ids=["chain", "tree"])
def test_b35_b37_b40_nothing_reads_a_foreign_or_free_slot(shape, page_size, target, draft, checkpoints):
    """Every cache entry that is not committed is NaN before each step: prompts of every length modulo the page, in company."""
    prompts = [torch.randint(2, 512, (n,)).tolist() for n in (*range(1, 10), 16, 17, 32)]
    params = [SamplingParams(max_tokens=10 + i % 5, ignore_eos=True, temperature=(0.0, 0.6)[i % 2], seed=i)
              for i in range(len(prompts))]
    options = dict(page_size=page_size, max_batch=5, chunk=6, max_length=64, **shape)
    with Engine(target, "none") as off, Engine(target, draft, **options) as engine:
        with spy.poisoned(engine):
            outputs = engine.generate(prompts, params)
        for prompt, one, out in zip(prompts, params, outputs):
            oracle.assert_same(off.generate(prompt, one), out, off, one)
        oracle.assert_mixed(outputs, 3)
        engine.scheduler.check()
        assert engine.pages.free == engine.pages.total


def test_b37_identical_prompts_and_a_small_pool(target, draft):
    """More requests than seats, prompts that fill whole pages, some of them the same."""
    prompts = [[9] * 16, list(range(30, 62)), [9] * 16, list(range(30, 62)), list(range(30, 46))]
    shape = dict(draft_steps=4, topk=2)
    with Engine(target, draft, max_batch=2, max_length=80, **shape) as small, Engine(target, draft, **shape) as big:
        a, b = small.generate(prompts, greedy(20)), big.generate(prompts, greedy(20))
    assert [(x.ids, x.accepted) for x in a] == [(x.ids, x.accepted) for x in b]
    assert a[0].ids == a[2].ids and a[1].ids == a[3].ids


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_b38_no_page_is_lost(page_size, target, draft):
    """Requests that end, stop early, fail or are abandoned in the middle of a round leave every page free."""
    with Engine(target, draft, page_size=page_size, max_batch=3, max_length=48, draft_steps=3, topk=2) as engine:
        for i in range(12):
            stream = engine.stream([[i + 2, 5], [i + 3], [4, i + 2, 9], [7]], greedy(8))
            for _ in range(i):
                next(stream, None)
            stream.close()
            engine.scheduler.check()
            assert engine.pages.free == engine.pages.total
        with pytest.raises(MinispecError):
            engine.generate([[1, 2], [3] * 48], greedy(8))
        engine.generate([[1, 2], [3] * 40], greedy(8))
        assert engine.pages.free == engine.pages.total


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_b39_draft_kv_of_a_chunked_prompt(kind, target, checkpoints):
    """The chunk's last row is paired with the next prompt token: draft KV and first proposal do not depend on the chunk."""
    draft = checkpoints.draft(target, dialect="torchspec", attention=kind)
    prompt, seen = torch.randint(2, 512, (40,)).tolist(), {}
    for chunk in (7, 8, 40):
        with Engine(target, draft, chunk=chunk, draft_steps=4, topk=1) as engine, spy.draft_calls(engine) as calls:
            stream = engine.stream(prompt, greedy(8))
            next(stream), next(stream)
            request = engine.scheduler.running[0]
            seen[chunk] = spy.draft_kv(engine, request, 40), spy.first_proposal(engine, calls)
            stream.close()
    for chunk in (7, 8):
        for name, one, other in zip(("draft KV", "first proposal"), seen[40], seen[chunk]):
            assert_close(f"{name}, chunk {chunk}", one, other, 1e-5)


@pytest.mark.parametrize("right", ["last", "first", "alternating"])
@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_b40_accepted_branches_are_moved(kind, right, target, checkpoints, truth):
    """Accepted nodes are rows scattered over the tree (the last child of each parent, say): both caches are made dense again."""
    draft = checkpoints.draft(target, dialect="nvidia", attention=kind, vocab=128)

    def propose(length, depth, topk, rows):
        true = truth[length + depth] if length + depth < len(truth) else 0
        wrong = [t for t in range(8, 8 + topk) if t != true][:topk - 1]
        place = dict(last=topk - 1, first=0, alternating=(length + depth) % topk)[right]
        return [[*wrong[:place], true, *wrong[place:]] for _ in range(rows)]
    with Engine(target, draft, draft_steps=3, topk=3, nodes=21, page_size=4) as engine, \
            spy.script(engine, propose), spy.poisoned(engine):
        out = engine.generate(PROMPT, greedy(60))
        assert out.ids == truth[5:65]
        assert all(a > 0 for a in out.accepted)
        stream = engine.stream(PROMPT, greedy(60))
        for _ in range(8):
            next(stream)
        request = engine.scheduler.running[0]
        kv = spy.draft_kv(engine, request, request.draft_length)
        stream.close()
    with Engine(target, draft, draft_steps=3, topk=1) as engine:
        stream = engine.stream(truth[:len(kv)], greedy(9))
        next(stream), next(stream)
        fresh = spy.draft_kv(engine, engine.scheduler.running[0], len(kv))
        stream.close()
    assert_close("draft KV", fresh, kv, 1e-5)


def test_b40_a_branch_never_costs_acceptance(target, draft):
    """A tree of the same depth with all its nodes contains the chain: as many rounds or fewer."""
    rounds = []
    for shape in (dict(topk=1), dict(topk=2, nodes=14), dict(topk=4, nodes=52)):
        with Engine(target, draft, draft_steps=4, **shape) as engine:
            rounds.append(sum(len(engine.generate([token, 33], greedy(60)).accepted) for token in (5, 90, 200, 431)))
    assert rounds[0] >= rounds[1] >= rounds[2]

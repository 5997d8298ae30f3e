"""Faults that other engines shipped in feedback, positions, caches, trees, verification and stops, by their number in the public reports (B..).

The neighbours: test_faults_loading.py (loading, mapping, capture), test_draft.py (B24, B26-B29, B33-B35 against the definition),
test_lossless.py (B31, B39, B47, B49, B57, B58), test_distribution.py (B41, B43, B44), test_target.py (B23, B55).
"""
import json
import re
from itertools import product

import pytest
import torch

from minispec import Engine, MinispecError, SamplingParams

from . import naive, oracle, spy, tiny
from .conftest import assert_close
from .test_faults_loading import first_logits, mutate
from .tiny_draft import DIALECTS

PROMPT = [7, 301, 45, 12, 99]


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.fixture
def target(checkpoints):
    return checkpoints.target()


@pytest.fixture
def draft(target, checkpoints):
    return checkpoints.fitted(target, **DIALECTS["safeailab"])


@pytest.fixture
def truth(target):
    """The prompt and what plain decoding adds to it."""
    with Engine(target, "none") as engine:
        return PROMPT + engine.generate(PROMPT, greedy(80)).ids


def test_two_calls_do_not_share_parameters(target, draft):
    """A request that takes the place of a finished one must not inherit its page table or sampling."""
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=s) for t, s in ((0.0, 0), (1.0, 1), (1.0, 2), (0.0, 0), (0.7, 1))]
    with Engine(target, draft, draft_steps=3, topk=2, nodes=4) as engine:
        repeated = [engine.generate(PROMPT, one).ids for one in params]
    for ids, one in zip(repeated, params):
        with Engine(target, draft, draft_steps=3, topk=2, nodes=4) as engine:
            assert engine.generate(PROMPT, one).ids == ids
    assert len({tuple(ids) for ids in repeated}) == 4


@pytest.mark.parametrize("flag", ["norm_output", "norm_before_residual"])
def test_b24_feedback_flag_shows_where_it_acts(flag, target, draft):
    """norm_output acts on what is recycled, so the first proposal stays and the second moves; norm_before_residual moves the first too."""
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, draft, **{flag: True})
    assert torch.equal(a[0], b[0]) == (flag == "norm_output")
    assert (a[1] - b[1]).abs().max() > 1e-2
    assert out_a.ids == out_b.ids


def test_b11_k_right_drafts_give_k_plus_one_tokens(target, draft, truth):
    """B11, B67: draft_steps=3 means three draft tokens, and an all-right drafter emits four a round."""
    with Engine(target, draft, draft_steps=3, topk=1) as engine, spy.script(engine, lambda n, d, k, r: [[truth[n + d]]]):
        out = engine.generate(PROMPT, greedy(41))
    assert out.accepted == [3] * 10 and out.ids == truth[5:46]


@pytest.mark.parametrize("right", range(4))
def test_b67_accepted_counts_draft_tokens(right, target, draft, truth):
    def propose(length, depth, topk, rows):
        return [[truth[length + depth] if depth <= right else truth[length + depth] ^ 1]]
    with Engine(target, draft, draft_steps=3, topk=1) as engine, spy.script(engine, propose):
        out = engine.generate(PROMPT, greedy(1 + 5 * (right + 1)))
    assert out.accepted == [right] * 5


@pytest.mark.parametrize("options", [dict(draft_steps=3, topk=1, nodes=4), dict(draft_steps=1, topk=2, nodes=3), dict(topk=0), dict(nodes=0),
                                     dict(draft_steps=-1), dict(draft_steps=2.5), dict(draft_steps=0, nodes=2), dict(topk=True)])
def test_b42_impossible_shapes_are_refused(options, target, draft):
    with pytest.raises(MinispecError, match="nodes|topk|draft_steps"):
        Engine(target, draft, **options)


@pytest.mark.parametrize("steps, topk", product((1, 3), (1, 2, 4)))
def test_b42_every_width_works(steps, topk, target, draft, truth):
    most = topk + (steps - 1) * topk ** 2
    for nodes in sorted({1, topk, steps, min(most, topk * steps + 1), most}):
        with Engine(target, draft, draft_steps=steps, topk=topk, nodes=nodes) as engine:
            out = engine.generate(PROMPT, greedy(30))
        assert out.ids == truth[5:35], (nodes, out.accepted)
        assert sum(out.accepted) > 0


def perfect_pair(tmp_path):
    """A target whose layers add nothing, so that each token has one successor, and a draft that holds the same table.

    The draft's rows attend to themselves alone (large equal queries and keys of the embedding) and carry v = embedding - hidden, which with
    the residual leaves the embedding: by construction it agrees always, whatever was recycled.
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
        w["midlayer.self_attn.q_proj.weight"] = torch.cat([4 * eye[[*range(32), *range(32), *range(32, 64), *range(32, 64)]], torch.zeros(128, 64)], 1)
        w["midlayer.self_attn.v_proj.weight"] = torch.cat([eye, -eye], 1)
        out = torch.zeros(64, 128)
        out[:32, :32], out[32:, 64:96] = torch.eye(32), torch.eye(32)
        w["midlayer.self_attn.o_proj.weight"] = out
    from .tiny_draft import write_draft
    return target, mutate(write_draft(tmp_path / "d", target, max_position_embeddings=600), tmp_path / "draft", table)


def test_b34_a_perfect_pair_stays_perfect(tmp_path):
    """Acceptance is exactly 1 for 500 tokens, and again 1 in the round after a forced reject at each depth."""
    target, draft = perfect_pair(tmp_path)
    with Engine(target, draft, draft_steps=4, topk=1, page_size=4) as engine:
        out = engine.generate(PROMPT, greedy(501))
        assert out.accepted == [4] * 100
        for reject in range(1, 5):
            inner, rounds = engine.draft.children, []

            def children(normed, batch, depth, shape):
                if depth == 1:
                    rounds.append(batch.length[0].item())
                ids, scores = inner(normed, batch, depth, shape)
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
    params = [SamplingParams(max_tokens=10 + i % 5, ignore_eos=True, temperature=(0.0, 0.6)[i % 2], seed=i) for i in range(len(prompts))]
    with Engine(target, "none") as off, Engine(target, draft, page_size=page_size, max_batch=5, chunk=6, max_length=64, **shape) as engine:
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
    with Engine(target, draft, draft_steps=4, topk=2, page_size=16, max_batch=2, max_length=80) as small, Engine(target, draft, draft_steps=4, topk=2) as big:
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
            seen[chunk] = spy.draft_kv(engine, request, 40), spy.head_logits(engine, next(c.normed for c in calls if c.normed is not None))
            stream.close()
    for chunk in (7, 8):
        for name, one, other in zip(("draft KV", "first proposal"), seen[40], seen[chunk]):
            assert_close(f"{name}, chunk {chunk}", one, other, 1e-5)


@pytest.mark.parametrize("right", ["last", "first", "alternating"])
@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_b40_accepted_branches_are_moved(kind, right, target, checkpoints, truth):
    """The true token is the last child of its parent: accepted nodes are scattered rows, and both caches must be made dense again."""
    draft = checkpoints.draft(target, dialect="nvidia", attention=kind, vocab=128)
    path = {}

    def propose(length, depth, topk, rows):
        true = truth[length + depth] if length + depth < len(truth) else 0
        wrong = [t for t in range(8, 8 + topk) if t != true][:topk - 1]
        place = dict(last=topk - 1, first=0, alternating=(length + depth) % topk)[right]
        path[depth] = place
        return [[*wrong[:place], true, *wrong[place:]] for _ in range(rows)]
    with Engine(target, draft, draft_steps=3, topk=3, nodes=21, page_size=4) as engine, spy.script(engine, propose), spy.poisoned(engine):
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
    """The nodes of a wider tree of the same depth contain the chain's wherever the chain is ranked: more is accepted, not less."""
    rounds = []
    for shape in (dict(topk=1), dict(topk=2, nodes=14), dict(topk=4, nodes=52)):
        with Engine(target, draft, draft_steps=4, **shape) as engine:
            rounds.append(sum(len(engine.generate([token, 33], greedy(60)).accepted) for token in (5, 90, 200, 431)))
    assert rounds[0] >= rounds[1] >= rounds[2]


def test_b45_bias_and_penalties_hold_at_every_position(target, draft, truth):
    banned = truth[9]
    with Engine(target, draft, draft_steps=4, topk=2) as engine, Engine(target, "none") as off:
        for params in (SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={banned: -100.0}),
                       SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={banned: float("-inf")}, temperature=1.0),
                       SamplingParams(max_tokens=60, ignore_eos=True, repetition_penalty=1.8),
                       SamplingParams(max_tokens=60, ignore_eos=True, frequency_penalty=2.0, presence_penalty=1.0, temperature=0.6)):
            out = engine.generate(PROMPT, params)
            oracle.assert_same(off.generate(PROMPT, params), out, off, params)
            assert sum(out.accepted) > 0
            assert not params.logit_bias or banned not in out.ids


def test_b45_a_penalty_counts_the_drafted_tokens_before(tmp_path, target, draft, truth):
    """A target that repeats one token; with a presence penalty it may not: position j must see drafted tokens 0..j-1."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=100.0)
    with Engine(target, draft, draft_steps=4, topk=1) as engine:
        token = truth[5]
        with spy.script(engine, lambda n, d, k, r: [[token]]):
            out = engine.generate(PROMPT, params)
    assert len(set(out.ids)) == 20


def test_b48_logprobs_are_those_of_a_plain_forward(target, draft):
    model = naive.Target(target)
    with Engine(target, draft, draft_steps=4, topk=2) as engine:
        for temperature in (0.0, 0.7):
            out = engine.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, logprobs=True, temperature=temperature))
            logits = model.forward(PROMPT + out.ids)[0][len(PROMPT) - 1:-1]
            exact = (logits / (temperature or 1)).log_softmax(-1).gather(1, torch.tensor(out.ids)[:, None])[:, 0]
            assert out.logprobs == pytest.approx(exact.tolist(), abs=1e-4)
            assert sum(out.accepted) > 0


def test_b29_b30_positions_past_the_drafts_own_table(target, checkpoints):
    """The draft's config says 16 positions, the prompt has 40: equal to the definition, and a warning says what it was trained to."""
    draft = checkpoints.draft(target, dialect="specforge", max_position_embeddings=16)
    oracle_target = naive.Target(target)
    definition, prompt = naive.Draft(draft, oracle_target), torch.randint(2, 512, (40,)).tolist()
    logits, states = oracle_target.forward(prompt)
    rows = torch.tensor([*prompt[1:], logits[-1].argmax().item()])
    first, _ = definition.forward(rows, definition.fuse(definition.aux(states)), torch.arange(40), torch.ones(40, 40, dtype=torch.bool).tril())
    with Engine(target, draft, draft_steps=2, topk=1) as engine:
        with spy.draft_calls(engine) as calls:
            engine.generate(prompt, greedy(3))
        assert_close("first proposal", first[-1], spy.head_logits(engine, next(c.normed for c in calls if c.normed is not None))[0], 1e-5)
        assert re.search("(?i)warning.*trained to 16", "\n".join(engine.report))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["llama", "mla"])
@pytest.mark.parametrize("rope", [None, {**tiny.YARN, "original_max_position_embeddings": 1024}])
def test_b29_long_positions(rope, attention, checkpoints):
    """Positions 10, 1,000 and 5,000, with plain rope and YaRN in both models."""
    target = checkpoints.target(max_position_embeddings=8192, num_hidden_layers=7, n_routed_experts=4, rope_scaling=rope)
    draft = checkpoints.draft(target, dialect="specforge", attention=attention, rope_scaling=rope)
    model = naive.Target(target, torch.float32)
    definition = naive.Draft(draft, model, dtype=torch.float32)
    for n in (10, 1000, 5000):
        prompt = torch.randint(2, 512, (n,)).tolist()
        logits, states = model.forward(prompt)
        with Engine(target, draft, draft_steps=2, topk=1, max_batch=1, chunk=512) as engine:
            with spy.draft_calls(engine) as calls:
                out = engine.generate(prompt, greedy(3))
            rows = torch.tensor([*prompt[1:], out.ids[0]])
            first, _ = definition.forward(rows, definition.fuse(definition.aux(states)), torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
            assert_close(f"{n}", first[-1], spy.head_logits(engine, next(c.normed for c in calls if c.normed is not None))[0], 1e-4)


def test_b60_stop_ids_are_the_union_of_all_files(checkpoints, tmp_path, draft):
    """config.json, generation_config.json and tokenizer_config.json name different ids, one as a list; the load says which file said what."""
    target = tiny.write_target(tmp_path / "t", eos_token_id=101)
    tiny.write_tokenizer(target, eos_token="<|special_500|>")
    (target / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[102, 103])))
    with Engine(target, draft) as engine:
        report = "\n".join(engine.report)
        for token, file in ((101, "config.json"), (102, "generation_config.json"), (103, "generation_config.json"), (500, "tokenizer_config.json")):
            assert re.search(rf"{token}\D.*{re.escape(file)}", report), f"{token} from {file} is not in the report"
            out = engine.generate(PROMPT, SamplingParams(max_tokens=5, logit_bias={token: 1000.0}))
            assert (out.ids, out.finish_reason) == ([token], "stop")
            assert len(engine.generate(PROMPT, SamplingParams(max_tokens=5, logit_bias={token: 1000.0}, ignore_eos=True)).ids) == 5
    (target / "generation_config.json").write_text(json.dumps(dict(eos_token_id=512)))
    with pytest.raises(MinispecError, match="512"):
        Engine(target, draft)


def test_b46_ids_stay_in_range(target, draft):
    """Ids outside the vocabulary are refused before anything runs, and one bad prompt leaves nothing half-done."""
    with Engine(target, draft) as engine:
        for prompt in ([1, 512], [-1], [1.5], [True], []):
            with pytest.raises(MinispecError):
                engine.generate([[5, 6], prompt], greedy(4))
        assert engine.pages.free == engine.pages.total and not engine.scheduler.running and not engine.scheduler.waiting


def test_not_finite_logits_are_an_error(target, draft, tmp_path):
    """NaN in the target is named, not decoded as token 0."""
    broken = mutate(target, tmp_path / "x", lambda w: w["model.norm.weight"].mul_(1e38))
    with Engine(broken, draft) as engine, pytest.raises(MinispecError, match="finite"):
        engine.generate(PROMPT, greedy(4))


def test_two_engines_in_one_process(target, draft, checkpoints, truth):
    other = checkpoints.target(seed=5)
    with Engine(target, draft, draft_steps=3, topk=2) as one, Engine(other, draft, draft_steps=4, topk=1) as two:
        alone = two.generate(PROMPT, greedy(20)).ids
        streams = one.stream(PROMPT, greedy(40)), two.stream(PROMPT, greedy(20))
        ids = [[], []]
        for a, b in zip(*streams):
            ids[0] += a.ids
            ids[1] += b.ids
        for out, stream in zip(ids, streams):
            out += [token for event in stream for token in event.ids]
        assert sorted(ids[0])[:1] and ids[1][:20] == alone
        assert one.generate(PROMPT, greedy(40)).ids == truth[5:45]

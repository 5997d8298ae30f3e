"""Faults that other engines shipped in feedback, positions, verification and stops, by their number in the public reports (B..).

The neighbours: test_faults_loading, test_faults_mapping (and capture), test_faults_cache (and trees), test_draft (B24,
B26-B29, B33-B35 against the definition), test_lossless (B31, B39, B47, B49, B57, B58), test_distribution (B41, B43, B44),
test_target (B23, B55).
"""
import json
import re
from itertools import product

import pytest
import torch

from minispec import Engine, MinispecError, SamplingParams

from . import naive, oracle, spy, tiny
from .conftest import assert_close
from .mutants import PROMPT, first_by_definition, first_logits, greedy, mutate


def test_two_calls_do_not_share_parameters(target, draft):
    """A request that takes the place of a finished one must not inherit its page table or sampling."""
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=seed)
              for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2), (0.0, 0), (0.7, 1))]
    with Engine(target, draft, draft_steps=3, topk=2, nodes=4) as engine:
        repeated = [engine.generate(PROMPT, one).ids for one in params]
    for ids, one in zip(repeated, params):
        with Engine(target, draft, draft_steps=3, topk=2, nodes=4) as engine:
            assert engine.generate(PROMPT, one).ids == ids
    assert len({tuple(ids) for ids in repeated}) == 4


@pytest.mark.parametrize("flag", ["norm_output", "norm_before_residual"])
def test_b24_feedback_flag_shows_where_it_acts(flag, target, draft):
    """norm_output acts on what is recycled: the first proposal stays, the second moves. norm_before_residual moves both."""
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


@pytest.mark.parametrize("options", [
    dict(draft_steps=3, topk=1, nodes=4), dict(draft_steps=1, topk=2, nodes=3), dict(topk=0), dict(nodes=0), dict(draft_steps=-1),
    dict(draft_steps=2.5), dict(draft_steps=0, nodes=2), dict(topk=True)])
def test_b42_impossible_shapes_are_refused(options, target, draft):
    with pytest.raises(MinispecError, match="nodes|topk|draft_steps"):
        Engine(target, draft, **options)


@pytest.mark.parametrize("steps, topk", list(product((1, 3), (1, 2, 4))))
def test_b42_every_width_works(steps, topk, target, draft, truth):
    most = topk + (steps - 1) * topk ** 2
    for nodes in sorted({1, topk, steps, min(most, topk * steps + 1), most}):
        with Engine(target, draft, draft_steps=steps, topk=topk, nodes=nodes) as engine:
            out = engine.generate(PROMPT, greedy(30))
        assert out.ids == truth[5:35], (nodes, out.accepted)
        assert sum(out.accepted) > 0


def test_b45_bias_and_penalties_hold_at_every_position(target, draft, truth):
    banned = truth[9]
    with Engine(target, draft, draft_steps=4, topk=2) as engine, Engine(target, "none") as off:
        for options in (dict(logit_bias={banned: -100.0}), dict(logit_bias={banned: float("-inf")}, temperature=1.0),
                        dict(repetition_penalty=1.8), dict(frequency_penalty=2.0, presence_penalty=1.0, temperature=0.6)):
            params = SamplingParams(max_tokens=60, ignore_eos=True, **options)
            out = engine.generate(PROMPT, params)
            oracle.assert_same(off.generate(PROMPT, params), out, off, params)
            assert sum(out.accepted) > 0
            assert not params.logit_bias or banned not in out.ids


def test_b45_a_penalty_counts_the_drafted_tokens_before(target, draft, tmp_path):
    """A target that repeats itself and a penalty that forbids it: position j must see drafted tokens 0..j-1."""
    stuck = mutate(target, tmp_path / "stuck", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    params = SamplingParams(max_tokens=30, ignore_eos=True, presence_penalty=100.0)
    with Engine(stuck, draft, draft_steps=4, topk=1) as engine, Engine(stuck, "none") as off:
        free = off.generate(PROMPT, greedy(30)).ids
        assert len(set(free)) < 5, "without the penalty it repeats"
        truth = PROMPT + off.generate(PROMPT, params).ids

        def propose(length, depth, topk, rows):         # true, except the third of every block, which repeats the second
            return [[(truth + [0] * 9)[length + depth - (depth == 3)]]]
        with spy.script(engine, propose):
            out = engine.generate(PROMPT, params)
        assert out.ids == truth[5:] and len(set(out.ids)) == 30
        assert set(out.accepted[:-1]) == {2}


def test_drafts_share_the_targets_noise(target, draft, monkeypatch):
    """At T > 0 the children of a node carry the noise of the target's choice there; with other noise fewer are accepted."""
    from minispec.kernels import draft_logits

    def accepted():
        params = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(8)]
        with Engine(target, draft, draft_steps=4, topk=1) as engine:
            outputs = engine.generate([PROMPT] * 8, params)
        return sum(sum(out.accepted) for out in outputs), [out.ids for out in outputs]
    shared, ids = accepted()
    noised = draft_logits.noised
    monkeypatch.setattr(draft_logits, "noised", lambda logp, t, seed, positions, ids: noised(logp, t, seed, positions + 1, ids))
    unrelated, same = accepted()
    assert ids == same and shared > 1.3 * unrelated


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
    """The draft's config says 16 positions, the prompt has 40: equal to the definition, and a warning names the 16."""
    draft = checkpoints.draft(target, dialect="specforge", max_position_embeddings=16)
    prompt = torch.randint(2, 512, (40,)).tolist()
    with Engine(target, draft, draft_steps=2, topk=1) as engine:
        with spy.draft_calls(engine) as calls:
            engine.generate(prompt, greedy(3))
        assert_close("first proposal", first_by_definition(target, draft, prompt)[0], spy.first_proposal(engine, calls), 1e-5)
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
            first, _ = definition.chain(rows, definition.fuse(definition.aux(states)))
            assert_close(f"{n} tokens", first[-1], spy.first_proposal(engine, calls), 1e-4)


def test_b60_stop_ids_are_the_union_of_all_files(checkpoints, tmp_path, draft):
    """config.json, generation_config.json and tokenizer_config.json name different ids; the load says which file said what."""
    target = tiny.write_target(tmp_path / "t", eos_token_id=101)
    tiny.write_tokenizer(target, eos_token="<|special_500|>")
    (target / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[102, 103])))
    with Engine(target, draft) as engine:
        report = "\n".join(engine.report)
        origin = {101: "config.json", 102: "generation_config.json", 103: "generation_config.json", 500: "tokenizer_config.json"}
        for token, file in origin.items():
            assert re.search(rf"{token}\D.*{re.escape(file)}", report), f"{token} from {file} is not in the report"
            out = engine.generate(PROMPT, SamplingParams(max_tokens=5, logit_bias={token: 1000.0}))
            assert (out.ids, out.finish_reason) == ([token], "stop")
            out = engine.generate(PROMPT, SamplingParams(max_tokens=5, logit_bias={token: 1000.0}, ignore_eos=True))
            assert (out.ids, out.finish_reason) == ([token] * 5, "length")
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


@pytest.mark.parametrize("prompts", [
    None, 5, (x for x in ["a"]), torch.tensor([5, 6]), b"ab", bytearray(b"ab"), {"a": 1}, {5, 6}, range(3), [None], [[5], {6}], [b"x"]],
    ids=lambda value: type(value).__name__)
def test_prompts_of_another_type(prompts, target):
    """Bytes, a dict or a set would pass for ids or for a list of prompts."""
    with Engine(target, "none") as engine:
        with pytest.raises(MinispecError, match="prompt . is .*; give text or a list of token ids"):
            engine.generate(prompts)
        with pytest.raises(MinispecError):
            engine.score(prompts)
        with pytest.raises(MinispecError, match="not SamplingParams"):
            engine.generate([5], 5)
    with pytest.raises(MinispecError, match="closed"):
        engine.plain()


@pytest.mark.parametrize("options", [dict(draft=5), dict(draft=False), dict(draft=""), dict(target="", draft="none"),
                                     dict(target=5, draft="none"), dict(draft="none", capture=5), dict(capture=5)])
def test_arguments_of_another_type(options, target, draft):
    with pytest.raises(MinispecError, match="target is|draft is|capture is"):
        Engine(**{"target": target, "draft": draft, **options})


@pytest.mark.parametrize("place", ["take", "put"])
def test_an_interrupted_round_ends_its_requests_and_no_others(place, target, draft, monkeypatch):
    """Ctrl-C before or after the buffer of hidden states is read or written: no stream goes on with half of a round."""
    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt
    with Engine(target, draft, draft_steps=3, topk=2, max_batch=2) as engine:
        alone, real = engine.generate(PROMPT, greedy(20)).ids, getattr(engine.hidden, place)
        streams = [engine.stream(PROMPT, greedy(20)) for _ in range(3)]
        next(streams[0]), next(streams[1])
        waiting = engine.stream(PROMPT, greedy(20))
        monkeypatch.setattr(engine.hidden, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
        monkeypatch.undo()
        assert list(streams[0]) == []
        with pytest.raises(MinispecError, match="prompt 0: interrupted at position"):
            list(streams[1])
        assert list(streams[1]) == []
        for stream in (streams[2], waiting):
            assert [token for event in stream for token in event.ids] == alone
        engine.scheduler.check()
        assert engine.pages.free == engine.pages.total


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

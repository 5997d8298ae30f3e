"""The draft layer against the definition at every sub-step, its cache against a full recompute, its positions as tensors."""
from itertools import product

import pytest
import torch

from minispec import Engine, SamplingParams

from . import naive, spy, tiny
from .conftest import assert_close

SMALL = dict(num_hidden_layers=7, n_routed_experts=4)
FUSIONS = ((), ("norm_before_fc",), ("fc_norm",))


def combinations():
    """Every flag with every other, both attentions, q/k norm, full and reduced vocabulary."""
    kinds = (("llama", False), ("llama", True), ("mla", False))
    for residual, fusion, output, (attention, qk), vocab in product(
            ((), ("norm_before_residual",)), FUSIONS, ((), ("norm_output",)), kinds, (None, 128)):
        flags = residual + fusion + output
        name = "-".join([attention + ("-qk" if qk else ""), *flags, "full" if vocab is None else "reduced"])
        yield pytest.param(dict(flags=flags, attention=attention, qk_norm=qk, vocab=vocab,
                                dialect="speculators" if attention == "llama" else "torchspec"), id=name)


def check_rounds(engine, target, draft, prompt, count, least):
    """Generate and compare every forward of the draft layer, its tokens and its positions, with a full recompute in fp64."""
    with spy.draft_calls(engine) as calls:
        out = engine.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    tokens, expected_start = [*prompt, *out.ids], 0
    fused = draft.fuse(draft.aux(target.forward(tokens)[1]))
    guesses = 0
    for call in calls:
        if call.kind == "extend":
            known = call.positions.shape[0]
            start = call.positions[0].item()
            assert start == expected_start, "the extension starts where the last one ended"
            assert call.positions.tolist() == list(range(start, start + known)), "draft row p stands at position p"
            assert call.tokens.tolist() == tokens[start + 1:start + 1 + known], "draft row p embeds the token at p + 1"
            expected_start = start + known
            if call.normed is None:
                continue        # a chunk of the prompt: nothing to propose
            length, paths = expected_start, [()]
        else:
            assert call.length == length
            paths = []
            for i, word in enumerate(call.words.tolist()):
                above = [entry for entry in range(63) if word >> entry & 1]         # entries of this round, itself last
                owners.append(call.tokens[i].item())
                assert above[-1] == len(owners) - 1, "a row sees itself"
                paths.append(tuple(owners[entry] for entry in above))
            depth = len(paths[0])
            assert call.positions.tolist() == [length - 1 + depth] * len(paths), "a recycled row at depth i stands at L - 1 + i"
        if call.kind == "extend":
            owners = []
        for path, normed in zip(paths, call.normed):
            rows, g = torch.tensor([*tokens[1:length + 1], *path]), fused[:length]
            for _ in path:
                g = torch.cat([g, draft.chain(rows[:len(g)], g)[1][-1:]])
            logits, name = draft.chain(rows, g)[0][-1], f"logits after {len(path)} guesses at length {length}"
            assert_close(name, logits, spy.head_logits(engine, normed), 2e-5)
            guesses += len(path) > 0
    assert guesses >= least, "the recycled rows were compared"
    return out


@pytest.mark.parametrize("options", list(combinations()))
def test_every_substep_equals_the_definition(options, checkpoints):
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.draft(target_dir, **options)
    target = naive.Target(target_dir)
    draft = naive.Draft(draft_dir, target)
    assert {flag for flag, value in draft.flags.items() if value} == set(options["flags"])
    with Engine(target_dir, draft_dir, draft_steps=3, topk=1, chunk=4) as engine:
        check_rounds(engine, target, draft, [5, 200, 17, 301, 9, 77], 5, 4)


@pytest.mark.parametrize("options", [
    pytest.param(dict(dialect="specforge", hidden_size=48, head_dim=20), id="llama-narrow"),
    pytest.param(dict(dialect="torchspec", attention="mla", hidden_size=80, v_head_dim=12), id="mla-wide"),
    pytest.param(dict(dialect="nvidia", attention="mla", q_lora_rank=None), id="mla-plain-q"),
    pytest.param(dict(dialect="safeailab", num_key_value_heads=4), id="mha"),
    pytest.param(dict(dialect="safeailab", num_key_value_heads=1), id="one-kv-head"),
    pytest.param(dict(dialect="speculators", capture=(0, 7), flags=("fc_norm",)), id="two-captures-ends"),
    pytest.param(dict(dialect="speculators", capture=(1, 2, 3, 5, 7)), id="five-captures"),
    pytest.param(dict(dialect="specforge", rope_scaling=dict(rope_type="linear", factor=2.0)), id="rope-linear"),
    pytest.param(dict(dialect="specforge", rope_scaling=tiny.YARN, rope_theta=5e4), id="rope-yarn"),
    pytest.param(dict(dialect="torchspec", attention="mla", rope_scaling={**tiny.YARN, "factor": 64.0}), id="mla-yarn"),
    pytest.param(dict(dialect="safeailab", rms_norm_eps=1e-2), id="eps"),
    pytest.param(dict(dialect="safeailab", dtype=torch.float16, vocab=128), id="stored-fp16"),
    pytest.param(dict(dialect="nvidia", attention="mla", dtype=torch.bfloat16, vocab=128, order="frequency"), id="stored-bf16"),
])
def test_shapes_and_rope(options, checkpoints):
    """Widths, heads, captures and rope of their own, over a prompt longer than YaRN's original length."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.draft(target_dir, **options)
    target = naive.Target(target_dir)
    with Engine(target_dir, draft_dir, draft_steps=3, topk=1, chunk=8) as engine:
        check_rounds(engine, target, naive.Draft(draft_dir, target), torch.randint(512, (30,)).tolist(), 3, 4)


@pytest.mark.parametrize("shape", [dict(draft_steps=4, topk=2), dict(draft_steps=3, topk=4, nodes=12), dict(draft_steps=6)])
@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_branches_keep_their_own_history(shape, attention, checkpoints):
    """B31 of sglang's tree: every frontier row sees the committed prefix and its own ancestors, nothing of its cousins."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.fitted(target_dir, dialect="specforge", attention=attention, vocab=384)
    target = naive.Target(target_dir)
    with Engine(target_dir, draft_dir, chunk=5, **shape) as engine:
        out = check_rounds(engine, target, naive.Draft(draft_dir, target), [5, 200, 17, 301, 9, 77, 8], 16, 6)
    assert sum(out.accepted) > 0


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_prompt_lengths_around_a_page(length, checkpoints):
    """B28, B35: one token, and prompts that end before, on and after a page's edge."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.draft(target_dir, vocab=128)
    target = naive.Target(target_dir)
    with Engine(target_dir, draft_dir, draft_steps=3, topk=1, page_size=16) as engine:
        check_rounds(engine, target, naive.Draft(draft_dir, target), torch.randint(512, (length,)).tolist(), 4, 4)


def plain_ids(target_dir, prompt, count):
    with Engine(target_dir, "none") as engine:
        return engine.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True)).ids


@pytest.mark.parametrize("attention", ["llama", "mla"])
@pytest.mark.parametrize("right", range(7))
def test_cache_after_rounds_of_every_kind(right, attention, checkpoints):
    """B33, B34: rounds in which `right` of 6 draft tokens are accepted leave the cache of one prefill of the same tokens."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.draft(target_dir, attention=attention, dialect="nvidia", vocab=128)
    prompt, kv = [5, 200, 17, 301, 9], {}
    truth = prompt + plain_ids(target_dir, prompt, 40)

    def propose(length, depth, topk, rows):
        return [[truth[length + depth] if depth <= right else (truth[length + depth] + 1) % 512]]
    with Engine(target_dir, draft_dir, draft_steps=6, topk=1, page_size=4) as engine, \
            spy.script(engine, propose), spy.poisoned(engine):
        keep(engine, kv, "rounds")
        out = engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    assert out.ids == truth[len(prompt):][:30] and set(out.accepted[:-1]) == {right}
    with Engine(target_dir, draft_dir, draft_steps=6, topk=1, page_size=4) as engine:
        keep(engine, kv, "prefill")
        engine.generate(truth[:len(prompt) + 29], SamplingParams(max_tokens=2, ignore_eos=True))
    n = min(len(kv["rounds"]), len(kv["prefill"]))
    assert n >= len(prompt) + 16
    assert_close("draft KV", kv["prefill"][:n], kv["rounds"][:n], 1e-5)


def keep(engine, kv, name):
    """After every step remember the draft KV that is committed by then."""
    step = engine._step

    def after():
        running = list(engine.scheduler.running)
        step()
        for request in running or engine.scheduler.running:
            if request.pages and request.draft_length:
                kv[name] = spy.draft_kv(engine, request, request.draft_length)
    engine._step = after


def test_the_same_prefix_gives_the_same_drafts(checkpoints):
    """B33: histories that differ only in what was accepted when propose the same afterwards."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.fitted(target_dir, dialect="safeailab", vocab=384)
    prompt = [5, 200, 17]
    ids = plain_ids(target_dir, prompt, 24)
    proposals = []
    for cut in (0, 7, 12):
        with Engine(target_dir, draft_dir, draft_steps=4, topk=1) as engine, spy.draft_calls(engine) as calls:
            engine.generate(prompt + ids[:cut], SamplingParams(max_tokens=24 - cut, ignore_eos=True))
            proposals.append({call.positions[-1].item(): spy.head_logits(engine, call.normed)
                              for call in calls if call.kind == "extend" and call.normed is not None})
    shared = set.intersection(*(set(p) for p in proposals))
    assert shared
    for length in shared:
        assert_close(f"first proposal at {length}", proposals[0][length], proposals[1][length], 1e-5)


def test_history_matters(checkpoints):
    """B27: the same last token and nearly the same state after two prefixes give different drafts, those of the definition."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.draft(target_dir, vocab=128)
    target = naive.Target(target_dir)
    draft = naive.Draft(draft_dir, target)
    seen = []
    for prefix in ([5, 6, 7, 8], [400, 300, 200, 100]):
        with Engine(target_dir, draft_dir, draft_steps=2, topk=1) as engine:
            with spy.draft_calls(engine) as calls:
                engine.generate([*prefix, 9, 10], SamplingParams(max_tokens=2, ignore_eos=True))
            seen.append(spy.head_logits(engine, next(c.normed for c in calls if c.normed is not None)))
            check_rounds(engine, target, draft, [*prefix, 9, 10], 2, 1)
    assert (seen[0] - seen[1]).abs().max() > 1e-3


def test_hidden_buffer_holds_each_requests_own_states(checkpoints):
    """B50: in a batch, after every step, a seat holds the states of its own request's newest tokens, and the token after each."""
    target_dir = checkpoints.target(**SMALL)
    draft_dir = checkpoints.fitted(target_dir, dialect="specforge", vocab=384)
    prompts = [[5, 200, 17, 301, 9], [44], [100, 101, 102]]
    with Engine(target_dir, draft_dir, draft_steps=4, topk=3, nodes=9, max_batch=3) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        target = naive.Target(target_dir)
        states = [torch.cat([target.forward(p + out.ids)[1][i] for i in engine.capture], -1) for p, out in zip(prompts, outputs)]
        checked = set()
        for _ in engine.stream(prompts, SamplingParams(max_tokens=24, ignore_eos=True)):
            for request in engine.scheduler.running:
                count = request.length - engine.hidden.first[request.slot].item() if request.ids else 0
                tokens = request.prompt_ids + request.ids
                for k in range(3 * (count > 0)):
                    true = states[request.index][request.length - count:request.length, 64 * k:64 * k + 64]
                    assert_close(f"part {k} of request {request.index}", true, engine.hidden.part(k, request.slot)[:count], 1e-5)
                assert engine.hidden.next[request.slot, :count].tolist() == tokens[request.length - count + 1:request.length + 1]
                checked.add((request.index, count))
    assert {index for index, _ in checked} == {0, 1, 2} and len({count for _, count in checked}) > 2

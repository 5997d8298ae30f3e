"""The default pair against a separate implementation (no cache, everything recomputed): ids and accepted counts, exactly."""
import json
from pathlib import Path

import pytest

from minispec import Engine, SamplingParams

from . import naive, naive_rounds, oracle
from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET
from .tiny_draft import DIALECTS

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference.json").read_text())


@pytest.fixture(scope="module")
def engine():
    with Engine(DEFAULT_TARGET, DEFAULT_DRAFT, dtype="float32", draft_steps=6, topk=1) as engine:
        yield engine


def check(engine, case, out):
    """Equal ids and accepted counts; True when no tie cut the comparison short. A tie is printed. engine: for the gap at a tie."""
    ids, accepted = case["ids"], case["accepted"]
    assert out.prompt_ids == case["prompt_ids"] and len(out.ids) >= len(ids)
    same = next((i for i, (a, b) in enumerate(zip(ids, out.ids)) if a != b), len(ids))
    if same < len(ids):
        gap = oracle.choice_gap(out.prompt_ids, ids[:same], engine, SamplingParams())
        assert gap < oracle.TIE, f"{case['prompt']!r}: ids differ at {same}, where the two best logits are {gap:.3g} apart"
        print(f"{case['prompt']!r}: a tie at {same}, gap {gap:.2g}")
    rounds, emitted = 0, 1      # of the rounds that both sides finished with equal ids
    while rounds < len(accepted) and emitted + accepted[rounds] + 1 <= same:
        emitted += accepted[rounds] + 1
        rounds += 1
    assert out.accepted[:rounds] == accepted[:rounds]
    assert same < len(ids) or rounds == len(accepted)
    return same == len(ids)


def test_the_reference_is_the_one_that_is_documented():
    rounds, accepted = sum(len(case["accepted"]) for case in REFERENCE), sum(sum(case["accepted"]) for case in REFERENCE)
    assert len(REFERENCE) == 12 and rounds == 261 and round(1 + accepted / rounds, 2) == 4.51


def test_one_at_a_time(engine):
    """Ids and accepted draft tokens of every round, 12 prompts as text, chain of 6."""
    whole = 0
    for case in REFERENCE:
        out = engine.generate(case["prompt"], SamplingParams(max_tokens=len(case["ids"]), ignore_eos=True))
        whole += check(engine, case, out)
    assert whole >= 10


def test_all_in_one_batch(engine):
    """The same from ids, eight at once."""
    params = [SamplingParams(max_tokens=len(case["ids"]), ignore_eos=True) for case in REFERENCE]
    outputs = engine.generate([case["prompt_ids"] for case in REFERENCE], params)
    assert sum(check(engine, case, out) for case, out in zip(REFERENCE, outputs, strict=True)) >= 10


@pytest.mark.parametrize("shape", [(6, 1, 6), (4, 2, 6), (3, 4, 14), (5, 3, 3), (2, 4, 20)], ids=str)
@pytest.mark.parametrize("dialect", ["safeailab", "nvidia"])
def test_chains_and_trees_by_definition(dialect, shape, checkpoints):
    """Greedy ids and the accepted count of every round of a small pair, from the definition of the tree."""
    target_dir = checkpoints.target()
    draft_dir, (steps, topk, nodes) = checkpoints.fitted(target_dir, **DIALECTS[dialect]), shape
    target = naive.Target(target_dir)
    draft = naive.Draft(draft_dir, target)
    with Engine(target_dir, draft_dir, draft_steps=steps, topk=topk, nodes=nodes) as engine:
        for prompt in ([7, 301, 45], [12]):
            out = engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
            ids, accepted = naive_rounds.generate(target, draft, prompt, 24, steps, topk, nodes)
            assert (out.ids, out.accepted) == (ids, accepted)
            assert sum(accepted) > 0 and min(accepted[:-1]) < min(steps, nodes)

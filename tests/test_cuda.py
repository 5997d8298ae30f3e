"""The engine on a CUDA device, in fp32: the reference by chain, speculation on equals off, and what the CPU says."""
import pytest
import torch

from minispec import Engine, SamplingParams
from minispec.bench.trace import Trace

from . import oracle, test_reference
from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET
from .test_reference import REFERENCE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = {"chain": dict(draft_steps=6, topk=1), "tree": dict(draft_steps=4, topk=4, nodes=12)}
IDS = [case["prompt_ids"] for case in REFERENCE]
SAMPLED = [SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=i, logprobs=i % 2 == 0) for i in range(len(IDS))]


def open_pair(device, draft=DEFAULT_DRAFT, **shape):
    return Engine(DEFAULT_TARGET, draft, device=device, dtype="float32", **shape)


def test_engine_on_cuda():
    with open_pair("cpu", **SHAPES["chain"]) as cpu, open_pair("cuda", "none") as off:
        greedy = [SamplingParams(max_tokens=len(case["ids"]), ignore_eos=True) for case in REFERENCE]
        plain, there = off.generate(IDS, SAMPLED), cpu.generate(IDS, SAMPLED)
        whole = sum(oracle.assert_same(one, two, cpu, params) for one, two, params in zip(there, plain, SAMPLED, strict=True))
        assert whole >= 10, "plain on CUDA is plain on the CPU"
        for name, shape in SHAPES.items():
            with open_pair("cuda", **shape) as on:
                assert {tensor.device.type for part in (on.target, on.draft) for tensor in part.parameters.values()} == {"cuda"}
                if name == "chain":
                    outputs = on.generate(IDS, greedy)
                    assert sum(test_reference.check(cpu, case, out) for case, out in zip(REFERENCE, outputs, strict=True)) >= 10
                    alone = on.generate(IDS[0], greedy[0])
                    assert not test_reference.check(cpu, REFERENCE[0], alone) or alone.ids == outputs[0].ids
                outputs = on.generate(IDS, SAMPLED)
                whole = [oracle.assert_same(one, two, cpu, params) for one, two, params in zip(plain, outputs, SAMPLED, strict=True)]
                assert sum(whole) >= 10, "on is off"
                oracle.assert_mixed(outputs, shape["draft_steps"])
                on.scheduler.check()
                assert on.pages.free == on.pages.total


def test_default_dtype_on_cuda():
    """bf16: as many tokens as asked for, some of them guessed, and the same in a second run."""
    with Engine(device="cuda") as engine:
        assert "device cuda, dtype bfloat16" in engine.report[0]
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        outputs = engine.generate(IDS, params)
        assert {len(out.ids) for out in outputs} == {64} and [out.ids for out in engine.generate(IDS, params)] == [out.ids for out in outputs]
        oracle.assert_mixed(outputs, 6)


def test_rounds_looked_into_on_cuda():
    """Marks inside of a graph: the router's choices are those of rounds without one, times are positive and add up."""
    seen, params = [], SamplingParams(max_tokens=40, ignore_eos=True)
    for graphs in (False, True):
        with open_pair("cuda", cuda_graphs=graphs, **SHAPES["tree"]) as engine:
            expected = engine.generate(IDS[0], params)
            with Trace(engine) as trace:
                for _ in range(2):
                    rounds = trace.rounds(IDS[0], params)
            assert len(rounds) == len(expected.accepted) and engine.generate(IDS[0], params) == expected
            assert all(0 < one.draft < one.total and 0 < one.verify < one.total for one in rounds)
            seen.append([one.experts for one in rounds])
    assert seen[0] == seen[1] and max(seen[0]) > 4

"""Two GPUs over nccl, in fp32, rounds in CUDA graphs with the collectives inside: what they say equals what one GPU says."""
import pytest
import torch

from minispec import Engine

from . import spmd
from .test_ranks import RUNS, compare, pairs  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CUDA = dict(device="cuda", dtype="float32", max_batch=3)


@pytest.fixture(scope="module")
def two(pairs, tmp_path_factory):  # noqa: F811
    """{run: what each rank found}, one after another: programs that share two GPUs wait for each other at every collective."""
    jobs = [(name, spmd.told, dict(target=pairs[pair][0], draft=pairs[pair][1], **CUDA, **shape, **options))
            for name, (pair, shape, options) in RUNS.items()]
    return spmd.run(2, tmp_path_factory.mktemp("two"), jobs)


@pytest.mark.parametrize("name", RUNS)
def test_two_gpus(name, pairs, two):  # noqa: F811
    pair, shape, _ = RUNS[name]
    target, draft = pairs[pair]
    one = spmd.told(target, draft, **CUDA, **shape)
    accepted = [count for out in one["free"] for count in out.accepted]
    if shape.get("draft_steps", 6):
        assert sum(accepted) and min(accepted) < shape.get("draft_steps", 6)
    with Engine(target, "none", **CUDA) as engine:
        compare(one, two[name][0], two[name][1:], engine, shape.get("nodes") == "auto")

"""Two GPUs over nccl, in fp32, rounds in CUDA graphs with the collectives inside: what they say equals what one GPU says."""
import pytest
import torch

from minispec import Engine

from . import spmd
from .test_ranks import RUNS, compare, pairs  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CUDA = dict(device="cuda", dtype="float32", max_batch=3)


@pytest.mark.parametrize("name", RUNS)
def test_two_gpus(name, pairs, tmp_path):  # noqa: F811
    pair, shape, options = RUNS[name]
    target, draft = pairs[pair]
    found = spmd.run(2, tmp_path, [(name, spmd.told, dict(target=target, draft=draft, **CUDA, **shape, **options))])[name]
    one = spmd.told(target, draft, **CUDA, **shape)
    accepted = [count for out in one["free"] for count in out.accepted]
    if shape.get("draft_steps", 6):
        assert sum(accepted) and min(accepted) < shape.get("draft_steps", 6)
    with Engine(target, "none", **CUDA) as engine:
        compare(one, found[0], found[1:], engine)

"""What fits: the plan's table, the memory that a container leaves, and names of devices and dtypes."""
import random
import re

import pytest
import torch

from minispec import Engine, MinispecError, SamplingParams
from minispec import device as devices
from minispec import runner as runners
from minispec.device import HEADROOM, available, plan, resolve_device, resolve_dtype, size, weight_bytes

CPU, PHYSICAL = torch.device("cpu"), 64 << 30
# 1 MB of weights and 10 kB a token; of 6 MB 90 % may be used, which leaves 4.4 MB: 440 tokens, 20 of them for a tree
MODEL = dict(weights=1_000_000, token=10_000, batch=2, context=500, scratch=20)


@pytest.mark.parametrize("free, length, expected, reason", [
    (100_000_000, None, (500, 1040), "context"),
    (6_000_000, None, (420, 440), "6.0 MB"),
    (6_889_000, None, (500, 520), "context"),           # fits just so
    (6_888_000, None, (499, 519), "6.9 MB"),
    (6_000_000, 100, (100, 240), "as asked"),
    (6_000_000, 300, (300, 440), "as asked"),           # one at full length, two share what there is
    (6_000_000, 420, (420, 440), "as asked"),
    (1_356_000, None, (2, 22), "1.4 MB"),               # the smallest
])
def test_plan(free, length, expected, reason):
    *found, why = plan(free, length=length, **MODEL)
    assert tuple(found) == expected and reason in why
    assert ("memory" in why) == (length is None and found[0] < 500)


@pytest.mark.parametrize("free, length, says", [
    (1_355_000, None, ["1.4 MB"]),                      # the weights, but no cache
    (500_000, None, ["0.5 MB"]),
    (0, None, ["0.0 MB"]),
    (6_000_000, 421, ["max_length=421", "max_length=420", "5.4 MB", "6.0 MB"]),
    (6_000_000, 500, ["max_length=500", "max_length=420", "6.2 MB", "6.0 MB"]),
    (100_000_000, 501, ["max_length=501", "max_position_embeddings=500"]),
])
def test_plan_refuses(free, length, says):
    with pytest.raises(MinispecError) as refused:
        plan(free, length=length, **MODEL)
    assert all(figure in str(refused.value) for figure in says), refused.value


def test_a_plan_is_never_past_the_memory_and_holds_its_longest_request():
    draw, planned = random.Random(0), 0
    for _ in range(2000):
        free, weights, token = draw.randrange(10**6), draw.randrange(5 * 10**5), draw.randrange(1, 2000)
        batch, context, scratch = draw.randrange(1, 9), draw.randrange(2, 2000), draw.randrange(80)
        length = draw.choice([None, draw.randrange(1, 2000)])
        try:
            longest, tokens, _ = plan(free, weights, token, batch, length, context, scratch)
        except MinispecError:
            continue
        planned += 1
        assert weights + token * tokens <= free * HEADROOM and longest <= context and (length is None or longest == length)
        assert longest + scratch <= tokens <= batch * (longest + scratch)
    assert planned > 200


def test_weight_bytes_and_size():
    assert weight_bytes({"a": (3, 5), "b": (7,)}, torch.float32) == 88 and weight_bytes({"a": (3, 5)}, torch.bfloat16) == 30
    assert (size(0), size(1_550_000), size(2_345_000_000)) == ("0.0 MB", "1.6 MB", "2.35 GB")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(file=text, ...) writes a fake cgroup tree; physical memory and MemAvailable are large unless `meminfo` says less."""
    group, meminfo = tmp_path / "cgroup", tmp_path / "meminfo"
    (group / "memory").mkdir(parents=True)
    monkeypatch.setattr(devices, "CGROUP", group)
    monkeypatch.setattr(devices, "Path", lambda path: meminfo if path == "/proc/meminfo" else pytest.fail(path))
    monkeypatch.setattr(devices.os, "sysconf", {"SC_PHYS_PAGES": PHYSICAL // 4096, "SC_PAGE_SIZE": 4096}.get)

    def write(files, kilobytes=PHYSICAL // 1024):
        if kilobytes:
            meminfo.write_text(f"MemTotal:       99999999 kB\nMemFree:            1 kB\nMemAvailable:   {kilobytes} kB\nCached: 5 kB\n")
        for name, text in files.items():
            (group / name).write_text(f"{text}\n")
        return available(CPU)

    return write


V2 = {"memory.max": 5_000_000, "memory.current": 3_000_000, "memory.stat": "anon 1\ninactive_file 700000\nactive_file 99\ntotal_inactive_file 5"}
V1 = {"memory/memory.limit_in_bytes": 4_000_000, "memory/memory.usage_in_bytes": 1_000_000,
      "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 250000\nhierarchical_memory_limit 4000000"}


@pytest.mark.parametrize("files, kilobytes, expected", [
    pytest.param({}, None, PHYSICAL, id="neither /proc nor cgroups"),
    pytest.param({}, 3000, 3000 * 1024, id="MemAvailable is in kB"),
    pytest.param(V2, 3000, 2_700_000, id="version 2, files read count as free"),
    pytest.param(V1, None, 3_250_000, id="version 1"),
    pytest.param(V2 | V1, 9000, 2_700_000, id="both: the least"),
    pytest.param(V2 | {"memory.max": "max"}, 3000, 3000 * 1024, id="version 2 without a limit"),
    pytest.param(V1 | {"memory/memory.limit_in_bytes": 9223372036854771712}, 3000, 3000 * 1024, id="version 1 without a limit"),
    pytest.param(V2, 1000, 1000 * 1024, id="the host has less than the limit leaves"),
])
def test_available(files, kilobytes, expected, machine):
    assert machine(files, kilobytes) == expected


def test_available_here_and_on_cuda(monkeypatch):
    assert 0 < available(CPU) < 1 << 50
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9) if device.index == 1 else pytest.fail(device))
    assert available(torch.device("cuda:1")) == 7


@pytest.fixture
def cudas(monkeypatch):
    """cudas(n): torch shows n CUDA devices."""
    def show(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return show


def test_resolve_device(cudas):
    cudas(0)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    cudas(2)
    assert resolve_device("auto") == torch.device("cuda") and resolve_device("cpu") == CPU
    assert [resolve_device(name).index for name in ("cuda", "cuda:0", "cuda:1")] == [None, 0, 1]


@pytest.mark.parametrize("count, name, says", [
    (0, "cuda", "0 CUDA devices"), (0, "cuda:0", "0 CUDA devices"), (2, "cuda:2", "2 CUDA devices"),
    *((2, name, "not known") for name in ("tpu", "meta", "mps", "", "cuda:x", "cuda:-1", "CPU", None, ["cpu"]))])
def test_resolve_device_refuses(count, name, says, cudas):
    cudas(count)
    with pytest.raises(MinispecError) as refused:
        resolve_device(name)
    assert says in str(refused.value) and repr(name) in str(refused.value)


def test_resolve_dtype():
    assert resolve_dtype("auto", CPU) == torch.float32 and resolve_dtype("auto", torch.device("cuda:1")) == torch.bfloat16
    for name, dtype in (("float16", torch.float16), ("torch.bfloat16", torch.bfloat16), (torch.float32, torch.float32)):
        assert resolve_dtype(name, CPU) == resolve_dtype(name, torch.device("cuda")) == dtype


@pytest.mark.parametrize("name", ["float64", "int8", "", "fp16", None, 16, torch.float64, "nn"])
def test_resolve_dtype_refuses(name):
    with pytest.raises(MinispecError, match="dtype .* is not known; give .*bfloat16"):
        resolve_dtype(name, CPU)


def test_too_little_memory_is_said_before_anything_is_allocated(target, monkeypatch):
    def allocated(*_):
        pytest.fail("allocated before the refusal")

    for name in ("Target", "Cache", "HiddenBuffer"):
        monkeypatch.setattr(runners, name, allocated)
    for free, length in ((300_000, None), (2_500_000, 256)):
        monkeypatch.setattr(runners, "available", lambda device: free)
        with pytest.raises(MinispecError, match=r"\d\.\d MB"):
            Engine(target, "none", max_length=length)


def test_an_engine_takes_what_memory_holds_and_says_so(target, monkeypatch):
    with Engine(target, "none") as whole:
        weights = sum(tensor.nbytes for tensor in whole.target.parameters.values())
        assert whole.max_length == 256 and "max_length 256 (the target's context)" in whole.report[-1]
    token = 8 * 24 * 4                                  # layers, latent and rope channels, fp32
    free = round((weights + 120 * token) / HEADROOM)
    monkeypatch.setattr(runners, "available", lambda device: free)
    with Engine(target, "none") as engine:
        assert 80 < engine.max_length <= 120
        assert f"max_length {engine.max_length} (" in engine.report[-1] and "MB of free memory" in engine.report[-1]
        cache = engine.pages.count * engine.pages.page_size * token
        assert weights + cache <= free
        prompts = [[5, 9, 4]] * 3                        # they share a cache for one
        for out in engine.generate(prompts, SamplingParams(max_tokens=engine.max_length, ignore_eos=True)):
            assert len(out.ids) == engine.max_length - 3 and out.finish_reason == "length"
    with pytest.raises(MinispecError, match="max_length=200 .* fits") as refused:
        Engine(target, "none", max_length=200)
    fits = int(re.search(r"max_length=(\d+) fits", str(refused.value))[1])
    with Engine(target, "none", max_length=fits - 4) as engine:         # tables of positions grow with the length, a little
        assert engine.max_length == fits - 4 and "as asked" in engine.report[-1]

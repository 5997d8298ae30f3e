"""Seeds, one thread, memory that is NaN until written, and the checkpoints that several test files share."""
import json
import os
import signal
import sys
import threading
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")      # before a kernel is decorated

from minispec import speculate  # noqa: E402

from . import tiny, tiny_draft  # noqa: E402

speculate.USUAL = None      # a tree of as many nodes as levels where a test asks for none: of how many `auto` has, the clock decides

ROOT = Path(__file__).parents[1]
DEFAULT_TARGET, DEFAULT_DRAFT = ROOT / "weights" / "default" / "target", ROOT / "weights" / "default" / "draft"
PACKAGE = tuple(str(ROOT / name) for name in ("minispec", "kernels", "weights"))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: exhaustive sweeps, run before an issue is closed (CI selects -m 'not slow')")
    config.option.markexpr = config.option.markexpr or "not slow"
    torch.set_num_threads(1)


def poison(function):
    """torch's uninitialised memory, asked for by the package, comes filled with NaN (integers with a value no table can hold)."""
    def wrapped(*args, **kwargs):
        out = function(*args, **kwargs)
        if sys._getframe(1).f_code.co_filename.startswith(PACKAGE) and out.numel():
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype in (torch.int32, torch.int64):
                out.fill_(torch.iinfo(out.dtype).min // 2)
        return out
    return wrapped


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)        # the command line, run in this process, leaves its own
    torch.manual_seed(0)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


def assert_close(name, reference, out, tolerance):
    """Relative root mean square error of `out` under `tolerance`; NaN and infinity only where the reference has them."""
    assert reference.shape == out.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(reference.shape)}"
    reference, out = reference.double(), out.double()
    finite = reference.isfinite()
    assert torch.equal(finite, out.isfinite()), f"{name}: {(finite != out.isfinite()).sum()} values are wrongly (not) finite"
    reference, out = reference[finite], out[finite]
    if not reference.numel():
        return
    error = (out - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp(min=1e-12)
    worst = (out - reference).abs().max()
    assert error <= tolerance, f"{name}: relative error {error:.3g} over {tolerance:.3g}, largest difference {worst:.3g}"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Writes a checkpoint once a session: .target(**options), .draft(target, **options), .fitted(target, **options)."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


class Checkpoints:
    def __init__(self, root):
        self.root, self.known = root, {}

    def once(self, kind, options, build):
        key = kind + json.dumps(options, sort_keys=True, default=str)
        if key not in self.known:
            self.known[key] = build(self.root / f"{kind}{len(self.known)}")
        return self.known[key]

    def target(self, **options):
        return self.once("target", options, lambda path: tiny.write_target(path, **options))

    def draft(self, target, **options):
        return self.once("draft", {**options, "target": target}, lambda path: tiny_draft.write_draft(path, target, **options))

    def fitted(self, target, **options):
        def build(path):
            tiny_draft.write_draft(path, target, **options)
            tiny_draft.fit(path, target)
            return path
        return self.once("fitted", {**options, "target": target}, build)


@pytest.fixture
def target(checkpoints):
    return checkpoints.target()


@pytest.fixture
def draft(target, checkpoints):
    """A fitted draft: Llama attention, 384 of 512 ids, the target's embedding, a head of its own."""
    return checkpoints.fitted(target, **tiny_draft.DIALECTS["safeailab"])


@pytest.fixture
def truth(target):
    """PROMPT and what plain greedy decoding adds to it."""
    from minispec import Engine

    from .mutants import PROMPT, greedy
    with Engine(target, "none") as engine:
        return PROMPT + engine.generate(PROMPT, greedy(80)).ids

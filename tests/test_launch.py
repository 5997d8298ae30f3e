"""Ranks as processes: the same ids by every way to start them, and one end for all: one line that says which rank and why, nobody left."""
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

import pytest

from minispec import Engine, MinispecError, SamplingParams, launch

from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET, ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes that are left in /proc")
PROMPTS = ["def fibonacci(n):", "import os\n"]
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=5, logit_bias={328: -1.5}, stop=("@@@",))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "minispec")
LINE = "minispec: error: "
# runs in a rank before anything else; FAULT is what it does when its `AT`-th command begins
CUSTOM = """
import os, signal, time
if os.environ.get("RANK", "0") == os.environ.get("FAULTY"):
    from minispec.errors import MinispecError
    from minispec.watch import Team
    begin = Team.begin
    def faulty(self, what):
        out = begin(self, what)
        if self.at[0] == int(os.environ["AT"]):
            exec(os.environ["FAULT"])
        return out
    Team.begin = faulty
"""
LOADING, STEP = 1, 12       # commands: options, two prompts, then steps


class Processes:
    """Marks the environment, so that everything which is started below can be found again."""

    def __init__(self, tmp_path, monkeypatch):
        self.path, self.mark, self.monkeypatch = tmp_path, f"MINISPEC_TEST={tmp_path}", monkeypatch
        (tmp_path / "sitecustomize.py").write_text(CUSTOM)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET"):      # the ranks are without Triton, as a user's on a CPU
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MINISPEC_TEST", str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def fault(self, code, rank=1, at=STEP):
        for name, value in (("FAULT", code), ("FAULTY", rank), ("AT", at)):
            self.monkeypatch.setenv(name, str(value))

    def alive(self):
        """Ids of marked processes; the ones that ended and wait to be fetched have no environment any more."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
            except OSError:
                pass
        return found

    def wait_until(self, count, seconds=20):
        until = monotonic() + seconds
        while len(self.alive()) != count and monotonic() < until:
            sleep(0.02)
        assert len(self.alive()) == count

    def command(self, *arguments, env={}, cwd=ROOT):
        return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=cwd, env={**os.environ, **env}, text=True, start_new_session=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def generate(self, *options, start=("-m", "minispec"), tokens=16, **how):
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        return self.command(*start, "generate", *prompts, "--max-tokens", tokens, "--max-length", 1024, "--ignore-eos", *options, **how)


@pytest.fixture
def processes(tmp_path, monkeypatch):
    found = Processes(tmp_path, monkeypatch)
    yield found
    left = found.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"{len(left)} processes were left"


def ended(child, processes, status, says, seconds=30):
    """Ends within the time with this status, after one line that says so, without a traceback, and leaves nobody."""
    out, err = child.communicate(timeout=seconds)
    ours = [line for line in err.splitlines() if line.startswith(LINE) or line == "minispec: interrupted"]
    assert child.returncode == status, err
    assert len(ours) == 1 and says in ours[0], err
    assert "Traceback" not in err
    processes.wait_until(0, 3)
    return out, err


def pair(**options):
    return Engine(max_length=1024, nodes=6, **options)         # the ranks that it starts know nothing of conftest


@pytest.fixture(scope="module")
def alone():
    with pair() as engine:
        return {"greedy": engine.generate(PROMPTS, GREEDY), "sampled": engine.generate(PROMPTS, SAMPLED),
                "logits": engine.score(PROMPTS[0]).logits}


def test_engine_of_two_ranks_says_what_one_says(processes, alone):
    """Also where streams are read in turns and left early, with a plain engine beside it, and with two engines in one process."""
    import torch

    with pair(tensor_parallel=2) as engine, pair(tensor_parallel=2) as other:
        assert len(processes.alive()) == 2
        assert engine.generate(PROMPTS, GREEDY) == alone["greedy"]
        assert any(out.accepted and max(out.accepted) > 0 for out in alone["greedy"]) and min(alone["greedy"][0].accepted) < 6
        first, second = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], SAMPLED)
        ids, _ = [*next(first).ids, *next(first).ids], next(second)
        assert other.generate(PROMPTS, SAMPLED) == alone["sampled"]
        second.close()                                          # in the middle of its text
        assert ids + [token for event in first for token in event.ids] == alone["greedy"][0].ids
        plain = engine.plain()
        assert plain.generate(PROMPTS[0], GREEDY).ids == alone["greedy"][0].ids
        assert engine.reshaped(2, 3, 5).generate(PROMPTS[0], GREEDY).ids == alone["greedy"][0].ids
        torch.testing.assert_close(engine.score(PROMPTS[0]).logits, alone["logits"], rtol=1e-4, atol=1e-4)
        with pytest.raises(MinispecError, match="max_length"):
            engine.generate(list(range(1, 1200)))
        assert engine.generate(PROMPTS, SAMPLED) == alone["sampled"]
        engine.scheduler.check()
    assert not processes.alive()
    for ended in (engine, plain):
        with pytest.raises(MinispecError, match="closed"):
            ended.generate(PROMPTS)


def test_an_engine_nobody_holds_ends_its_ranks(processes):
    engine = pair(tensor_parallel=2)
    plain = engine.plain()
    del engine
    gc.collect()
    assert len(processes.alive()) == 1 and plain.generate("x", SamplingParams(max_tokens=2)).ids
    del plain
    gc.collect()
    assert not processes.alive()


FAULTS = [
    ("os.kill(os.getpid(), 9)", STEP, "rank 1: killed by signal 9 (SIGKILL)"),
    ("os.kill(os.getpid(), 19)", STEP, "rank 1: no sign of life for 1 s"),
    ("time.sleep(99)", STEP, "rank 1: hangs in step"),
    ("raise MinispecError('the shard is not here')", LOADING, "rank 1: the shard is not here"),
    ("raise MemoryError('no room for 3 GB')", STEP, "rank 1: out of memory: no room for 3 GB"),
    pytest.param("raise KeyError('a mistake')", STEP, "rank 1: KeyError: 'a mistake' (<string> line 1)", marks=pytest.mark.slow),
    ("os.write(2, b'libfoo: cannot go on\\n'); os._exit(7)", STEP, "rank 1: ended with status 7: libfoo: cannot go on"),
]


@pytest.mark.parametrize("code, at, says", FAULTS, ids=lambda value: value[:24] if isinstance(value, str) and "rank" not in value else "")
def test_a_rank_that_fails_ends_the_run(code, at, says, processes):
    """From Python: the pending call and every later one raise the same line."""
    processes.fault(code, at=at)
    began = monotonic()
    if at == LOADING:
        with pytest.raises(MinispecError) as error:
            pair(tensor_parallel=2, patience=2)
    else:
        engine = pair(tensor_parallel=2, patience=2)
        with pytest.raises(MinispecError) as error:
            engine.generate(PROMPTS, SamplingParams(max_tokens=900, ignore_eos=True))
        for call in (lambda: engine.generate("x"), lambda: engine.score("x"), engine.plain):
            with pytest.raises(MinispecError) as again:
                call()
            assert str(again.value) == str(error.value)
        engine.close()
    assert str(error.value).startswith(says) and "\n" not in str(error.value)
    assert monotonic() - began < 12 and not processes.alive()


def test_interrupt_in_a_step_waits_for_its_end(processes, alone, monkeypatch):
    """From Python: KeyboardInterrupt comes between two steps, and the engine goes on."""
    with pair(tensor_parallel=2) as engine:
        round_, calls = engine.runner.round, []

        def interrupted(requests, plan):
            calls.append(len(requests))
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return round_(requests, plan)

        monkeypatch.setattr(engine.runner, "round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, SAMPLED)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert engine.generate(PROMPTS, SAMPLED) == alone["sampled"]
    assert not processes.alive()


@pytest.mark.parametrize("place", ["plan", "round"])
def test_interrupted_requests_end_on_every_rank(place, processes, alone, monkeypatch):
    """Those of other streams too, before these are read; before the ranks are told of a step, and in it."""
    with pair(tensor_parallel=2) as engine:
        streams, real = [engine.stream(prompt, GREEDY) for prompt in PROMPTS], getattr(engine.runner, place)
        next(streams[0]), next(streams[1])
        monkeypatch.setattr(engine.runner, place, lambda *args: signal.raise_signal(signal.SIGINT) or real(*args))
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
        monkeypatch.setattr(engine.runner, place, real)
        assert engine.generate(PROMPTS[0], GREEDY) == alone["greedy"][0]
        with pytest.raises(MinispecError, match="interrupted at position"):
            list(streams[1])
        assert engine.generate(PROMPTS, GREEDY) == alone["greedy"]
    assert not processes.alive()


def test_command_line_and_torchrun_print_what_one_rank_prints(processes, alone):
    """Both at once on one host; the torchrun ranks above 0 print nothing."""
    runs = [processes.generate("--json", "--tensor-parallel", 2), processes.generate("--json", start=TORCHRUN)]
    for child in runs:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert [one["ids"] for one in json.loads(out)["outputs"]] == [one.ids for one in alone["greedy"]]
        assert err.count("minispec: loaded in") == 1 and "Traceback" not in err
    assert not processes.alive()


def test_a_script_without_a_main_guard(processes):
    """Started by itself, its ranks are gone when it ends without closing; run by torchrun, rank 0 alone goes past Engine(), once."""
    script, again = processes.path / "script.py", processes.path / "again.py"
    script.write_text("from minispec import Engine, SamplingParams\nengine = Engine(max_length=256, tensor_parallel=2)\n"
                      "print(engine.generate('x = 1', SamplingParams(max_tokens=4)).ids)\n")
    again.write_text(script.read_text() + "engine.close()\ntry:\n    Engine(max_length=256)\nexcept ValueError as error:\n    print(error)\n")
    one, two = processes.command(script), processes.command(*TORCHRUN[:-2], again)
    (out, err), (same, more) = one.communicate(timeout=60), two.communicate(timeout=60)
    assert one.returncode == two.returncode == 0, err + more
    assert out.count("\n") == 1 and same.startswith(out) and "a run of torchrun has one engine" in same.splitlines()[1] and same.count("\n") == 2
    processes.wait_until(0, 3)


@pytest.mark.parametrize("code, says", [pytest.param("os.kill(os.getpid(), 9)", "ended without a word", id="killed"), pytest.param(
    "os.kill(os.getpid(), 19)", "no sign of life for 1 s", id="stopped", marks=pytest.mark.slow)])
def test_a_failing_rank_ends_torchrun(code, says, processes):
    """torchrun adds a report of its own."""
    processes.fault(code)
    child = processes.generate("--patience", 2, start=TORCHRUN, tokens=900)
    _, err = child.communicate(timeout=40)
    assert child.returncode and err.count(LINE) == 1 and LINE + "rank 1: " + says in err, err
    processes.wait_until(0, 3)


@pytest.mark.slow
def test_a_stopped_rank_0_ends_torchrun(processes):
    """It cannot speak: the next rank does, and ends it before torchrun has waited its 30 s."""
    processes.fault("os.kill(os.getpid(), 19)", rank=0)
    began, child = monotonic(), processes.generate("--patience", 2, start=TORCHRUN, tokens=900)
    _, err = child.communicate(timeout=40)
    assert child.returncode and err.count(LINE) == 1 and LINE + "rank 0: no sign of life for 1 s" in err, err
    assert monotonic() - began < 25
    processes.wait_until(0, 3)


@pytest.mark.parametrize("whole", [pytest.param(True, id="group", marks=pytest.mark.slow), pytest.param(False, id="rank 0 alone")])
def test_interrupt_leaves_nobody(whole, processes):
    child = processes.generate("--tensor-parallel", 2, tokens=900)
    assert child.stdout.read(1)
    (os.killpg if whole else os.kill)(child.pid, signal.SIGINT)
    ended(child, processes, 130, "interrupted")


def test_interrupt_while_ranks_start(processes):
    child = processes.generate("--tensor-parallel", 2, tokens=900)
    processes.wait_until(2)
    os.kill(child.pid, signal.SIGINT)
    ended(child, processes, 130, "interrupted")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_rank_0(number, processes):
    child = processes.generate("--tensor-parallel", 2, "--patience", 2, tokens=900)
    assert child.stdout.read(1)
    child.send_signal(number)
    processes.wait_until(1 if number == signal.SIGSTOP else 0, 5)
    child.kill()
    child.communicate(timeout=30)
    processes.wait_until(0, 3)


def test_the_kernels_own_kill_for_memory_is_named(processes, monkeypatch):
    counts = iter([3, 4, 5, 5])
    monkeypatch.setattr(launch, "oom_kills", lambda: next(counts))
    for says in ("killed by signal 9 (SIGKILL): the kernel was out of memory", "killed by signal 9 (SIGKILL)"):
        child = launch.Child(1, 2, 1)
        assert child.status() is None
        child.kill()
        assert child.status() == says


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_missing_shard_on_one_host_is_named(processes, tmp_path):
    """Two hosts, here two folders, of which one has half a checkpoint; started rank by rank, as by a cluster's own launcher."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(2):
        shutil.copytree(DEFAULT_TARGET, tmp_path / f"{rank}" / "target")
    (tmp_path / "1" / "target" / "model.safetensors").unlink()
    ranks = [processes.generate("--target", "target", "--draft", DEFAULT_DRAFT, cwd=tmp_path / f"{rank}",
                                env={**env, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}) for rank in range(2)]
    ended(ranks[0], processes, 2, "rank 1: target")
    assert ranks[1].communicate() == ("", "") and ranks[1].returncode == 1


@pytest.mark.parametrize("size", [4, 1024])
def test_an_impossible_split_starts_nobody(size, processes, monkeypatch):
    monkeypatch.setattr(launch, "Child", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(MinispecError, match=f"cannot be split over {size} ranks; 1, 2 work"):
        Engine(tensor_parallel=size)


@pytest.mark.parametrize("name, value, says", [
    ("RANK", "x", "RANK=x WORLD_SIZE=2"), ("RANK", "2", "no such rank"), ("WORLD_SIZE", "0", "no such rank"), ("LOCAL_RANK", "-1", "no such rank"),
    ("MASTER_PORT", "99999", "no such rank"), ("MASTER_PORT", None, "the ranks cannot meet at MASTER_ADDR=127.0.0.1 MASTER_PORT=")])
def test_variables_that_are_refused(name, value, says, processes):
    """None: a port on which someone else listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1") | {name: value or str(taken.getsockname()[1])}
        ended(processes.generate(env=env), processes, 2, says)


@pytest.mark.parametrize("value, says", [(0, "from 1 to 1024"), (True, "from 1 to 1024"), ("2", "from 1 to 1024"), (2, "torchrun started 3")])
def test_sizes_that_are_refused(value, says, processes, monkeypatch):
    if "torchrun" in says:
        for name, value_ in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value_)
    with pytest.raises(MinispecError, match=says):
        Engine(tensor_parallel=value)
    assert not processes.alive()

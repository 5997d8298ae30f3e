"""The command line, continued: every option reaches what it is about, the chat template, progress, streams that are closed or full."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minispec import Engine, MinispecError, SamplingParams, cli
from minispec import engine as engines
from minispec import runner as runners
from minispec.options import DIALECT, ENGINE

from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET, ROOT
from .test_cli import PROMPT, run  # noqa: F401

ONE = ("--prompt", PROMPT, "--max-tokens", 1)

# option -> a line of the load report that is not there without it
LINES = [
    (("--latent-norm-eps", "0.001"), "latent norm eps 0.001 as transformers"),
    (("--latent-norm-eps", "config"), "latent norm eps 1e-06 from rms_norm_eps"),
    (("--d2t", "from-t2d"), "draft vocabulary: 3072 of 4096 ids, in the order of t2d (asked for)"),
    (("--norm-output",), "norm_output True given by the caller"),
    (("--norm-output",), "flags: norm_before_residual False, norm_before_fc False, fc_norm False, norm_output True"),
    (("--no-norm-output",), "norm_output False given by the caller"),
    (("--norm-before-residual",), "norm_before_residual True given by the caller"),
    (("--no-norm-before-residual",), "norm_before_residual False given by the caller"),
    (("--no-fc-norm",), "fc_norm False given by the caller"),
    (("--no-norm-before-fc",), "norm_before_fc False given by the caller"),
    (("--capture-convention", "output"), "capture ids [2, 4, 7] read as layer outputs = inputs of layers [3, 5, 8]"),
    (("--capture", "1,3,6"), "capture ids [1, 3, 6] read as layer inputs because the caller gave them"),
    (("--capture", "1,3,6", "--capture-convention", "output"), "capture ids [1, 3, 6] read as layer outputs = inputs of layers [2, 4, 7]"),
    (("--max-length", "100"), "max_length 100 (as asked)"),
    (("--dtype", "bfloat16"), "device cpu, dtype bfloat16"),
    (("--target", DEFAULT_TARGET, "--draft", DEFAULT_DRAFT), f"loading {DEFAULT_TARGET}, draft {DEFAULT_DRAFT}"),
]


@pytest.fixture(scope="module")
def report():
    """stderr without an option."""
    done = subprocess.run([sys.executable, "-m", "minispec", "generate", *map(str, ONE)], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize("options, line", LINES, ids=lambda value: " ".join(map(str, value))[-40:] if isinstance(value, tuple) else "")
def test_option_is_in_the_report(options, line, run, report):  # noqa: F811
    done = run("generate", *ONE, *options)
    assert done.status == 0 and f"minispec: {line}" in done.err and line not in report


@pytest.mark.parametrize("flag", ["fc-norm", "norm-before-fc"])
def test_a_norm_that_the_draft_does_not_have_is_refused(flag, run):  # noqa: F811
    done = run("generate", *ONE, f"--{flag}")
    assert done.status == 2 and f"{flag.replace('-', '_')} is True but no tensor" in done.err.splitlines()[-1]


def test_a_reading_of_d2t_that_does_not_fit_is_refused(run):  # noqa: F811
    done = run("generate", *ONE, "--d2t", "absolute")
    assert done.status == 2 and "read as absolute" in done.err.splitlines()[-1]


def test_max_batch_is_how_many_requests_the_caches_hold(run):  # noqa: F811
    held = {}
    for batch in (1, 2, 5):
        done = run("generate", *ONE, "--max-length", 100, "--draft", "none", "--max-batch", batch)
        held[batch] = int(re.search(r"caches hold (\d+) tokens", done.err)[1])
    assert 100 <= held[1] <= 140
    assert all(abs(held[batch] - batch * held[1]) <= 16 * batch for batch in held) and held[1] < held[2] < held[5]


def test_draft_shape_and_device_reach_the_engine(run):  # noqa: F811
    """Their effect: a round of 2 depths accepts at most 2, one of 1 node at most 1; and the device is the one asked for."""
    def accepted(*options):
        return json.loads(run("generate", "--prompt", PROMPT, "--max-tokens", 32, "--json", *options).out)["outputs"][0]["accepted"]

    assert max(accepted()) > 2 and max(accepted("--draft-steps", 2)) == 2 and max(accepted("--nodes", 1)) == 1
    assert accepted("--topk", 1) == accepted("--topk", 1, "--nodes", 6, "--device", "cpu")
    assert accepted("--topk", 4, "--nodes", 24) != accepted("--topk", 1, "--nodes", 6)


SAMPLE = {"capture": "1,2,3", "capture_convention": "output", "d2t": "absolute", "latent_norm_eps": "0.25", "target": "T", "draft": "D",
          "draft_steps": "5", "topk": "3", "nodes": "4", "device": "cuda:7", "dtype": "float16", "max_length": "77", "max_batch": "9",
          "tensor_parallel": "2", "patience": "7.5"}
VALUES = {"capture": (1, 2, 3), "latent_norm_eps": 0.25, "patience": 7.5, **{name: int(SAMPLE[name]) for name in (
    "draft_steps", "topk", "nodes", "max_length", "max_batch", "tensor_parallel")}}


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_every_engine_option_is_passed_on_and_nothing_else(command, run, monkeypatch):  # noqa: F811
    seen = []

    def record(**options):
        seen.append({name: value for name, value in options.items() if name != "progress"})
        raise MinispecError("seen")

    monkeypatch.setattr(engines, "Engine", record)
    start = (command,) if command == "bench" else (command, "--prompt", "x")
    assert run(*start).status == 2 and seen.pop() == {}
    flags = {parameter.name: parameter for parameter in getattr(cli, command).params if parameter.name in option_names(ENGINE)}
    assert set(flags) == option_names(ENGINE) >= option_names(DIALECT)
    for name, parameter in flags.items():
        cases = [((word,), word in parameter.opts) for word in (parameter.opts[0], *parameter.secondary_opts)] if parameter.is_flag else \
            [((parameter.opts[0], SAMPLE[name]), VALUES.get(name, SAMPLE[name]))]
        for words, value in cases:
            run(*start, *words)
            assert seen.pop() == {name: value}


def option_names(options):
    def empty():
        pass

    for option in options:
        option(empty)
    return {parameter.name for parameter in empty.__click_params__}


@pytest.fixture
def chatty(tmp_path):
    """The default target with a chat template."""
    target = tmp_path / "target"
    target.mkdir()
    for file in DEFAULT_TARGET.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file)
        else:
            shutil.copy(file, target)
    template = "{{ bos_token }}# {{ messages[0].content }}\n{% if add_generation_prompt %}def answer(n):\n{% endif %}"
    (target / "chat_template.jinja").write_text(template)
    return target


def test_a_chat_template_is_mentioned_and_applied_on_request(chatty, run):  # noqa: F811
    pair = ("--target", chatty, "--draft", DEFAULT_DRAFT, "--max-tokens", 16)
    mentioned = "minispec: this target has a chat template; the prompt is continued as it is, --chat applies the template"
    with Engine() as engine:
        rendered = engine.tokenizer.encode("# sums of n\ndef answer(n):\n")
        expected, plain = (engine.generate(prompt, SamplingParams(max_tokens=16)) for prompt in (rendered, "sums of n"))
    for options, out in (((), plain), (("--chat",), expected)):
        done = run("generate", *pair, "--prompt", "sums of n", *options)
        assert done.status == 0 and done.out.rstrip("\n") == out.text.rstrip("\n")
        assert done.err.splitlines().count(mentioned) == (not options)
        (found,) = json.loads(run("generate", *pair, "--prompt", "sums of n", "--json", *options).out)["outputs"]
        assert (found["prompt"], found["prompt_ids"], found["ids"]) == ("sums of n", out.prompt_ids, out.ids)
    assert expected.prompt_ids == rendered != plain.prompt_ids and expected.ids != plain.ids
    done = run("generate", *pair, "--prompt-ids", "5,6", "--chat")
    assert done.status == 2 and done.out == "" and "--chat needs a text prompt" in done.err.splitlines()[-1]


def test_no_template_is_not_mentioned(report):
    assert "chat" not in report


def test_progress_every_two_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(cli, "perf_counter", lambda: now[0])
    progress, printed = cli.Progress(), []
    for done in range(1, 12):
        now[0] += 0.75
        progress(done, 11, "tensors read")
        printed += capsys.readouterr().err.splitlines()
    assert printed == [f"minispec: {done} of 11 tensors read" for done in (3, 6, 9)]


def test_progress_is_called_while_tensors_are_read(run, monkeypatch):  # noqa: F811
    """A clock that jumps: every tensor of the target and the draft is a line."""
    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(cli, "perf_counter", lambda: next(now))
    lines = re.findall(r"minispec: (\d+) of (\d+) tensors read", run("generate", *ONE).err)
    assert len(lines) > 100 and {int(done) <= int(total) for done, total in lines} == {True}
    assert len({total for _, total in lines}) == 2


@pytest.mark.parametrize("arguments, says", [
    (("generate", "--prompt", "x", "--draft", ""), "draft is ''"),
    (("generate", "--prompt", "x", "--target", ""), "target is ''"),
    (("generate", "--prompt", "x", "--json", "--stats"), "--stats"),
    (("generate", "--prompt", "x", "--json", "--show-draft"), "--show-draft"),
    (("generate", "--prompt", "x", "--logprobs"), "--json"),
    (("bench", "--json", "/nonexistent/folder/result.json"), "/nonexistent/folder/result.json: No such file or directory"),
    (("bench", "--json", "/"), "/: Is a directory"),
    (("bench", "--draft-steps", "0"), "--draft-steps of at least 1"),
], ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else "")
def test_contradictions_are_one_line_and_status_2(arguments, says, run):  # noqa: F811
    done = run(*arguments)
    lines = done.err.splitlines()
    assert done.status == 2 and done.out == ""
    assert lines[-1].startswith("minispec: error: ") and says in lines[-1] and sum("error" in line for line in lines) == 1


@pytest.mark.parametrize("arguments", [("generate", "--prompt", "x", "--json", "--stats"), ("bench", "--json", "/nonexistent/x.json")])
def test_contradictions_are_seen_before_anything_is_loaded(arguments, run, monkeypatch):  # noqa: F811
    monkeypatch.setattr(engines, "Engine", lambda **_: pytest.fail("loaded"))
    assert run(*arguments).status == 2


@pytest.mark.parametrize("length, free, says", [(900, 170_000_000, "max_length=900"), (None, 100_000_000, "MB"), (2000, None, "1024")])
def test_too_little_memory_is_one_line(length, free, says, run, monkeypatch):  # noqa: F811
    if free:
        monkeypatch.setattr(runners, "available", lambda device: free)
    done = run("generate", *ONE, *(("--max-length", length) if length else ()))
    assert done.status == 2 and done.out == "" and says in done.err.splitlines()[-1]


def shell(arguments, redirection):
    """The command line under a shell's redirection, as in `<&-`: status, stdout, lines of stderr."""
    done = subprocess.run(["bash", "-c", f'exec "$0" -m minispec "$@" {redirection}', sys.executable, *arguments], cwd=ROOT, timeout=120,
                          capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.splitlines()


SHORT = ("generate", "--prompt", PROMPT, "--max-tokens", "4")


@pytest.mark.parametrize("arguments, redirection, says", [
    (("generate", "--prompt", "-"), "<&-", "standard input is closed"),
    (SHORT, ">&-", "standard output is closed"),
    (SHORT, ">/dev/full", "standard output: No space left on device"),
    ((*SHORT, "--json"), ">/dev/full", "standard output: No space left on device"),
    (("inspect",), ">/dev/full", "standard output: No space left on device"),
    (("--help",), ">/dev/full", "standard output: No space left on device"),
], ids=str)
def test_streams_that_are_closed_or_full(arguments, redirection, says):
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    status, out, lines = shell(arguments, redirection)
    assert (status, out) == (2, "") and lines[-1].startswith("minispec: error: ") and says in lines[-1]
    assert all(line.startswith("minispec: ") for line in lines)


def test_streams_that_are_not_needed_may_be_closed():
    expected = shell(SHORT, "</dev/null")[1]
    assert expected
    assert shell(SHORT, "<&-")[:2] == (0, expected)
    assert shell(SHORT, "2>&-") == (0, expected, [])


def test_bench_writes_its_result_only_where_it_is_told(run, tmp_path):  # noqa: F811
    """The file is opened before the run and keeps what it held when the run fails."""
    file = tmp_path / "result.json"
    file.write_text("older\n")
    assert run("bench", "--json", file, "--draft", "none").status == 2 and file.read_text() == "older\n"
    assert os.listdir(tmp_path) == ["result.json"]

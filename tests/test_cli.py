"""The command line: results alone on stdout, one clear line and status 2 on bad input, 130 on Ctrl-C."""
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minispec import Engine, Output, SamplingParams, __version__, cli
from minispec.printer import Printer
from minispec.request import Event
from minispec.stats import Acceptance, distinct_bigrams, gather, quantile

from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET, ROOT

PROMPT = "def fibonacci(n):"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments, stdin=bytes) -> status, stdout, stderr; in this process."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["minispec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return SimpleNamespace(status=ended.value.code, **dict(zip(("out", "err"), capsys.readouterr())))

    return call


def command(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "minispec", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            stdin=subprocess.DEVNULL, **options)


@pytest.fixture(scope="module")
def expected():
    with Engine() as engine:
        return engine.generate(PROMPT, SamplingParams(max_tokens=24))


def test_text_alone_on_stdout(run, expected):
    done = run("generate", "--prompt", PROMPT, "--max-tokens", 24)
    assert done.status == 0
    assert done.out == expected.text + "\n" * (not expected.text.endswith("\n"))
    assert all(line.startswith("minispec: ") for line in done.err.splitlines()) and "capture" in done.err


def test_prompt_from_stdin_and_file_to_the_byte(run, tmp_path, expected):
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    for arguments, stdin in ((("--prompt", "-"), PROMPT.encode()), (("--prompt-file", file), b"")):
        done = run("generate", *arguments, "--max-tokens", 24, "--json", stdin=stdin)
        assert json.loads(done.out)["outputs"][0]["ids"] == expected.ids
    changed = json.loads(run("generate", "--prompt", "-", "--max-tokens", 24, "--json", stdin=PROMPT.encode() + b"\n").out)
    assert changed["outputs"][0]["prompt_ids"] != expected.prompt_ids


def test_json_is_one_object_and_carries_every_output_field(run, expected):
    done = run("generate", "--prompt", PROMPT, "--prompt-ids", ",".join(map(str, expected.prompt_ids)), "--max-tokens", 24, "--json", "--logprobs")
    first, second = json.loads(done.out)["outputs"]
    assert first["ids"] == second["ids"] == expected.ids and first["text"] == expected.text
    assert first["accepted"] == expected.accepted and len(first["logprobs"]) == len(expected.ids)
    assert json.loads(done.out)["stats"]["rounds"] == 2 * len(expected.accepted)


def test_several_prompts_are_labelled_in_order(run):
    prompts = ["import os\n", PROMPT, "class A:\n"]
    done = run("generate", *(x for p in prompts for x in ("--prompt", p)), "--max-tokens", 9)
    alone = [run("generate", "--prompt", p, "--max-tokens", 9).out for p in prompts]
    labels = [f"==> prompt {i + 1} of 3: {json.dumps(p)} <==\n" for i, p in enumerate(prompts)]
    assert done.out == "".join(label + text for label, text in zip(labels, alone))


def test_stats_and_show_draft(run, expected):
    done = run("generate", "--prompt", PROMPT, "--max-tokens", 24, "--stats", "--show-draft")
    plain = done.out.replace("[", "").replace("]", "")
    assert plain.rstrip("\n") == expected.text.replace("[", "").replace("]", "").rstrip("\n")
    assert done.out.count("[") - expected.text.count("[") >= sum(a > 0 for a in expected.accepted) // 2 > 0
    assert "acceptance length" in done.err and "tokens emitted a round" in done.err and "tokens/s" in done.err


def test_plain_and_speculative_say_the_same(run, expected):
    for options in (("--draft", "none"), ("--draft-steps", "0"), ("--topk", "1", "--draft-steps", "3")):
        assert json.loads(run("generate", "--prompt", PROMPT, "--max-tokens", 24, "--json", *options).out)["outputs"][0]["ids"] == expected.ids


def test_every_sampling_parameter_is_an_option(run):
    names = {parameter.name for parameter in cli.generate.params}
    assert set(SamplingParams.__dataclass_fields__) <= names
    help_text = run("generate", "--help").out
    assert all("--" + name.replace("_", "-") in help_text for name in SamplingParams.__dataclass_fields__)
    assert "--nodes INT|auto " in help_text and "NUMBER|config" in help_text         # as they are read, not in capitals
    done = run("generate", "--prompt", PROMPT, "--max-tokens", 8, "--temperature", 0.8, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01,
               "--seed", 3, "--repetition-penalty", 1.1, "--presence-penalty", 0.1, "--frequency-penalty", 0.1, "--logit-bias", "5=-2",
               "--stop", "@@@", "--stop-ids", 7, "--ignore-eos", "--logprobs", "--json")
    chosen = SamplingParams(max_tokens=8, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.1,
                            presence_penalty=0.1, frequency_penalty=0.1, logit_bias={5: -2.0}, stop=("@@@",), stop_ids=(7,), ignore_eos=True,
                            logprobs=True)
    with Engine() as engine:
        assert json.loads(done.out)["outputs"][0]["ids"] == engine.generate(PROMPT, chosen).ids


BAD = [
    (("generate",), "no prompt"),
    (("generate", "--prompt", ""), "empty"),
    (("generate", "--prompt", "-", "--prompt", "-"), "standard input"),
    (("generate", "--prompt", os.fsdecode(b"def \xff")), "0xff, which is not UTF-8"),
    (("generate", "--prompt", "x = 1\n" * 600), "max_length"),
    (("generate", "--prompt-file", "/nonexistent/prompt"), "/nonexistent/prompt"),
    (("generate", "--prompt-ids", "1,two"), "1,two"),
    (("generate", "--prompt-ids", "1,4096"), "4096"),
    (("generate", "--prompt-ids", "1" * 6000), "'" + "1" * 60 + "' is not integers"),
    (("generate", "--prompt", "x", "--draft", "none", "--draft-steps", "3"), "--draft-steps"),
    (("generate", "--prompt", "x", "--target", "", "--draft", ""), "target is ''"),
    (("generate", "--prompt", "x", "--unknown"), "--unknown"),
    (("generate", "--prompt", "x", "--max-tokens", "many"), "many"),
    (("generate", "--prompt", "x", "--max-tokens", "0"), "max_tokens"),
    (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
    (("generate", "--prompt", "x", "--top-p", "nan"), "top_p"),
    (("generate", "--prompt", "x", "--logit-bias", "5:1"), "ID=VALUE"),
    (("generate", "--prompt", "x", "--logit-bias", "99999=1"), "99999"),
    (("generate", "--prompt", "x", "--stop", ""), "stop"),
    (("generate", "--prompt", "x", "--draft-steps", "-1"), "draft_steps"),
    (("generate", "--prompt", "x", "--nodes", "1000"), "nodes"),
    (("generate", "--prompt", "x", "--device", "tpu"), "tpu"),
    (("generate", "--prompt", "x", "--max-length", "100000"), "max_length"),
    (("generate", "--prompt", "x", "--exact", "--device", "cpu"), "exact"),
    (("generate", "--prompt", "x", "--capture", "2,4,99"), "99"),
    (("generate", "--prompt", "x", "--latent-norm-eps", "small"), "small"),
    (("generate", "--prompt", "x", "--target", "/nonexistent/target", "--draft", "none"), "/nonexistent/target"),
    (("generate", "--prompt", "x", "--draft", "/nonexistent/draft"), "/nonexistent/draft"),
    (("generate", "--prompt", "x", "--chat"), "template"),
    (("inspect", "/nonexistent/folder"), "/nonexistent/folder"),
    (("bench", "--prompts", "/nonexistent/prompts"), "/nonexistent/prompts"),
    (("bench", "--draft", "none"), "draft"),
    (("bench", "--repeats", "0"), "repeats"),
    (("bench", "--threads", "99999999999"), "threads"),
    (("inspect", "/nonexistent/\x1b[31mred\u2028"), "/nonexistent/\\x1b[31mred"),
    (("unknown",), "unknown"),
]


@pytest.mark.parametrize("arguments, says", BAD, ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else "")
def test_bad_input_is_one_line_and_status_2(run, arguments, says):
    done = run(*arguments)
    last = done.err.splitlines()[-1]
    assert done.status == 2 and done.out == ""
    assert last.startswith("minispec: error: ") and says in last, last
    assert sum("error" in line for line in done.err.splitlines()) == 1


def test_stdin_that_is_not_text(run):
    done = run("generate", "--prompt", "-", stdin=b"abc\xe9")
    assert done.status == 2 and "byte 3 is 0xe9" in done.err


def test_broken_checkpoints_end_in_one_line(run, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(DEFAULT_TARGET, target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    for arguments in (("generate", "--prompt", "x", "--target", target, "--draft", DEFAULT_DRAFT), ("inspect", target)):
        done = run(*arguments)
        assert done.status == 2 and done.out == "" and "model.safetensors" in done.err.splitlines()[-1]


def test_bench_of_the_default_pair(run):
    done = run("bench", "--per-kind", 1, "--max-tokens", 8, "--repeats", 1, "--draft-steps", 3, "--threads", 1)
    result = json.loads(done.out.splitlines()[-1])
    assert done.status == 0 and result["equal"] and result["prompts"] == len(result["kinds"]) == 5 and result["speedup"]["median"] > 0
    assert 4 < result["experts"] <= 16


def test_names_from_a_checkpoint_stay_on_their_line(run, tmp_path):
    """A key of a config that holds a line end, a terminal command or half a character."""
    draft = shutil.copytree(DEFAULT_DRAFT, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    config.setdefault("eagle_config", {})["x\nminispec: error: fake\x1b[31m\ud800"] = 1
    (draft / "config.json").write_text(json.dumps(config))
    shown = r"eagle_config.x\nminispec: error: fake\x1b[31m\ud800 ignored"
    for done in (run("inspect", draft), run("generate", "--prompt", "x", "--max-tokens", 1, "--target", DEFAULT_TARGET, "--draft", draft)):
        assert done.status == 0 and shown in done.out + done.err and "\x1b" not in done.out + done.err
    assert "\x1b" not in run("inspect", draft, "--json").out


def test_json_says_the_same_in_every_encoding():
    child = command("generate", "--prompt", "\U0001f600", "--max-tokens", "1", "--json", env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert json.loads(child.communicate(timeout=60)[0])["outputs"][0]["prompt"] == "\U0001f600"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("generate", "--help"), ("bench", "--help"), ("inspect", "--help")])
def test_help_does_not_wait_for_torch(arguments):
    code = f"import sys; sys.argv[1:] = {list(arguments)}\nfrom minispec.cli import main\ntry: main()\n" \
           "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert arguments != ("--version",) or done.stdout == f"minispec, version {__version__}\n"


def test_interrupt_is_one_line_and_status_130():
    child = command("generate", "--prompt", PROMPT, "--max-tokens", "900", "--ignore-eos", "--draft", "none")
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    lines = err.decode().splitlines()
    assert lines[-1] == "minispec: interrupted" and all(line.startswith("minispec: ") for line in lines)


def test_broken_pipe_is_quiet():
    child = command("generate", "--prompt", PROMPT, "--max-tokens", "900", "--ignore-eos")
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    child.wait(timeout=60)
    child.stderr.close()
    assert b"Traceback" not in err and b"rror" not in err


def test_inspect_describes_the_default_pair(run):
    text, found = run("inspect").out, json.loads(run("inspect", "--json").out)
    assert found["draft"]["capture"]["inputs_of_layers"] == [2, 4, 7] and found["draft"]["capture"]["outputs_of_layers"] == [1, 3, 6]
    assert "inputs of layers [2, 4, 7] = outputs of layers [1, 3, 6]" in text
    assert found["target"]["kv_bytes_per_token"]["float32"] == 8 * (128 + 32) * 4
    assert sum(part["file"] for part in found["target"]["bytes"].values()) < DEFAULT_TARGET.joinpath("model.safetensors").stat().st_size
    counted = sum(group["count"] for group in found["target"]["tensors"])
    assert counted == len(header(DEFAULT_TARGET)) and "4080" in found["target"]["stop_ids"]
    assert found["draft"]["vocabulary"]["draft_ids"] == 3072


def test_inspect_tells_a_target_from_a_draft(run):
    assert set(json.loads(run("inspect", DEFAULT_TARGET, "--json").out)) == {"target"}
    assert set(json.loads(run("inspect", DEFAULT_DRAFT, "--json").out)) == {"draft"}
    moved = json.loads(run("inspect", DEFAULT_DRAFT, "--capture", "1,3,6", "--capture-convention", "output", "--json").out)
    assert moved["draft"]["capture"]["inputs_of_layers"] == [2, 4, 7]


def header(folder):
    with open(folder / "model.safetensors", "rb") as file:
        return {k: v for k, v in json.loads(file.read(int.from_bytes(file.read(8), "little"))).items() if k != "__metadata__"}


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode_bytes(self, ids):
        return bytes(ids)


def test_marks_follow_the_text_not_the_ids(capsys):
    """Text lags behind ids (half characters, held-back stops); a mark stays with its character. e2 82 ac is one character."""
    printer = Printer(SimpleNamespace(tokenizer=Bytes()), ["p"], True)
    printer.add(Event(0, "a", [97], None, None))
    printer.add(Event(0, "b", [98, 0xE2, 0x82], 2, None))
    printer.add(Event(0, "\u20acc", [0xAC, 99, 100, 101], 3, None))
    printer.add(Event(0, "", [102], 0, "stop"))
    printer.end()
    assert capsys.readouterr().out == "a[b][\u20acc]\n"


def output(ids, accepted, reason="stop"):
    return Output([], list(range(ids)), None, reason, accepted, None)


def test_acceptance_counts():
    found = Acceptance.of([output(10, [3, 0, 2, 0])], 3)                # 1 + 4 + 1 + 3 + 1 = 10 ids: nothing was cut
    assert (found.rounds, found.length, found.tried, found.hit) == (4, 9 / 4, (4, 2, 2), (2, 2, 1))
    cut = Acceptance.of([output(4, [0, 2])], 3)                         # 1 + 1 + 2: cut after two drafts, depth 3 was not tried
    assert (cut.tried, cut.hit) == ((2, 1, 0), (1, 1, 0)) and cut.by_depth[2] is None
    at_limit = Acceptance.of([output(4, [2], "length")], 3)
    assert (at_limit.tried, at_limit.hit) == ((1, 1, 0), (1, 1, 0))
    assert Acceptance.of([output(1, [])], 3).length is None


def test_gather_adds_up_a_stream():
    events = [Event(0, "", [5], None, None), Event(1, "", [6], None, "length"), Event(0, "", [1, 2], 1, None), Event(0, "", [3], 0, "stop")]
    first, second = gather(events)
    assert (first.ids, first.accepted, first.finish_reason) == ([5, 1, 2, 3], [1, 0], "stop") and second.ids == [6] and second.accepted == []


def test_quantile_and_bigrams():
    assert quantile([3, 1, 2], 0.5) == 2 and quantile([0, 10], 0.1) == 1 and quantile([4], 0.9) == 4
    assert distinct_bigrams([1, 2, 1, 2, 1]) == 0.5 and distinct_bigrams([1]) == 1.0

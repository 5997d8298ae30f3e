"""`minispec doctor` as a command: exit status, where its words go, and every finding of a pair in one run."""
import json
import subprocess
import sys
from time import perf_counter

import pytest

from minispec.doctor import diagnose
from minispec.errors import MinispecError

from .conftest import ROOT
from .mutants import mutate
from .test_cli import run  # noqa: F401


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "minispec", "doctor", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt_ids": [7 + i, 301, 45, 12 + i, 99]}) + "\n" for i in range(0, 60, 5)))
    return tmp_path / "p.jsonl"


def test_findings_are_status_1_and_read_past_refusals(run, target, draft, prompts, tmp_path):  # noqa: F811
    wrong = mutate(draft, tmp_path / "x", lambda w: w.update(d2t=w["d2t"].half()), lambda c: c.update(tie_word_embeddings=True))
    ran = run("doctor", "--target", target, "--draft", wrong, "--prompts", prompts, "--max-tokens", 24, "--json")
    found = json.loads(ran.out, parse_constant=pytest.fail)             # NaN is no JSON
    assert ran.status == 1 and not found["sound"]
    assert {finding["name"] for finding in found["findings"] if finding["severity"] != "note"} == {"tied-head", "d2t-dtype"}
    assert any(str(wrong) in line for line in found["facts"]["read_as"]), "the user's folder, not that of the mended copy"
    assert "engine_by_depth" in found["facts"] and all(line.startswith("minispec: ") for line in ran.err.splitlines())


def test_a_sound_pair_is_status_0(run, target, draft, prompts):  # noqa: F811
    ran = run("doctor", "--target", target, "--draft", draft, "--prompts", prompts, "--max-tokens", 24)
    assert ran.status == 0 and ran.out.endswith("\nsound\n"), ran.out + ran.err
    for line in ("captured: inputs of layers [2, 4, 5] = outputs of layers [1, 3, 4]", "read as:", "  layer 4: norm ", "trained context: "):
        assert f"\n{line}" in "\n" + ran.out
    assert max(map(len, ran.out.splitlines())) < 250, "readable"


PAIR = "--target", "{target}", "--draft", "{draft}"
CANNOT = {"a draft alone": ("--draft", "nowhere"), "no draft": ("--draft", "none", "--target", "nowhere"),
          "no folders": ("--target", "nowhere", "--draft", "nowhere"), "layers that do not fit": (*PAIR, "--capture", "0,3"),
          "layers that are not there": (*PAIR, "--capture", "9,9,9"), "a norm that is not there": (*PAIR, "--fc-norm"),
          "no such device": (*PAIR, "--device", "cuda:99"), "no such id": (*PAIR, "--prompts", "{ids}"), "no prompt": (*PAIR, "--prompts", "{none}")}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_run_is_status_2(case, run, target, draft, tmp_path):  # noqa: F811
    """One line, and nothing on stdout."""
    (tmp_path / "none").write_text("")
    (tmp_path / "ids").write_text('{"prompt_ids": [99999]}\n')
    places = dict(target=target, draft=draft, ids=tmp_path / "ids", none=tmp_path / "none")
    few = ("--max-tokens", 8) if "--prompts" in CANNOT[case] else ("--max-tokens", 8, "--prompts", short(tmp_path / "short"))
    ran = run("doctor", *(word.format(**places) for word in CANNOT[case]), *few)
    assert ran.status == 2 and ran.out == "" and ran.err.count("minispec: error: ") == 1 and ran.err.splitlines()[-1].startswith("minispec: error: ")


def short(path):
    path.write_text('{"prompt_ids": [7, 301, 45]}\n')
    return path


def test_little_text_proves_nothing(run, target, draft, tmp_path):  # noqa: F811
    ran = run("doctor", "--target", target, "--draft", draft, "--prompts", short(tmp_path / "short"), "--max-tokens", 8, "--json")
    found = json.loads(ran.out)
    assert ran.status == 1 and "little-text" in {one["name"] for one in found["findings"]}
    assert not {one["name"] for one in found["findings"]} & {"states-unused", "weak-draft"}


def test_a_draft_of_nan_is_not_read_on(target, draft, tmp_path):
    wrong = mutate(draft, tmp_path / "x", lambda w: w["fc.weight"].fill_(float("nan")))
    diagnosis = diagnose(target, wrong, [[7, 301, 45]], max_tokens=8)
    assert [finding.name for finding in diagnosis.findings] == ["not-finite"] and "not_probed" in diagnosis.facts


def test_a_target_that_is_refused_is_a_finding(target, draft, tmp_path):
    wrong = mutate(target, tmp_path / "x", config=lambda c: c.update(hidden_act="gelu"))
    diagnosis = diagnose(wrong, draft)
    assert [finding.name for finding in diagnosis.findings] == ["target-refused"] and "hidden_act" in diagnosis.findings[0].measured
    with pytest.raises(MinispecError, match="training-states"):
        diagnose(target, draft, [[5, 6]], training_states=str(tmp_path / "none.pt"))


def test_the_callers_reading_is_the_declared_one(target, draft):
    """--capture and the flags act in doctor as in the engine."""
    prompts = [[7 + i, 301, 45, 12 + i, 99] for i in range(0, 60, 5)]
    diagnosis = diagnose(target, draft, prompts, max_tokens=16, capture=(0, 3, 7), norm_output=True)
    assert list(diagnosis.facts["captured_states"]) == ["layer 0", "layer 3", "layer 7"]
    assert list(diagnosis.facts["depth"]) == ["recycling_post_norm", "recycling_pre_norm"]


@pytest.mark.slow
def test_the_default_pair_is_sound_within_a_minute():
    began = perf_counter()
    ran = command()
    assert ran.returncode == 0 and ran.stdout.endswith("\nsound\n") and perf_counter() - began < 60

"""Faults of an engine that the doctor tells from faults of the weights: one thing broken in the forward, in the rounds, or in the buffer."""
from dataclasses import replace

import pytest
import torch

from minispec.config import TargetConfig
from minispec.doctor import hear, own_subject, run
from minispec.doctor_probe import Reading
from minispec.doctor_rounds import depths
from minispec.draft import Draft
from minispec.hidden import HiddenBuffer
from minispec.speculate import Speculator
from minispec.weights.draft import open_draft

from .tiny_draft import DIALECTS


@pytest.fixture(scope="module")
def heard(checkpoints):
    prompts = [[7 + i, 301, 45, 12 + i, 99] for i in range(0, 20, 4)]
    return hear(str(checkpoints.target()), prompts, max_tokens=40, latent_norm_eps=1e-6, device="cpu", dtype="float32")


@pytest.fixture
def check(heard, target, draft):
    """() -> names of the findings about the engine as it now is."""
    config = TargetConfig.read(str(target))
    plan = open_draft(str(draft), config)
    with torch.inference_mode():
        found = depths(own_subject(heard, plan)[0], Reading.of(plan.config))

    def check():
        facts = {}
        findings = run(heard, str(draft), {}, found, facts)
        return [finding.name for finding in findings if finding.severity != "note"], facts, findings
    return check


def test_the_engine_accepts_what_the_probe_says(check):
    names, facts, _ = check()
    by_depth = facts["engine_by_depth"]
    assert names == [] and by_depth["engine"] == by_depth["probe"]
    assert 0 < by_depth["engine"][0] < 1 and by_depth["engine"][2], "something accepted, something rejected"


def test_13_recycled_without_residual(check, monkeypatch):
    attend = Draft.attend

    def broken(self, q, residual, view, cache, take):
        normed, recycled = attend(self, q, residual, view, cache, take)
        return normed, recycled - residual.flatten(0, 1)[take]
    monkeypatch.setattr(Draft, "attend", broken)
    names, facts, findings = check()
    assert names == ["engine-recycle"]
    assert facts["engine_by_depth"]["engine"][0] == facts["engine_by_depth"]["probe"][0]
    assert "not the weights" in findings[0].cause and "--draft-steps" in findings[0].cure


def test_28_29_drafted_rows_see_or_stand_elsewhere(check, monkeypatch):
    """Recycled rows at positions that do not move with their depth: the first draft token stays right."""
    project = Draft.project

    def broken(self, hidden, rows, cache, take=None):
        return project(self, hidden, rows if take is None else replace(rows, positions=rows.positions + 40), cache, take)
    monkeypatch.setattr(Draft, "project", broken)
    assert check()[0] == ["engine-recycle"]


def test_22_the_last_prompt_row_reads_another_token(check, monkeypatch):
    prefill = Speculator.prefill

    def broken(self, batch, tokens, following):
        path = prefill(self, batch, tokens, following)
        self.hidden.next[batch.seats] = tokens[0, -1]
        return path
    monkeypatch.setattr(Speculator, "prefill", broken)
    assert check()[0] == ["engine-prefill"]


def test_23_the_bonus_is_paired_with_another_state(check, monkeypatch):
    """Hazards 23 and 26: after accepted tokens, the state of the root in place of that of the last accepted row."""
    put = HiddenBuffer.put

    def broken(self, batch, states, path, *append):
        put(self, batch, states, path, *append)
        if path.rows.shape[1] > 1:
            at = (path.count - 1).clamp(min=0)
            self.states[batch.seats, at] = self.states[batch.seats, 0]
    monkeypatch.setattr(HiddenBuffer, "put", broken)
    assert check()[0] == ["engine-pairing"]


@pytest.mark.parametrize("hazard", ["24 guesses are kept", "25 rows go to other slots", "59 positions start again"])
def test_24_25_59_the_drafts_cache(hazard, check, monkeypatch):
    project = Draft.project

    def broken(self, hidden, rows, cache, take=None):
        if take is not None:                                            # guessed rows
            return project(self, hidden, rows, cache, take)
        if hazard[:2] == "59":
            rows = replace(rows, positions=torch.arange(rows.tokens.shape[1]).expand_as(rows.positions))
        keep, out = cache.clone(), project(self, hidden, rows, cache)
        if hazard[:2] == "24" and rows.positions.max() > 12:            # a round's rows are not extended but the last
            cache[rows.slots[0, :-1]] = keep[rows.slots[0, :-1]]
        if hazard[:2] == "25":
            cache[rows.slots[0]] = cache[rows.slots[0]].roll(1, 0)
        return out
    monkeypatch.setattr(Draft, "project", broken)
    assert check()[0] == ["engine-pairing" if hazard[:2] == "59" else "engine-cache"]


def test_27_target_kv_that_is_not_moved(check, monkeypatch):
    """The accepted rows' KV of a tree stays where it was verified: wrong text."""
    from minispec.cache import Cache
    monkeypatch.setattr(Cache, "commit", lambda self, batch, path: self.data.mul_(1.02))
    assert "engine-text" in check()[0]


def test_a_round_that_costs_more_than_it_emits(check, monkeypatch):
    from minispec import doctor
    clock = iter(float(10 ** (i // 2 % 2) * i) for i in range(100))             # plain calls take 1, those with the draft some ten times that
    monkeypatch.setattr(doctor, "perf_counter", lambda: next(clock))
    facts, findings = check()[1:]
    slow = [finding for finding in findings if finding.name == "slower-than-plain"]
    assert slow and slow[0].severity == "note" and f"{facts['break_even_length']:.2f}" in slow[0].expected

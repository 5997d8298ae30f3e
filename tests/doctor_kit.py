"""What the tests of the doctor share: the default target's text, and a memory of scores that mutants of one draft have in common."""
import json
from dataclasses import replace

import pytest
import torch

from minispec import doctor, doctor_scan
from minispec.doctor import hear

from .conftest import DEFAULT_TARGET, ROOT

PROMPTS = [case["prompt_ids"] for case in json.loads((ROOT / "tests/data/reference.json").read_text())]


def listen(target, prompts, max_tokens=48):
    return hear(str(target), prompts, max_tokens=max_tokens, latent_norm_eps=1e-6, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def heard():
    return listen(DEFAULT_TARGET, PROMPTS[:8])


@pytest.fixture(scope="session")
def whole():
    """For faults that cost little: 8 prompts are not enough to tell them from noise."""
    return listen(DEFAULT_TARGET, PROMPTS)


@pytest.fixture(scope="session")
def few():
    return listen(DEFAULT_TARGET, PROMPTS[:5], 40)


@pytest.fixture(scope="session")
def kept():
    """Scores of the default draft's own tensors, which mutants of its config share: (fingerprint, reading) -> Score."""
    return {}


@pytest.fixture(autouse=True)
def shared(kept, monkeypatch):
    subjects = {}

    def mark(tensor):
        return (tensor.flatten().double() * torch.arange(tensor.numel()).remainder(9973)).sum().item()

    def of(subject):
        if id(subject) not in subjects:
            subjects[id(subject)] = subject, tuple(map(mark, (*subject.p.values(), subject.text.ids, subject.text.states,
                                                              torch.zeros(1) if subject.ids is None else subject.ids)))
        return subjects[id(subject)][1]

    def remember(function):
        def remembered(subject, reading, *rest):
            said = replace(reading, config=replace(reading.config, capture=(), capture_reason="", norm_before_residual=False, norm_output=False,
                                                   rope=None))           # what the Reading's own fields say in its place
            key = function.__name__, said, of(subject), *(mark(r) if isinstance(r, torch.Tensor) else r for r in rest)
            if key not in kept:
                kept[key] = function(subject, reading, *rest)
            return kept[key]
        return remembered
    monkeypatch.setattr(doctor_scan, "score", remember(doctor_scan.score))
    monkeypatch.setattr(doctor, "depths", remember(doctor.depths))

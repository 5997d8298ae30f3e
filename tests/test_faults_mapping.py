"""Faults that other engines shipped in the vocabulary map, the captured layers and the draft's input, by their number (B..)."""
import re
from itertools import product

import pytest
import torch

from minispec import Engine

from . import oracle, tiny, tiny_draft
from .conftest import assert_close
from .mutants import PROMPT, drop, first_by_definition, first_logits, mutate, refused


def test_b13_no_map(target, draft, tmp_path):
    only_t2d = mutate(draft, tmp_path / "a", lambda w: w.pop("d2t"))
    refused(target, only_t2d, "d2t", "from-t2d")
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, only_t2d, d2t="from-t2d")
    assert all(map(torch.equal, a, b)) and out_a.accepted == out_b.accepted
    oracle.assert_mixed(out_a, 4)
    refused(target, mutate(draft, tmp_path / "b", drop("d2t", "t2d")), "d2t")
    refused(target, mutate(draft, tmp_path / "c", lambda w: (w.pop("t2d"), w["d2t"].zero_())), "d2t")

    def prefix(w):
        w["d2t"].zero_()
        w["t2d"] = torch.arange(512) < 384
    with Engine(target, mutate(draft, tmp_path / "d", prefix)) as engine:
        assert re.search("(?i)warning.*first 384", "\n".join(engine.report))


def test_b14_offset_or_absolute(target, draft, tmp_path):
    absolute = mutate(draft, tmp_path / "a", lambda w: w["d2t"].add_(torch.arange(384)))
    refused(target, absolute, "d2t", "--d2t absolute")
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, absolute, d2t="absolute")
    assert all(map(torch.equal, a, b)) and out_a.accepted == out_b.accepted
    oracle.assert_mixed(out_a, 4)
    refused(target, draft, "d2t", d2t="absolute")
    refused(target, mutate(draft, tmp_path / "b", lambda w: w["d2t"].__setitem__(3, w["d2t"][4] + 1)), "d2t")
    refused(target, mutate(draft, tmp_path / "c", lambda w: w["d2t"].__setitem__(-1, 500)), "d2t")
    refused(target, mutate(draft, tmp_path / "d", lambda w: w.update(d2t=w["d2t"].half())), "d2t")
    refused(target, mutate(draft, tmp_path / "e", lambda w: w.update(d2t=w["d2t"][:-1])), "d2t", 383, 384)
    refused(target, mutate(draft, tmp_path / "f", lambda w: w.update(t2d=w["t2d"].roll(1))), "t2d")


def test_b15_order_of_the_map_is_free_but_belongs_to_the_head(target, draft, tmp_path):
    """Rows of head and map permuted together: the same drafts. The map alone permuted: far fewer accepted."""
    order = torch.randperm(384)

    def both(w):
        ids = (w["d2t"] + torch.arange(384))[order]
        w["d2t"], w["lm_head.weight"] = ids - torch.arange(384), w["lm_head.weight"][order]

    def map_alone(w):
        w["d2t"] = (w["d2t"] + torch.arange(384))[order] - torch.arange(384)
    _, right, _ = first_logits(target, draft)
    _, same, _ = first_logits(target, mutate(draft, tmp_path / "a", both))
    _, wrong, _ = first_logits(target, mutate(draft, tmp_path / "b", map_alone))
    assert same.ids == right.ids == wrong.ids and same.accepted == right.accepted
    assert sum(wrong.accepted) < sum(right.accepted) / 3


def tagged(tmp_path, **config):
    """Block l adds something to channel l of the residual stream and nowhere else."""
    def edit(w):
        w["model.embed_tokens.weight"][:, :8] = 0
        for name, value in w.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                keep = torch.arange(len(value)) == int(name.split(".")[2])
                w[name] = value * keep[:, None] * 3
    source = tiny.write_target(tmp_path / "plain", **config)
    return mutate(source, tmp_path / "tagged", edit)


@pytest.mark.parametrize("spelling", [dict(capture=(2, 4, 7)), dict(capture=(1, 3, 6), capture_convention="output")])
def test_b18_two_conventions_one_capture(spelling, tmp_path):
    target = tagged(tmp_path)
    draft = tiny_draft.write_draft(tmp_path / "draft", target)
    with Engine(target, draft, **spelling) as engine:
        assert engine.draft_config.capture == (2, 4, 7)
        states = engine.score(PROMPT).states.unflatten(-1, (3, 64))
        for part, layer in zip(states.unbind(1), (2, 4, 7)):
            assert [channel for channel in range(8) if part[:, channel].abs().max() > 0] == list(range(layer))


def test_b18_every_dialects_spelling(target, checkpoints):
    """The same three streams in the spelling of every dialect, also where the first output id is not 1."""
    for dialect, capture in product(tiny_draft.PREFIX, ((2, 4, 5), (3, 4, 8), (1, 2, 3))):
        with Engine(target, checkpoints.draft(target, dialect=dialect, capture=capture)) as engine:
            assert engine.draft_config.capture == capture, dialect
            assert engine.draft_config.capture_reason in "\n".join(engine.report)


@pytest.mark.parametrize("shift", [-1, 1])
def test_b18_off_by_one_is_another_draft(shift, target, draft):
    """Neighbouring streams are alike, so acceptance may not show it: the proposals differ, and are those of the definition."""
    wrong = [i + shift for i in (2, 4, 5)]
    (a, _, _), (b, _, report) = first_logits(target, draft), first_logits(target, draft, capture=wrong)
    assert (a[0] - b[0]).abs().max() > 1e-2 and str(wrong) in report
    assert_close("first proposal", first_by_definition(target, draft, capture=wrong), b[0], 1e-5)


def test_b19_ids_of_the_draft_are_honoured(target, checkpoints, tmp_path):
    draft = checkpoints.draft(target, dialect="speculators", capture=(1, 5, 6))
    with Engine(target, draft) as engine:
        assert engine.draft_config.capture == (1, 5, 6)
    with Engine(target, mutate(draft, tmp_path / "x", config=lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))) as engine:
        assert engine.draft_config.capture == (2, 4, 5)
        assert re.search(r"(?i)warning.*\[2, 4, 5\]", "\n".join(engine.report))


@pytest.mark.parametrize("layers", [4, 5])
def test_b22_default_ids_collide_in_a_shallow_target(layers, tmp_path):
    target = tiny.write_target(tmp_path / "t", num_hidden_layers=layers)
    draft = tiny_draft.write_draft(tmp_path / "d", target, "safeailab", capture=(1, 2, 3))
    refused(target, mutate(draft, tmp_path / "x", config=lambda c: c.pop("eagle_config")), "collide")
    Engine(target, draft).close()


@pytest.mark.parametrize("capture, word", [
    ((4, 2, 5), "ascending"), ((2, 2, 5), "collide"), ((2, 4, 9), "0..8"), ((2, 4), "192")])
def test_capture_that_does_not_fit(capture, word, target, draft):
    refused(target, draft, word, capture=capture)


def test_b26_order_of_the_halves(target, draft, tmp_path):
    """Embedding first, hidden second, for each of q, k, v; and fc takes its chunks low to high."""
    def swap(w):
        for name in list(w):
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                w[name] = w[name].roll(64, 1)
    for name, edit in (("halves", swap), ("chunks", lambda w: w.update({"fc.weight": w["fc.weight"].roll(64, 1)}))):
        mutant = mutate(draft, tmp_path / name, edit)
        (a, _, _), (b, _, _) = first_logits(target, draft), first_logits(target, mutant)
        assert (a[0] - b[0]).abs().max() > 1e-2
        assert_close("the mutant, by the definition", first_by_definition(target, mutant), b[0], 1e-5)

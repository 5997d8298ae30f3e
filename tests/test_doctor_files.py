"""What the load audit makes of single mutants of a draft's files: the finding's name, and whether the mended files open. No forward runs."""
import pytest
import torch

from minispec.config import TargetConfig
from minispec.doctor_files import audit
from minispec.errors import MinispecError

from .mutants import add, drop, mutate
from .tiny_draft import DIALECTS


def look(target, draft, tmp_path, **dialect):
    (tmp_path / "scratch").mkdir()
    reading = {"overrides": {}, **dialect}
    findings, folder = audit(str(draft), TargetConfig.read(str(target)), str(tmp_path / "scratch"), reading)
    for finding in findings:
        assert all((finding.measured, finding.expected, finding.cause, finding.cure)) and finding.severity in ("error", "warning")
    return [finding.name for finding in findings], folder, findings


def layers(ids, **more):
    return lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=ids, **more)


def rename(old, new):
    return lambda w: w.update({new: w.pop(old)})


def prefix(w):
    w["d2t"].zero_()
    w["t2d"] = torch.arange(512) < 384


def unset(w):
    w["d2t"].zero_()
    w["t2d"] = torch.ones(512, dtype=torch.bool)


def repeat(w):
    w["lm_head.weight"] = w["lm_head.weight"][w["d2t"]]             # the converter's fault: offsets taken for rows


def nan(w):
    w["fc.weight"][3, 4] = float("nan")


MLP, NORM = "midlayer.mlp.up_proj.weight", "midlayer.hidden_norm.weight"
# hazard of the fact sheet's list -> edit of tensors, edit of the config, finding, opens when mended
MUTANTS = {
    "2 map in another order than t2d allows": (lambda w: w["t2d"].copy_(w["t2d"].roll(1)), None, "d2t-against-t2d", True),
    "3 map of zeros, no t2d": (lambda w: (w.pop("t2d"), w["d2t"].zero_()), None, "d2t-unset", False),
    "3 map of zeros, t2d of ones": (unset, None, "d2t-against-t2d", False),
    "3 map not saved": (drop("d2t"), None, "d2t-missing", True),
    "3 neither table saved": (drop("d2t", "t2d"), None, "d2t-missing", False),
    "3 the first ids": (prefix, None, "d2t-prefix", True),
    "4 map cast to fp16": (lambda w: w.update(d2t=w["d2t"].half()), None, "d2t-dtype", True),
    "5 head pruned by offsets": (repeat, None, "head-duplicate-rows", True),
    "5 head rows of zero": (lambda w: w["lm_head.weight"][5].zero_(), None, "head-zero-rows", True),
    "6 head missing": (drop("lm_head"), None, "head-missing", False),
    "8 tied head": (None, lambda c: c.update(tie_word_embeddings=True), "tied-head", True),
    "9 norm missing": (drop("hidden_norm"), None, "tensor-missing", False),
    "9 projection missing": (drop("up_proj"), None, "tensor-missing", False),
    "9 unknown tensor": (add("midlayer.gizmo.weight", 3), None, "tensor-unknown", True),
    "9 renamed projection": (rename(MLP, "midlayer.mlp.w3.weight"), None, "tensor-unknown", True),
    "9 renamed norm": (rename(NORM, "midlayer.hnorm.weight"), None, "tensor-unknown", True),
    "9 bias": (add("midlayer.self_attn.q_proj.bias", 128), None, "tensor-unknown", True),
    "11 fc_norm in the config alone": (None, lambda c: c.update(fc_norm=True), "norm-flag", True),
    "11 input_norm in the file alone": (add("input_norm.weight", 192), None, "norm-flag", True),
    "15 unsorted ids": (None, layers([5, 2, 4]), "capture-order", True),
    "17 two lists": (None, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "capture-list", True),
    "17 layers of a deeper target": (None, layers([2, 30, 58]), "capture-list", True),
    "17 two ids of three": (None, layers([2, 5]), "capture-count", True),
    "17 the last state listed too": (None, layers([2, 4, 5, 8]), "capture-count", True),
    "19 final state alone": (None, lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "fusion-bypassed", True),
    "19 one id": (None, layers([5]), "fusion-bypassed", True),
    "19 no fusion": (drop("fc.weight"), None, "fusion-missing", False),
    "32 map with a repeated id": (lambda w: w["d2t"].__setitem__(3, w["d2t"][4] + 1), None, "d2t-broken", True),
    "43 queries of no whole heads": (None, lambda c: c.update(head_dim=30), "load-refused", False),
    "49 another target's width": (None, lambda c: c.update(target_hidden_size=128), "wrong-target", False),
    "49 another target's vocabulary": (None, lambda c: c.update(vocab_size=500), "wrong-target", False),
    "49 another draft's vocabulary": (None, lambda c: c.update(draft_vocab_size=100), "wrong-target", False),
    "52 NaN": (nan, None, "not-finite", True),
    "a second layer": (add("layers.1.hidden_norm.weight", 64), None, "load-refused", False),
    "another activation": (None, lambda c: c.update(hidden_act="gelu"), "load-refused", False),
    "another rope": (None, lambda c: c.update(rope_scaling={"type": "longrope", "factor": 2.0}), "load-refused", False),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutants_finding(mutant, target, checkpoints, tmp_path):
    tensors, config, name, opens = MUTANTS[mutant]
    draft = checkpoints.draft(target, **DIALECTS["safeailab"])
    names, folder, _ = look(target, mutate(draft, tmp_path / "draft", tensors, config), tmp_path)
    assert names == [name] and (folder is not None) == opens


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_finding_on_a_dialect(dialect, target, checkpoints, tmp_path):
    assert look(target, checkpoints.draft(target, **DIALECTS[dialect]), tmp_path)[0] == []


def test_faults_of_a_speculators_draft(target, checkpoints, tmp_path):
    draft = checkpoints.draft(target, **DIALECTS["speculators"])
    wrong = mutate(draft, tmp_path / "draft", config=lambda c: c["transformer_layer_config"].update(model_type="llama"))
    names, folder, _ = look(target, wrong, tmp_path)
    assert names[0] == "qk-norm" and folder


def test_several_faults_at_once(target, checkpoints, tmp_path):
    """Read past each: unknown name, lost flag, absolute map."""
    normed = checkpoints.draft(target, dialect="specforge", vocab=384, flags=("fc_norm",))

    def edit(w):
        w["d2t"] += torch.arange(384)
        w["midlayer.gizmo.weight"] = torch.ones(3)
    wrong = mutate(normed, tmp_path / "draft", edit, lambda c: c.pop("fc_norm"))
    names, folder, findings = look(target, wrong, tmp_path)
    assert sorted(names) == ["d2t-absolute", "norm-flag", "tensor-unknown"] and folder
    assert all(finding.evidence["refused"] for finding in findings)


@pytest.mark.parametrize("spoil", [lambda path: (path / "config.json").unlink(), lambda path: (path / "config.json").write_text("{"),
                                   lambda path: (path / "model.safetensors").unlink(),
                                   lambda path: (path / "model.safetensors").write_bytes(b"short")])
def test_files_that_cannot_be_read_are_no_finding(spoil, target, checkpoints, tmp_path):
    draft = mutate(checkpoints.draft(target, **DIALECTS["safeailab"]), tmp_path / "draft")
    spoil(draft)
    with pytest.raises(MinispecError):
        look(target, draft, tmp_path)

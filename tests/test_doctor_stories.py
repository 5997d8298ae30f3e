"""The five stories that `minispec doctor` exists for, each built from the default pair, and the default pair itself."""
import json

import torch
from safetensors.torch import load_file

from minispec.doctor import examine

from .conftest import DEFAULT_DRAFT
from .doctor_kit import few, heard, kept, shared  # noqa: F401
from .mutants import drop, mutate


def found(heard, draft, engine=False, **dialect):
    diagnosis = examine(heard, str(draft), dialect, engine=engine)
    return {finding.name: finding for finding in diagnosis.findings}, diagnosis


def midlayer(name):
    return name.startswith("midlayer.")


def initial(w):
    """What a lenient loader makes of a layer whose names it does not know: torch's initial values, norms of one."""
    generator = torch.Generator().manual_seed(0)
    for name in filter(midlayer, list(w)):
        bound = w[name].shape[-1] ** -0.5
        w[name] = torch.ones_like(w[name]) if w[name].dim() == 1 else (torch.rand(w[name].shape, generator=generator) * 2 - 1).mul(bound).to(w[name].dtype)


def test_the_default_pair_is_sound(few):
    names, diagnosis = found(few, DEFAULT_DRAFT, engine=True)
    assert diagnosis.sound and not names.keys() - {"slower-than-plain"}
    facts = diagnosis.facts
    assert facts["engine_by_depth"]["engine"] == facts["engine_by_depth"]["probe"] and facts["agreement"] > 0.6
    assert facts["depth"]["recycling_pre_norm"][3] > facts["depth"]["recycling_post_norm"][3] + 0.1
    assert json.loads(diagnosis.json())["sound"] and diagnosis.text().endswith("\nsound")


def test_story_1_a_layer_under_names_that_were_not_expected(few, tmp_path):
    """The trained layer as layers.0.*, and what a lenient loader saved: first beside it, then in its place."""
    def both(w):
        trained = {name.replace("midlayer.", "layers.0."): w[name] for name in filter(midlayer, w)}
        initial(w)
        w |= trained
    names, diagnosis = found(few, mutate(DEFAULT_DRAFT, tmp_path / "both", both))
    assert names.keys() == {"layer-twice"} and "remove midlayer.*" in names["layer-twice"].cure
    assert diagnosis.facts["agreement"] > 0.6, "reads on with the trained one"
    names, diagnosis = found(few, mutate(DEFAULT_DRAFT, tmp_path / "lost", initial))
    assert names.keys() == {"layer-untrained"} and "not_probed" in diagnosis.facts
    assert "midlayer.*" in names["layer-untrained"].cure and "strict" in names["layer-untrained"].cure


def test_story_2_a_map_stored_as_absolute_ids(few, tmp_path):
    ids = torch.arange(3072)
    names, diagnosis = found(few, mutate(DEFAULT_DRAFT, tmp_path / "absolute", lambda w: w["d2t"].add_(ids)))
    assert names.keys() == {"d2t-absolute"} and "--d2t absolute" in names["d2t-absolute"].cure
    assert diagnosis.facts["agreement"] > 0.6
    names, diagnosis = found(few, mutate(DEFAULT_DRAFT, tmp_path / "fixed", lambda w: w["d2t"].sub_(ids)))
    assert names.keys() == {"d2t-broken"} and "d2t + 2 x id" in names["d2t-broken"].cure
    assert diagnosis.facts["agreement"] > 0.6


def test_story_3_one_state_and_no_fusion(heard, few, tmp_path):
    """The config names one layer; engines that skip fc where the width fits feed it that state. The scan finds the three."""
    one = mutate(DEFAULT_DRAFT, tmp_path / "one", config=lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[7]))
    names, diagnosis = found(heard, one)
    assert names.keys() == {"fusion-bypassed"} and "--capture 2,4,7" in names["fusion-bypassed"].cure
    flag = mutate(DEFAULT_DRAFT, tmp_path / "flag", config=lambda c: c["eagle_config"].update(use_aux_hidden_state=False))
    names, _ = found(few, flag)
    assert names.keys() == {"fusion-bypassed"} and "use_aux_hidden_state" in names["fusion-bypassed"].cure
    names, diagnosis = found(heard, mutate(DEFAULT_DRAFT, tmp_path / "none", drop("fc.weight")))
    assert names.keys() == {"fusion-missing"} and "not_probed" in diagnosis.facts


def test_story_4_other_layers_than_it_was_trained_on(heard, tmp_path):
    wrong = mutate(DEFAULT_DRAFT, tmp_path / "x", config=lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 3, 6]))
    names, _ = found(heard, wrong)
    finding = names["capture-layer"]
    assert names.keys() == {"capture-layer"} and "--capture 2,4,7" in finding.cure
    assert finding.evidence["declared"] < finding.evidence["better"] - 0.1


def test_story_5_a_sound_first_step_and_a_broken_recycle(few, tmp_path):
    names, diagnosis = found(few, mutate(DEFAULT_DRAFT, tmp_path / "x", config=lambda c: c.update(norm_output=True)))
    assert names.keys() == {"recycle-norm"} and "norm_output to false" in names["recycle-norm"].cure
    first, second = diagnosis.facts["depth"]["recycling_post_norm"][:2]
    assert first > 0.7 > second
    assert load_file(tmp_path / "x" / "model.safetensors").keys() == load_file(DEFAULT_DRAFT / "model.safetensors").keys()

"""Opening drafts: every dialect becomes the same parameters; every misfit is refused by name."""
import dataclasses
import json
import pickle
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.config import TargetConfig
from minispec.errors import MinispecError
from minispec.weights.draft import load_draft, open_draft

from . import tiny, tiny_draft
from .test_weights import drop, edit, put, to_nan

V, VD = 512, 384


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8, n_routed_experts=2, n_group=1,
                             num_experts_per_tok=1)


@pytest.fixture
def config(target):
    return TargetConfig.read(str(target))


@pytest.fixture
def write(target, tmp_path):
    def write(dialect="safeailab", *args, name="d", **options):
        return tiny_draft.write_draft(tmp_path / name, target, dialect, *args, **{"vocab": VD, **options})
    return write


def load(folder, config, **options):
    plan = open_draft(str(folder), config, **options)
    parameters = {name: torch.full(shape, float("nan")) for name, shape in plan.shapes.items()}
    return plan, parameters, load_draft(plan, parameters)


def refused(folder, config, *words, **options):
    with pytest.raises(MinispecError) as error:
        load(folder, config, **options)
    text = str(error.value)
    assert "\n" not in text, text
    for word in words:
        assert str(word) in text, text


def expected(w, captured):
    """The canonical parameters by the contract, from bare names (no prefix, split projections)."""
    def at(name):
        return w[name + ".weight"].float()
    names = dict(fc="fc", embed_norm="input_layernorm", hidden_norm="hidden_norm", mlp_norm="post_attention_layernorm",
                 norm="norm",
                 o="self_attn.o_proj", down="mlp.down_proj", embed="embed_tokens", head="lm_head", input_norm="input_norm")
    out = {param: at(name) for param, name in names.items() if name + ".weight" in w}
    out["gate_up"] = torch.cat([at("mlp.gate_proj"), at("mlp.up_proj")])
    if "fc_norm.0.weight" in w:
        out["fc_norm"] = torch.stack([at(f"fc_norm.{k}") for k in range(captured)])
    if "self_attn.kv_b_proj.weight" in w:
        first = "q_a_proj" if "self_attn.q_a_proj.weight" in w else "q_proj"
        out["qkv_a"] = torch.cat([at("self_attn." + first), at("self_attn.kv_a_proj_with_mqa")])
        out |= {"kv_norm": at("self_attn.kv_a_layernorm"), "kv_b": at("self_attn.kv_b_proj").view(4, 40, 48)}
        if first == "q_a_proj":
            out |= {"q_norm": at("self_attn.q_a_layernorm"), "q_b": at("self_attn.q_b_proj")}
    else:
        out["qkv"] = torch.cat([at(f"self_attn.{n}_proj") for n in "qkv"])
        out |= {f"{n}_norm": at(f"self_attn.{n}_norm") for n in "qk" if f"self_attn.{n}_norm.weight" in w}
    return out


def assert_filled(folder, plan, parameters, report):
    want = expected(tiny_draft.bare_tensors(folder), len(plan.config.capture))
    assert set(want) == set(parameters)
    for name, value in want.items():
        assert torch.equal(parameters[name], value), name
    assert set(report.tensors) == set(load_file(folder / "model.safetensors"))


KINDS = [("llama", {}), ("mla", {}), ("mla", {"q_lora_rank": None})]           # speculators has llama and qwen3 layers only


@pytest.mark.parametrize("dialect, attention, more", [(d, *kind) for d in tiny_draft.PREFIX for kind in KINDS
                                                      if d != "speculators" or kind[0] == "llama"])
def test_every_dialect(dialect, attention, more, write, config):
    folder = write(dialect, attention, dtype=torch.bfloat16, order="frequency" if dialect == "nvidia" else "sorted", **more)
    plan, parameters, report = load(folder, config)
    assert_filled(folder, plan, parameters, report)
    assert plan.config.capture == (2, 4, 5) and plan.config.capture_reason in report.lines
    assert plan.config.attention == attention and plan.config.rope.style == ("half" if attention == "llama" else "interleaved")
    d2t = load_file(folder / "model.safetensors")["d2t"]
    assert plan.d2t.tolist() == [i + d for i, d in enumerate(d2t.tolist())]
    assert ("embed" in plan.own) == (dialect in ("speculators", "torchspec"))
    assert "embed: " + ("own" if "embed" in plan.own else "borrowed from the target because absent") in report.lines


@pytest.mark.parametrize("flags", [(), ("norm_before_fc",), ("fc_norm", "norm_output"), ("norm_before_residual", "norm_output")])
@pytest.mark.parametrize("dialect", ["specforge", "speculators", "nvidia"])
def test_flags(dialect, flags, write, config):
    folder = write(dialect, flags=flags)
    plan, parameters, report = load(folder, config)
    assert_filled(folder, plan, parameters, report)
    assert {flag: getattr(plan.config, flag) for flag in tiny_draft.FLAGS} == {flag: flag in flags for flag in tiny_draft.FLAGS}
    said = any("norm_before_residual is missing, read as False" in line for line in report.lines)
    assert said == ("norm_before_residual" not in flags and dialect != "speculators")


def test_names_with_and_without_prefix_fused_and_split(write, config):
    """One network under every spelling: bit-equal parameters (B03)."""
    first = None
    for attention in ("llama", "mla"):
        source = write("specforge", attention, flags=("fc_norm",), name=attention)
        weights, first = tiny_draft.bare_tensors(source), load(source, config)[1]
        for prefix, outer, fused, alias in product(("midlayer.", "layers.0."), ("", "model."), (False, True), (False, True)):
            w = dict(weights)
            if fused:
                w["mlp.gate_up_proj.weight"] = torch.cat([w.pop("mlp.gate_proj.weight"), w.pop("mlp.up_proj.weight")])
                parts = [f"self_attn.{n}_proj.weight" for n in "qkv"] if attention == "llama" else \
                    ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"]
                name = "qkv_proj" if attention == "llama" else "fused_qkv_a_proj_with_mqa"
                w[f"self_attn.{name}.weight"] = torch.cat([w.pop(p) for p in parts])
            if alias:
                w |= {f"aux_norm_{n}.weight": w.pop(f"fc_norm.{i}.weight") for i, n in enumerate(("low", "mid", "high"))}
            folder = write("specforge", attention, flags=("fc_norm",), prefix=prefix, outer=outer, weights=w,
                           name=f"{attention}{prefix}{outer}{fused}{alias}")
            _, parameters, _ = load(folder, config)
            assert set(parameters) == set(first) and all(torch.equal(parameters[n], first[n]) for n in first)


def test_head_dim_from_the_config_or_the_shape(write, config):
    for fused in (False, True):
        def change(w):
            parts = [w.pop(f"midlayer.self_attn.{n}_proj.weight") for n in "qkv"]
            w["midlayer.self_attn.qkv_proj.weight"] = torch.cat(parts)
        folder = edit(write(name=str(fused)), change if fused else None, lambda c: c.pop("head_dim"))
        plan, _, report = load(folder, config)
        assert plan.config.head_dim == 32 and any("head_dim is missing, read as 32" in line for line in report.lines)
    refused(edit(write(name="x"), config=lambda c: c.update(head_dim=16)), config, "q_proj.weight", "[128, 128]", "[64, 128]",
            "head_dim")


def test_number_of_captured_states_is_read_from_fc(write, config):
    for capture in ((3,), (1, 4), (0, 2, 4, 8), (1, 2, 3, 4, 5)):
        plan, parameters, _ = load(write(capture=capture, flags=("fc_norm",), name=str(len(capture))), config)
        assert plan.config.capture == capture and parameters["fc"].shape == (64, 64 * len(capture))
        assert parameters["fc_norm"].shape == (len(capture), 64)


def test_a_draft_stored_in_fp8_and_int4(write, config):
    """A draft has its own recipe (B06)."""
    folder = write(own_embed=True)
    plain = load(folder, config)[1]
    for kind, recipe, name in (("fp8", tiny.FP8, "fp8"), ("int4", {**tiny.INT4, "ignore": ["re:.*(lm_head|fc)"]}, "int4")):
        def store(w):
            for k in [k for k in w if k.endswith("_proj.weight")]:
                w |= {k + end: part for end, part in getattr(tiny, "pack_" + kind)(w.pop(k)).items()}
        copy = shutil.copytree(folder, folder.with_name(name))
        _, parameters, _ = load(edit(copy, store, lambda c: c.update(quantization_config=recipe)), config)
        assert torch.equal(parameters["fc"], plain["fc"]) and torch.equal(parameters["head"], plain["head"])
        for param in ("qkv", "o", "gate_up", "down"):
            error = (parameters[param] - plain[param]).norm() / plain[param].norm()
            assert 0 < error < (0.05 if kind == "fp8" else 0.2), param


def test_sharded_drafts_and_pickles(write, config, tmp_path):
    folder = write()
    plain, tensors = load(folder, config)[1], load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tiny.save(folder, tensors, shards=2)
    assert all(torch.equal(plain[k], v) for k, v in load(folder, config)[1].items())
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    _, parameters, report = load(folder, config)
    assert all(torch.equal(plain[k], v) for k, v in parameters.items()) and any("weights-only" in line for line in report.lines)


class Boom:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was executed",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [pickle.dumps(Boom()), pickle.dumps({"fc.weight": Boom()}), b"", b"x" * 100,
                                     b"PK\x03\x04" + b"0" * 90])
def test_a_pickle_that_does_more_is_refused(content, write, config):
    folder = write()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, config, "pytorch_model.bin", "weights-only", "safetensors")
    torch.save({"state_dict": {"fc.weight": torch.ones(2)}}, folder / "pytorch_model.bin")
    refused(folder, config, "pytorch_model.bin", "state dict")


def test_training_leftovers_are_skipped_with_a_reason(write, config):
    folder = edit(write("speculators"), lambda w: w.update({"verifier_lm_head.weight": torch.ones(2),
                                                            "verifier_norm.weight": torch.ones(2)}))
    report = load(folder, config)[2]
    assert "training only" in report.tensors["verifier_norm.weight"] and "t2d" in report.tensors


# --- capture ----------------------------------------------------------------------------------------------------------------

def with_ids(ids, dialect="safeailab", key="eagle_aux_hidden_state_layer_ids", **eagle):
    def change(c):
        if dialect == "speculators":
            c[key] = ids
        else:
            c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, **eagle}
    return change


CAPTURES = [
    (with_ids([2, 4, 5]), {}, (2, 4, 5), "no sign"),
    (with_ids([1, 3, 4]), {}, (2, 4, 5), "first id is 1"),
    (with_ids([1, 3, 4], capture_convention="input"), {}, (1, 3, 4), "eagle_config.capture_convention"),
    (with_ids([2, 4, 7], capture_convention="output"), {}, (3, 5, 8), "eagle_config.capture_convention"),
    (with_ids([2, 4, 5], next_layer_regular=True), {}, (3, 5, 6), "next_layer_regular"),
    (with_ids([2, 4, 5], next_layer_regular=True, capture_convention="input"), {}, (2, 4, 5), "eagle_config.capture_convention"),
    (with_ids([2, 4, 5], parallel_draft_step=1), {"capture_convention": "input"}, (2, 4, 5), "was given"),
    (with_ids([1, 3, 4]), {"capture": (0, 5, 8)}, (0, 5, 8), "caller"),
    (with_ids([1, 3, 4]), {"capture": [0, 5, 7], "capture_convention": "output"}, (1, 6, 8), "caller"),
    (with_ids([-1, 3, 4], capture_convention="output"), {}, (0, 4, 5), "eagle_config.capture_convention"),
    (lambda c: c.pop("eagle_config"), {}, (2, 4, 5), "warning"),
    (lambda c: c.update(eagle_config={"layer_ids": [3, 4, 5]}), {}, (3, 4, 5), "no sign"),
    (lambda c: (c.pop("eagle_config"), c.update(eagle_aux_hidden_state_layer_ids=[1, 4, 5])), {}, (2, 5, 6), "first id is 1"),
]


@pytest.mark.parametrize("change, options, capture, reason", CAPTURES)
def test_order_of_resolution(change, options, capture, reason, write, config):
    plan, _, report = load(edit(write(), config=change), config, **options)
    assert plan.config.capture == capture and reason in plan.config.capture_reason and plan.config.capture_reason in report.lines


def test_speculators_list_numbers_inputs(write, config):
    plan, _, _ = load(edit(write("speculators"), config=with_ids([1, 4, 5], "speculators")), config)
    assert plan.config.capture == (1, 4, 5) and "speculators" in plan.config.capture_reason


@pytest.mark.parametrize("change, options, words", [
    (with_ids([2, 4]), {}, ("2 layers", 192, "3 x 64")), (with_ids([2, 4, 5, 8]), {}, ("4 layers", 192)),
    (with_ids([2, 5, 4]), {}, ("ascending",)), (with_ids([2, 2, 4]), {}, ("collide",)), (with_ids([2, 4, 9]), {}, ("0..8",)),
    (with_ids([-1, 4, 5]), {}, ("0..8",)), (with_ids([2, 4, 8], capture_convention="output"), {}, ("0..8",)),
    (with_ids("2,4,5"), {}, ("2,4,5", "--capture")), (with_ids([2, 4.0, 5]), {}, ("4.0",)),
    (with_ids([True, 4, 5]), {}, ("True",)),
    (with_ids([]), {}, ("[]",)), (with_ids([2, 4, 5], capture_convention="both"), {}, ("capture_convention", "both")),
    (with_ids([2, 4, 5], layer_ids=[1, 2, 3]), {}, ("layer_ids", "[1, 2, 3]")),
    (with_ids([2, 4, 5]), {"capture": [2, 4]}, ("capture", 192)),
    (with_ids([2, 4, 5]), {"capture": []}, ("capture",)), (with_ids([2, 4, 5]), {"capture_convention": "both"}, ("both",)),
    (lambda c: c.update(eagle_config=3), {}, ("eagle_config", 3)),
])
def test_captures_that_are_refused(change, options, words, write, config):
    refused(edit(write(), config=change), config, *words, **options)


@pytest.mark.parametrize("layers", [4, 5])
def test_default_ids_that_collide(layers, write, config):
    shallow = dataclasses.replace(config, num_hidden_layers=layers)
    folder = edit(write(capture=(1, 2, 3)), config=lambda c: c.pop("eagle_config"))
    refused(folder, shallow, "collide", layers)
    assert load(folder, shallow, capture=(1, 2, 3))[0].config.capture == (1, 2, 3)


# --- vocabulary -------------------------------------------------------------------------------------------------------------

def ids_of(w):
    return w["d2t"] + torch.arange(VD)


def absolute(w):
    w["d2t"] = ids_of(w)


def no_t2d(change):
    return lambda w: (change(w), w.pop("t2d"))[0]


def prefix(w):
    w["d2t"].zero_()
    w["t2d"] = torch.arange(V) < VD


MAPS = {
    "absolute": (absolute, {}, ("d2t", "--d2t absolute")), "absolute, no t2d": (no_t2d(absolute), {}, ("--d2t absolute",)),
    "offset read as absolute": (None, {"d2t": "absolute"}, ("d2t", "drop --d2t absolute")),
    "repeated": (lambda w: w["d2t"].__setitem__(3, w["d2t"][4] + 1), {}, ("repeated", "original")),
    "out of range": (lambda w: w["d2t"].__setitem__(-1, 500), {}, ("outside", 511)),
    "below zero": (lambda w: w["d2t"].__setitem__(0, -1), {}, ("outside", "-1")),
    "float": (lambda w: put("d2t", w["d2t"].half())(w), {}, ("d2t", "F16")),
    "short": (lambda w: put("d2t", w["d2t"][:-1])(w), {}, ("[383]", "[384]")),
    "t2d of others": (lambda w: put("t2d", w["t2d"].roll(1))(w), {}, ("t2d",)),
    "t2d short": (lambda w: put("t2d", w["t2d"][:-1])(w), {}, ("[511]", "[512]")),
    "t2d full": (lambda w: w["t2d"].fill_(True), {}, ("t2d keeps 512",)),
    "no map": (lambda w: (w.pop("d2t"), w.pop("t2d")), {}, ("d2t", "missing")),
    "only t2d": (drop("d2t"), {}, ("d2t", "--d2t from-t2d")),
    "zero, no t2d": (no_t2d(lambda w: w["d2t"].zero_()), {}, ("all zero",)),
    "zero, t2d says otherwise": (lambda w: w["d2t"].zero_(), {}, ("t2d leaves out",)),
    "zero, t2d all ones": (lambda w: (w["d2t"].zero_(), w["t2d"].fill_(True)), {}, ("t2d keeps 512",)),
    "from-t2d without": (no_t2d(lambda w: None), {"d2t": "from-t2d"}, ("from-t2d", "t2d", "missing")),
    "from-t2d with a wrong count": (lambda w: w["t2d"].fill_(True), {"d2t": "from-t2d"}, ("512", "384")),
    "no such reading": (None, {"d2t": "guess"}, ("guess",)),
}


@pytest.mark.parametrize("fault", MAPS)
def test_maps_that_are_refused(fault, write, config):
    change, options, words = MAPS[fault]
    refused(edit(write(), change), config, *words, **options)


def test_maps_that_are_read(write, config):
    folder = write(order="sorted")
    ids = ids_of(load_file(folder / "model.safetensors"))
    assert torch.equal(load(folder, config)[0].d2t, ids)
    for name, change, reading in (("a", absolute, "absolute"), ("b", drop("d2t"), "from-t2d"), ("c", None, "from-t2d")):
        plan, _, report = load(edit(shutil.copytree(folder, folder.with_name(name)), change), config, d2t=reading)
        assert torch.equal(plan.d2t, ids) and plan.d2t.dtype == torch.int64
        assert set(report.tensors) == set(load_file(folder.with_name(name) / "model.safetensors"))
    plan, _, report = load(edit(folder, prefix), config)
    assert plan.d2t.tolist() == list(range(VD)) and any("warning" in line and f"first {VD}" in line for line in report.lines)
    nvidia = write("nvidia", order="frequency", name="n")
    plan, _, report = load(nvidia, config)
    assert torch.equal(plan.d2t, ids_of(load_file(nvidia / "model.safetensors"))) and not torch.equal(plan.d2t,
                                                                                                      plan.d2t.sort().values)


def test_full_vocabulary(write, config):
    folder = write(vocab=None)
    assert load(folder, config)[0].d2t is None
    plan, _, report = load(edit(folder, put("d2t", torch.zeros(V, dtype=torch.int64)), lambda c: c.pop("draft_vocab_size")),
                           config)
    assert plan.d2t is None and plan.config.draft_vocab_size == V
    assert any("draft_vocab_size is missing" in line for line in report.lines)
    refused(edit(folder, put("d2t", torch.ones(V, dtype=torch.int64))), config, "d2t", V)
    refused(edit(folder, lambda w: w.update(d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.arange(V) < 9)), config, "t2d", V)


# --- what is there, what is not ---------------------------------------------------------------------------------------------

def test_own_borrowed_and_absent(write, config):
    whole = write(vocab=None, own_embed=True)
    plan, _, report = load(whole, config)
    assert plan.own == {"embed", "head"} and {"embed: own", "head: own"} <= set(report.lines)
    plan, parameters, report = load(edit(whole, lambda w: (w.pop("lm_head.weight"), w.pop("embed_tokens.weight"))), config)
    assert plan.own == set() and not {"embed", "head"} & set(parameters)
    assert {"embed: borrowed from the target because absent",
            "head: borrowed from the target because absent"} <= set(report.lines)
    refused(edit(write(name="a"), drop("lm_head.weight")), config, "lm_head.weight", V, VD)
    narrow = write(hidden_size=48, vocab=None, name="b")
    assert load(narrow, config)[1]["embed"].shape == (V, 48)
    refused(edit(shutil.copytree(narrow, narrow.with_name("c")), drop("embed_tokens.weight")), config, "embed_tokens.weight", 64,
            48)
    refused(edit(narrow, drop("lm_head.weight")), config, "lm_head.weight", 64, 48)


def test_tied_heads(write, config):
    tie = dict(config=lambda c: c.update(tie_word_embeddings=True))
    folder = write(vocab=None, own_embed=True)
    refused(edit(shutil.copytree(folder, folder.with_name("a")), **tie), config, "tie_word_embeddings", "lm_head.weight")
    plan, parameters, report = load(edit(folder, drop("lm_head.weight"), **tie), config)
    assert torch.equal(parameters["head"], parameters["embed"]) and plan.own == {"embed", "head"}
    assert report.tensors["embed_tokens.weight"] == "consumed by embed, head"
    refused(edit(folder, drop("embed_tokens.weight")), config, "tie_word_embeddings", "embedding")
    refused(edit(write(own_embed=True, name="b"), drop("lm_head.weight"), **tie), config, "tie_word_embeddings", V, VD)


def test_repeated_rows_of_the_head_are_reported(write, config):
    folder = write()
    assert not any("warning" in line for line in load(folder, config)[2].lines)
    lines = load(edit(folder, lambda w: w["lm_head.weight"].__setitem__(slice(0, 9), w["lm_head.weight"][9])), config)[2].lines
    assert any("warning: 9 rows" in line for line in lines)


M = "midlayer."
FAULTS = {
    "hidden_norm missing": (drop(M + "hidden_norm.weight"), None, ("hidden_norm.weight", "missing")),
    "fc missing": (drop("fc.weight"), None, ("fc.weight", "missing", "EAGLE-3")),
    "unknown": (put(M + "gizmo.weight", torch.ones(2)), None, (M + "gizmo.weight", "unknown", "nearest")),
    "renamed": (lambda w: put(M + "self_attn.query.weight", w.pop(M + "self_attn.q_proj.weight"))(w),
                lambda c: c.update(head_dim=32), ("query.weight", "q_proj")),
    "misshapen": (put("norm.weight", torch.ones(63)), None, ("norm.weight", "[63]", "[64]")),
    "fc of another target": (put("fc.weight", torch.ones(64, 190)), None, (190, 64)),
    "fc is no matrix": (put("fc.weight", torch.ones(64)), None, ("fc.weight", "[64]")),
    "head of another size": (put("lm_head.weight", torch.ones(380, 64)), None,
                             ("lm_head.weight", "[380, 64]", "draft_vocab_size")),
    "nan": (to_nan("fc.weight"), None, ("fc.weight", "NaN")),
    "second layer": (put("layers.1.mlp.gate_proj.weight", torch.ones(2)), None, ("layers.1", "one layer")),
    "p-eagle": (put("mask_hidden", torch.ones(1, 1, 192)), None, ("mask_hidden", "P-EAGLE")),
    "bias": (put(M + "self_attn.q_proj.bias", torch.ones(4)), None, ("q_proj.bias", "bias")),
    "scale left over": (put("fc.weight_scale_inv", torch.ones(1, 2)), None, ("fc.weight_scale_inv",)),
    "input_norm without flag": (put("input_norm.weight", torch.ones(192)), None, ("norm_before_fc", "input_norm.weight")),
    "fc_norm without flag": (put("fc_norm.0.weight", torch.ones(64)), None, ("fc_norm", "fc_norm.0.weight")),
    "flag without fc_norm": (None, lambda c: c.update(fc_norm=True), ("fc_norm", "True")),
    "alias without fc_norm": (None, lambda c: c.update(use_aux_norm=True), ("fc_norm",)),
    "flag without input_norm": (None, lambda c: c.update(norm_before_fc=True), ("norm_before_fc", "input_norm")),
    "flags disagree": (None, lambda c: (c.update(norm_output=True), c["eagle_config"].update(return_hidden_post_norm=False)),
                       ("norm_output", "return_hidden_post_norm")),
    "flag is no bool": (None, lambda c: c.update(norm_output="yes"), ("norm_output", "yes")),
    "both norms": (lambda w: [w.update({name + ".weight": torch.ones(n)}) for name, n in
                              (("input_norm", 192), ("fc_norm.0", 64), ("fc_norm.1", 64), ("fc_norm.2", 64))],
                   lambda c: c.update(fc_norm=True, norm_before_fc=True), ("norm_before_fc", "fc_norm")),
    "width": (None, lambda c: c.update(target_hidden_size=128), ("target_hidden_size", 128, 64)),
    "hidden": (None, lambda c: c.update(hidden_size=32), ("32",)),
    "vocabulary": (None, lambda c: c.update(vocab_size=500), ("vocab_size", 500, 512)),
    "too large": (None, lambda c: c.update(draft_vocab_size=600), ("draft_vocab_size", 600)),
    "no aux": (None, lambda c: c["eagle_config"].update(use_aux_hidden_state=False), ("use_aux_hidden_state",)),
    "no final norm": (None, lambda c: c["eagle_config"].update(use_last_layernorm=False), ("use_last_layernorm",)),
    "mtp norms": (None, lambda c: c["eagle_config"].update(use_mtp_layernorm=True), ("use_mtp_layernorm",)),
    "parallel": (None, lambda c: c["eagle_config"].update(parallel_draft_step=4), ("parallel_draft_step", 4)),
    "layers": (None, lambda c: c.update(num_hidden_layers=2), ("num_hidden_layers", 2)),
    "bias flag": (None, lambda c: c.update(attention_bias=True), ("attention_bias",)),
    "heads": (None, lambda c: c.update(num_key_value_heads=3), ("num_key_value_heads", 3, 4)),
    "act": (None, lambda c: c.update(hidden_act="gelu"), ("hidden_act",)),
    "rope": (None, lambda c: c.update(rope_scaling={"type": "longrope", "factor": 2.0}), ("longrope",)),
    "odd": (None, lambda c: c.update(head_dim=31), ("head_dim", 31)),
    "speculators without layer": (None, lambda c: c.update(speculators_model_type="eagle3"), ("transformer_layer_config",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, write, config):
    change, values, words = FAULTS[fault]
    refused(edit(write(), change, values), config, *words)


def test_eagle_1_heads_are_no_eagle_3_heads(tmp_path, config):
    tmp_path = Path(tmp_path)
    save_file({"embed_tokens.weight": torch.ones(V, 64), "fc.weight": torch.ones(64, 128),
               "layers.0.self_attn.q_proj.weight": torch.ones(64, 64)},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**tiny_draft.SHAPE, **tiny_draft.LLAMA, "hidden_size": 64,
                                                      "vocab_size": V}))
    refused(tmp_path, config, "layers")


# --- speculators ------------------------------------------------------------------------------------------------------------

def test_speculators_means_class_defaults(write, config):
    """A field left out of transformer_layer_config is the default of its transformers class."""
    folder = write("speculators", qk_norm=True, head_dim=128, num_key_value_heads=4)
    whole = load(folder, config)[0].config
    shorter = load(edit(folder, config=lambda c: [c["transformer_layer_config"].pop(k) for k in
                                                  ("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act")]),
                                                  config)[0].config
    assert shorter == whole and whole.qk_norm and whole.head_dim == 128
    refused(edit(folder, config=lambda c: c["transformer_layer_config"].pop("vocab_size")), config, "vocab_size", 151936, 512)
    refused(edit(folder, config=lambda c: c["transformer_layer_config"].update(model_type="llama", vocab_size=V)), config,
            "model_type", "qwen3")


def test_class_defaults_are_those_of_transformers():
    from transformers import LlamaConfig, Qwen3Config

    from minispec.weights.dialect import _CLASSES
    for cls in (LlamaConfig, Qwen3Config):
        fresh = cls()
        assert {k: getattr(fresh, k) for k in _CLASSES[cls.model_type]} == _CLASSES[cls.model_type]


@pytest.mark.parametrize("change, words", [
    (lambda c: c.update(speculators_model_type="peagle"), ("speculators_model_type", "peagle")),
    (lambda c: c["transformer_layer_config"].update(model_type="gpt_oss"), ("model_type", "gpt_oss")),
    (lambda c: c.update(transformer_layer_config=[]), ("transformer_layer_config",)),
])
def test_speculators_that_are_refused(change, words, write, config):
    refused(edit(write("speculators"), config=change), config, *words)


# --- assumptions and overrides ----------------------------------------------------------------------------------------------

def test_assumptions_are_stated(write, config):
    folder = edit(write(), config=lambda c: [c.pop(k) for k in ("rope_theta", "rms_norm_eps", "max_position_embeddings")])
    lines = load(folder, config)[2].lines
    for word in ("rope_theta is missing, read as 10000", "rms_norm_eps is missing, read as 1e-06",
                 "max_position_embeddings is missing, read as 2048"):
        assert any(word in line for line in lines), word
    lines = load(edit(folder, config=lambda c: c["eagle_config"].update(mask_token_id=7)), config)[2].lines
    assert any("eagle_config.mask_token_id ignored" in line for line in lines)


def test_overrides(write, config):
    plan, _, report = load(write(), config, overrides={"norm_before_residual": True, "norm_output": True})
    assert plan.config.norm_before_residual and plan.config.norm_output
    assert any("norm_output True given by the caller" in line for line in report.lines)
    for overrides in ({"normbefore": True}, {"norm_output": 1}):
        refused(write(), config, next(iter(overrides)), overrides=overrides)
    refused(write(), config, "fc_norm", overrides={"fc_norm": True})


def test_latent_eps_of_an_mla_draft(write, config):
    folder = write("torchspec", "mla", rms_norm_eps=1e-5)
    assert load(folder, config)[0].config.latent_norm_eps == 1e-6
    assert load(folder, config, latent_norm_eps="config")[0].config.latent_norm_eps == 1e-5


def test_softmax_scale(write, config):
    assert load(write(), config)[0].config.softmax_scale == pytest.approx(32 ** -0.5)
    plan, _, _ = load(write("nvidia", "mla", rope_scaling=tiny.YARN, name="m"), config)
    assert plan.config.softmax_scale == pytest.approx(24 ** -0.5 * (0.1 * torch.tensor(4.0).log().item() + 1) ** 2)

"""Loading targets: every parameter against the file's own tensors, every fault by name."""
import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.config import TargetConfig
from minispec.errors import MinispecError
from minispec.weights.checkpoint import Checkpoint, Info, read_header
from minispec.weights.load import account, fill, open_target, rename
from minispec.weights.names import strip_target, target_table

from . import tiny

TINY = dict(num_hidden_layers=3, vocab_size=96, n_routed_experts=4, num_experts_per_tok=2)
V1 = "model.layers.1."


def load(folder, dtype=torch.float32, **options):
    """(config, parameters, report), the parameters NaN before."""
    config = TargetConfig.read(str(folder), **options)
    plan = open_target(str(folder), config)
    parameters = {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in plan.shapes.items()}
    return config, parameters, fill(plan, parameters)


def refused(folder, *words, read=load):
    with pytest.raises(MinispecError) as error:
        read(folder)
    text = str(error.value)
    assert "\n" not in text, text
    for word in words:
        assert str(word) in text, text
    return text


def edit(folder, change=None, config=None):
    """Rewrite a single-file checkpoint in place."""
    path = Path(folder) / "model.safetensors"
    if change:
        tensors = load_file(path)
        change(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
    if config:
        values = json.loads((Path(folder) / "config.json").read_text())
        config(values)
        (Path(folder) / "config.json").write_text(json.dumps(values))
    return folder


def dense(folder, prefix=""):
    """Every weight of the files as fp32, dequantised by other means than the loader's: bytes of the words, Kronecker products."""
    raw = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw |= load_file(path)
    out = {}
    for name, value in raw.items():
        name = name.removeprefix(prefix)
        if name.endswith("weight_packed"):
            half = value.numpy().view(np.uint8)
            q = np.stack([half & 15, half >> 4], -1).reshape(len(value), -1).astype(np.float32) - 8
            scale = raw[prefix + name.removesuffix("packed") + "scale"].float().numpy()
            out[name.removesuffix("_packed")] = torch.from_numpy(q * np.kron(scale, np.ones((1, 32), np.float32)))
        elif value.dtype == torch.float8_e4m3fn:
            tiles = torch.kron(raw[prefix + name + "_scale_inv"], torch.ones(128, 128))
            out[name] = value.float() * tiles[:value.shape[0], :value.shape[1]]
        elif not name.endswith(("_scale", "_scale_inv", "_shape")):
            out[name] = value.float()
    return out


def expected(w, config):
    """The canonical parameters by the contract, from plain hub tensors."""
    def cat(at, *names):
        return torch.cat([w[f"{at}{name}.weight"] for name in names])
    out = {"embed": w["model.embed_tokens.weight"], "norm": w["model.norm.weight"]}
    out["head"] = w.get("lm_head.weight", out["embed"])
    for i in range(config.num_hidden_layers):
        at, to = f"model.layers.{i}.", f"layers.{i}."
        heads, rows = config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim
        out |= {to + "attn_norm": w[at + "input_layernorm.weight"], to + "ffn_norm": w[at + "post_attention_layernorm.weight"],
                to + "qkv_a": cat(at + "self_attn.", "q_a_proj" if config.q_lora_rank else "q_proj", "kv_a_proj_with_mqa"),
                to + "kv_norm": w[at + "self_attn.kv_a_layernorm.weight"], to + "o": w[at + "self_attn.o_proj.weight"],
                to + "kv_b": w[at + "self_attn.kv_b_proj.weight"].view(heads, rows, config.kv_lora_rank)}
        if config.q_lora_rank:
            out |= {to + "q_norm": w[at + "self_attn.q_a_layernorm.weight"], to + "q_b": w[at + "self_attn.q_b_proj.weight"]}
        if i < config.first_k_dense_replace or i % config.moe_layer_freq:
            out |= {to + "gate_up": cat(at + "mlp.", "gate_proj", "up_proj"), to + "down": w[at + "mlp.down_proj.weight"]}
            continue
        out[to + "router"] = w[at + "mlp.gate.weight"]
        if config.topk_method == "noaux_tc":
            out[to + "bias"] = w[at + "mlp.gate.e_score_correction_bias"]
        experts = [f"{at}mlp.experts.{e}." for e in range(config.n_routed_experts)]
        out |= {to + "w13": torch.stack([cat(e, "gate_proj", "up_proj") for e in experts]),
                to + "w2": torch.stack([w[e + "down_proj.weight"] for e in experts])}
        if config.n_shared_experts:
            shared = at + "mlp.shared_experts."
            out |= {to + "gate_up": cat(shared, "gate_proj", "up_proj"), to + "down": w[shared + "down_proj.weight"]}
    return out


def assert_filled(folder, parameters, config, dtype=torch.float32):
    want = expected(dense(folder, config.prefix), config)
    assert set(want) == set(parameters)
    for name, value in want.items():
        assert torch.equal(parameters[name], value.to(dtype)), name


CASES = {
    "fp32": dict(storage="fp32"), "bf16": dict(storage="bf16"), "fp16": dict(storage="fp16"), "int4": dict(storage="int4"),
    "fp8": dict(storage="fp8", intermediate_size=200, kv_lora_rank=152), "scales in another shard": dict(storage="fp8", shards=3),
    "int4 in shards": dict(storage="int4", shards=2), "kimi": dict(storage="int4", wrapper=True, shards=2), "mtp": dict(mtp=True),
    "no q_lora": dict(q_lora_rank=None), "v2": dict(v2=True), "no shared experts": dict(n_shared_experts=0),
    "two shared experts": dict(n_shared_experts=2, n_group=1), "tied": dict(tie_word_embeddings=True),
    "every second layer": dict(moe_layer_freq=2, num_hidden_layers=4), "dense": dict(first_k_dense_replace=3),
}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_what_the_file_says(case, tmp_path):
    folder = tiny.write_target(tmp_path / "t", **{**TINY, **CASES[case]})
    config, parameters, report = load(folder)
    assert_filled(folder, parameters, config)
    held = {k for path in folder.glob("*.safetensors") for k in load_file(path)}
    assert set(report.tensors) == held, "the account names every tensor of the files, and nothing else"
    assert all(state.startswith(("consumed by ", "skipped: ")) for state in report.tensors.values())
    consumed = [k for k, state in report.tensors.items() if state.startswith("consumed")]
    assert report.bytes == sum(v.nbytes for path in folder.glob("*.safetensors") for k,
                               v in load_file(path).items() if k in consumed)


def test_cast_on_copy(tmp_path):
    folder = tiny.write_target(tmp_path / "t", storage="int4", **TINY)
    config, parameters, _ = load(folder, torch.bfloat16)
    assert_filled(folder, parameters, config, torch.bfloat16)


def test_skipped_tensors_have_their_reason(tmp_path):
    inv_freq = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edit(tiny.write_target(tmp_path / "t", wrapper=True, mtp=True, **TINY), put(inv_freq, torch.ones(4)))
    _, _, report = load(folder)
    assert "multi-token-prediction" in report.tensors["language_model.model.layers.3.eh_proj.weight"]
    assert "vision" in report.tensors["vision_tower.patch_embed.proj.weight"]
    assert "vision" in report.tensors["mm_projector.proj.0.weight"]
    assert "computed" in report.tensors[inv_freq]
    assert any("vision" in line for line in report.lines) and any("outer vocab_size 7 ignored" in line for line in report.lines)


def test_names_of_the_other_wrappers(tmp_path):
    """`language_model.layers.` of NVFP4-type files and transformers' `model.language_model.` mean the same tensors."""
    folder = tiny.write_target(tmp_path / "t", wrapper=True, **TINY)
    config, parameters, _ = load(folder)

    def shorter(w):
        for name in [n for n in w if n.startswith("language_model.model.")]:
            w[name.replace("language_model.model.", "language_model.")] = w.pop(name)

    def inside_out(w):
        for name in [n for n in w if n.startswith("language_model.")]:
            w["model.language_model." + name.removeprefix("language_model.")] = w.pop(name)
    for change in (shorter, inside_out):
        _, same, _ = load(edit(folder, change))
        assert all(torch.equal(parameters[name], same[name]) for name in parameters)


def test_ordinary_layers_beyond_the_count_are_no_mtp_layers(tmp_path):
    """A wrong num_hidden_layers must not silently drop layers: an MTP layer is known by its eh_proj."""
    folder = tiny.write_target(tmp_path / "t", **TINY)
    refused(edit(folder, config=lambda c: c.update(num_hidden_layers=2)), "model.layers.2.", "unknown")
    refused(edit(folder, config=lambda c: c.update(num_hidden_layers=4)), "model.layers.3.", "missing")


def drop(name):
    return lambda w: w.pop(name)


def put(name, value):
    return lambda w: w.update({name: value})


def to_nan(name, value=float("nan")):
    def change(w):
        w[name].view(-1)[1] = value
    return change


FAULTS = {
    "missing": (drop(V1 + "mlp.gate.weight"), (V1 + "mlp.gate.weight", "missing")),
    "missing expert": (drop(V1 + "mlp.experts.3.up_proj.weight"), (V1 + "mlp.experts.3.up_proj.weight", "missing")),
    "unknown": (put(V1 + "mlp.gizmo.weight", torch.ones(2)), (V1 + "mlp.gizmo.weight", "unknown", "nearest")),
    "renamed": (lambda w: put(V1 + "self_attn.o_project.weight", w.pop(V1 + "self_attn.o_proj.weight"))(w),
                ("o_project.weight", V1 + "self_attn.o_proj.weight", "which is missing")),
    "misshapen": (put("model.norm.weight", torch.ones(63)), ("model.norm.weight", "[63]", "[64]", "hidden_size")),
    "misshapen matrix": (put(V1 + "mlp.gate.weight", torch.ones(5, 64)), ("[5, 64]", "[4, 64]", "n_routed_experts")),
    "transposed": (lambda w: put(V1 + "self_attn.q_b_proj.weight", w[V1 + "self_attn.q_b_proj.weight"].T)(w),
                   ("q_b_proj", "[32, 96]", "[96, 32]")),
    "expert too many": (put(V1 + "mlp.experts.4.up_proj.weight", torch.ones(32, 64)), ("experts.4.up_proj.weight", "unknown")),
    "bias": (put(V1 + "self_attn.q_a_proj.bias", torch.ones(32)), ("q_a_proj.bias", "bias")),
    "nan": (to_nan(V1 + "mlp.experts.2.down_proj.weight"), (V1 + "mlp.experts.2.down_proj.weight", "NaN")),
    "infinity": (to_nan("lm_head.weight", float("-inf")), ("lm_head.weight", "infinity")),
    "integers": (put("model.norm.weight", torch.ones(64, dtype=torch.int32)), ("model.norm.weight", "I32")),
    "float8 without config": (put(V1 + "self_attn.o_proj.weight", torch.ones(64, 64).to(torch.float8_e4m3fn)),
                              ("o_proj.weight", "scale")),
    "scale left over": (put(V1 + "self_attn.o_proj.weight_scale_inv", torch.ones(1, 1)),
                        ("o_proj.weight", "weight_scale_inv", "F32")),
    "int4 scale left over": (put(V1 + "self_attn.o_proj.weight_scale", torch.ones(1, 1)), ("o_proj.weight_scale",)),
    "two names of one": (put("model.layers.1.self_attn.o_proj.weight_packed", torch.ones(64, 8, dtype=torch.int32)),
                         ("o_proj", "both")),
    "vision without wrapper": (put("vision_tower.x.weight", torch.ones(2)), ("vision_tower.x.weight", "unknown")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_tensors(fault, tmp_path):
    change, words = FAULTS[fault]
    folder = edit(tiny.write_target(tmp_path / "t", **TINY), change)
    refused(folder, "model.safetensors" if fault not in ("missing", "missing expert") else str(folder), *words)


E = V1 + "mlp.experts.1.up_proj."
INT4_FAULTS = {
    "scale missing": (drop(E + "weight_scale"), None, (E + "weight_packed", "weight_scale is missing")),
    "packed missing": (drop(E + "weight_packed"), None, (E, "unknown alone", "missing")),
    "scale misshapen": (put(E + "weight_scale", torch.ones(32, 1).bfloat16()), None,
                        (E + "weight_scale", "[32, 1]", "[32, 2]", "hidden_size / 32")),
    "packed misshapen": (put(E + "weight_packed", torch.ones(32, 4, dtype=torch.int32)), None, ("[32, 4]", "[32, 8]")),
    "packed as int64": (put(E + "weight_packed", torch.ones(32, 8, dtype=torch.int64)), None, ("I64", "I32")),
    "zero point": (put(E + "weight_zero_point", torch.ones(32, 2)), None, ("weight_zero_point",)),
    "scale infinite": (to_nan(E + "weight_scale", float("inf")), None, (E + "weight_packed", "infinity")),
    "stored plain": (lambda w: (drop(E + "weight_packed")(w), drop(E + "weight_scale")(w), drop(E + "weight_shape")(w),
                                put(E + "weight", torch.ones(32, 64))(w)),
                     None, (E + "weight", "stored plain", "ignore")),
    "ignored but packed": (None, lambda c: c["quantization_config"]["ignore"].append("re:.*experts.1.up_proj"),
                           (E + "weight_packed", "does not cover")),
    "no recipe": (None, lambda c: c.pop("quantization_config"), ("weight_packed", "no quantization_config")),
    "fp8 recipe": (None, lambda c: c.update(quantization_config=tiny.FP8), ("weight_packed", "does not cover")),
    "attention not ignored": (None, lambda c: c["quantization_config"]["ignore"].pop(1), ("self_attn", "stored plain", "ignore")),
}


@pytest.mark.parametrize("fault", INT4_FAULTS)
def test_faults_of_int4(fault, tmp_path):
    change, config, words = INT4_FAULTS[fault]
    refused(edit(tiny.write_target(tmp_path / "t", storage="int4", **TINY), change, config), *words)


O = V1 + "self_attn.o_proj.weight"
FP8_FAULTS = {
    "scale missing": (drop(O + "_scale_inv"), None, (O, "_scale_inv is missing")),
    "weight missing": (drop(O), None, (O, "missing")),
    "scale misshapen": (put(O + "_scale_inv", torch.ones(2, 1)), None,
                        (O + "_scale_inv", "[2, 1]", "[1, 1]", "ceil(hidden_size / 128)")),
    "nan byte": (lambda w: w[O].view(torch.uint8).view(-1).__setitem__(3, 0x7F), None, (O, "NaN")),
    "no recipe": (None, lambda c: c.pop("quantization_config"), ("float8", "quantization_config")),
    "int4 recipe": (None, lambda c: c.update(quantization_config=tiny.INT4), ("weight",)),
    "norm as float8": (lambda w: (put("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn))(w),
                                  put("model.norm.weight_scale_inv", torch.ones(1, 1))(w)),
                       None, ("model.norm.weight", "float8")),
}


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_faults_of_fp8(fault, tmp_path):
    change, config, words = FP8_FAULTS[fault]
    refused(edit(tiny.write_target(tmp_path / "t", storage="fp8", **TINY), change, config), *words)


def test_out_of_range_of_the_dtype(tmp_path):
    folder = edit(tiny.write_target(tmp_path / "t", **TINY), to_nan("lm_head.weight", 1e6))
    refused(folder, "lm_head.weight", "torch.float16", read=lambda f: load(f, torch.float16))


def test_tied_head(tmp_path):
    folder = tiny.write_target(tmp_path / "t", **TINY, tie_word_embeddings=True)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _, parameters, report = load(edit(folder, put("lm_head.weight", embed.clone())))
    assert torch.equal(parameters["head"], embed) and "tied" in report.tensors["lm_head.weight"]
    refused(edit(folder, put("lm_head.weight", embed + 1)), "lm_head.weight", "tie_word_embeddings")


def test_parameters_must_be_those_of_the_plan(tmp_path):
    folder = tiny.write_target(tmp_path / "t", **TINY)
    config, parameters, _ = load(folder)
    assert fill(open_target(str(folder), config), parameters).bytes > 0
    with pytest.raises(MinispecError, match="norm"):
        fill(open_target(str(folder), config), {k: v for k, v in parameters.items() if k != "norm"})
    with pytest.raises(MinispecError, match=r"norm has shape \[3\]"):
        fill(open_target(str(folder), config), {**parameters, "norm": torch.ones(3)})


def test_two_names_of_one_tensor(tmp_path):
    folder = tiny.write_target(tmp_path / "t", wrapper=True, **TINY)
    refused(edit(folder, put("language_model.norm.weight", torch.ones(64))), "language_model.norm.weight",
            "language_model.model.norm.weight", "same")


def test_absurd_counts_end_at_once(tmp_path):
    folder = tiny.write_target(tmp_path / "t", **TINY)
    for field in ("num_hidden_layers", "n_routed_experts"):
        copy = tiny.write_target(tmp_path / field, **TINY)
        refused(edit(copy, config=lambda c: c.update({field: 2**31 - 8})), field if field == "num_hidden_layers" else "experts",
                2**31 - 8)
    refused(edit(folder, config=lambda c: c.update(intermediate_size=2**30)), "intermediate_size", 2**30)


def kimi_k25():
    """config.json of Kimi-K2.5 as published and the header entries of its text weights, from the table's shapes."""
    text = {**tiny.TARGET, "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "quantization_config": tiny.INT4, "eos_token_id": 163585}
    return {"model_type": "kimi_k25", "text_config": text}


def test_kimi_k25_has_its_published_size(tmp_path):
    """1026.41 B parameters and 594.2 GB of text weights; the account of its 208 thousand tensors takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps(kimi_k25()))
    config = TargetConfig.read(str(tmp_path))
    table, infos = target_table(config), {}
    for e in table.entries:
        name = "language_model." + e.source
        if ".experts." in name:
            rows, columns = e.shape
            infos |= {name + "_packed": Info("f", "I32", (rows, columns // 8)), name + "_shape": Info("f", "I32", (2,)),
                      name + "_scale": Info("f", "BF16", (rows, columns // 32))}
        else:
            infos[name] = Info("f", "F32" if name.endswith("bias") else "BF16", e.shape)
    assert sum(math.prod(shape) for shape in table.shapes.values()) / 1e9 == pytest.approx(1026.41, abs=0.01)
    checkpoint = Checkpoint(str(tmp_path), infos)
    plan = account(checkpoint, table, rename(checkpoint, lambda n: strip_target(n, config)), {}, config.quantization, config.prefix)
    assert plan.report.bytes / 1e9 == pytest.approx(594.2, abs=0.05) and len(plan.report.tensors) == len(infos)


# --- files ------------------------------------------------------------------------------------------------------------------

def shard_index(folder, change):
    path = folder / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    change(values["weight_map"])
    path.write_text(json.dumps(values))


INDEX_FAULTS = {
    "names a tensor its shard lacks": (lambda m: m.update({"x.weight": "model-00001-of-000002.safetensors"}),
                                       ("x.weight", "missing")),
    "does not name a tensor": (lambda m: m.pop("model.norm.weight"), ("model.norm.weight", "does not name it")),
    "puts it elsewhere": (lambda m: m.update({"model.norm.weight": (set(m.values()) - {m["model.norm.weight"]}).pop()}),
                          ("model.norm.weight", "puts it in")),
    "names a missing shard": (lambda m: m.update({"model.norm.weight": "model-00009.safetensors"}),
                              ("model-00009.safetensors", "missing")),
    "leaves the folder": (lambda m: m.update({"model.norm.weight": "../x.safetensors"}), ("../x.safetensors", "beside")),
    "names another kind": (lambda m: m.update({"model.norm.weight": "x.bin"}), ("x.bin",)),
    "no string": (lambda m: m.update({"model.norm.weight": 3}), ("model.norm.weight", 3)),
    "empty": (lambda m: m.clear(), ("weight_map",)),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_faults_of_the_index(fault, tmp_path):
    folder = tiny.write_target(tmp_path / "t", shards=2, **TINY)
    shard_index(folder, INDEX_FAULTS[fault][0])
    refused(folder, *INDEX_FAULTS[fault][1])


def test_shards_and_single_files(tmp_path):
    folder = tiny.write_target(tmp_path / "t", shards=2, **TINY)
    first = sorted(folder.glob("model-*"))[0]
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    refused(folder, "model.safetensors", "stale")
    (folder / "model.safetensors").unlink()
    load(folder)
    first.unlink()
    refused(folder, first.name, "missing")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, str(folder), "model.safetensors", "config.json")
    with pytest.raises(MinispecError, match="no such folder"):
        Checkpoint.open(str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_links_to_nothing_and_pipes(name, tmp_path):
    for make in (lambda path: path.symlink_to("nowhere"), os.mkfifo):
        make(tmp_path / name)
        with pytest.raises(MinispecError, match=f"{name}: not a regular file"):
            Checkpoint.open(str(tmp_path), pickled=True)
        (tmp_path / name).unlink()


def test_a_target_is_not_read_from_pickle(tmp_path):
    folder = tiny.write_target(tmp_path / "t", **TINY)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "pytorch_model.bin", "safetensors")


def write_raw(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "truncated data": (dict(header={"a": entry()}, data=b"1234"), "8 bytes of data"),
    "data left over": (dict(header={"a": entry()}, data=b"1" * 9), "9"),
    "length absurd": (dict(header={"a": entry()}, length=2**63), str(2**63)),
    "length past the file": (dict(header={}, length=3), "header length 3"),
    "not JSON": (dict(header=b"{nonsense}"), "not valid JSON"), "not UTF-8": (dict(header=b'{"\xff": 1}'), "not valid JSON"),
    "not an object": (dict(header=[1]), "not a JSON object"), "empty": (dict(header=b""), "not valid JSON"),
    "leading space": (dict(header=b" {}"), "object"), "deep": (dict(header=b'{"a":' + b"[" * 100000), "not valid JSON"),
    "overlap": (dict(header={"a": entry(), "b": entry(offsets=(4, 12))}, data=b"1" * 12), "'b'"),
    "hole": (dict(header={"a": entry(), "b": entry(offsets=(12, 20))}, data=b"1" * 20), "'b'"),
    "backwards": (dict(header={"a": entry(offsets=(8, 0))}, data=b"1" * 8), "'a'"),
    "past the end": (dict(header={"a": entry(shape=(4,), offsets=(0, 16))}, data=b"1" * 8), "16 bytes"),
    "negative": (dict(header={"a": entry(offsets=(-8, 0))}), "'a'"),
    "unknown dtype": (dict(header={"a": entry("F7")}, data=b"1" * 8), "F7"),
    "dtype of no kind": (dict(header={"a": entry([1])}, data=b"1" * 8), "dtype"),
    "size mismatch": (dict(header={"a": entry(shape=(3,))}, data=b"1" * 8), "12 bytes"),
    "huge shape": (dict(header={"a": entry(shape=(2**40, 2**40))}, data=b"1" * 8), "'a'"),
    "fractional": (dict(header={"a": entry(shape=(2.0,))}, data=b"1" * 8), "sizes"),
    "boolean": (dict(header={"a": entry(shape=(True,))}), "sizes"),
    "no offsets": (dict(header={"a": {"dtype": "F32", "shape": [2]}}, data=b"1" * 8), "data_offsets"),
    "no entry": (dict(header={"a": 3}), "'a'"),
    "duplicate": (dict(header=b'{"a": 1, "a": 2}'), "twice"),
    "metadata": (dict(header={"__metadata__": {"a": 1}}), "__metadata__"),
    "unprintable": (dict(header={"a\nb": entry()}, data=b"1" * 8), "printable"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_faults_of_a_header(fault, tmp_path):
    path = tmp_path / "model.safetensors"
    write_raw(path, **HEADERS[fault][0])
    refused(path, "model.safetensors", HEADERS[fault][1], read=lambda p: read_header(str(p)))


def test_header_of_a_sound_file(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(0, 4, dtype=torch.int64), "c": torch.tensor(3, dtype=torch.uint8),
               "d": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    infos = read_header(str(tmp_path / "model.safetensors"))
    assert {k: (v.dtype, v.shape) for k, v in infos.items()} == {"a": ("F32", (2, 3)), "b": ("I64", (0, 4)), "c": ("U8", ()),
                                                                 "d": ("F8_E4M3", (2,))}
    checkpoint = Checkpoint.open(str(tmp_path))
    assert all(torch.equal(checkpoint.read(k).float(), v.float()) for k, v in tensors.items())


@pytest.mark.parametrize("bytes_", [b"", b"1234567", b"\x00" * 8])
def test_files_too_short(bytes_, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes_)
    refused(tmp_path / "model.safetensors", "model.safetensors", read=lambda p: read_header(str(p)))
    with pytest.raises(MinispecError, match="cannot be read"):
        read_header(str(tmp_path))

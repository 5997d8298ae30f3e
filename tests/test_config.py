"""config.json in every spelling, against transformers; and what is refused."""
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.config import Quantization, Rope, TargetConfig, layer_inputs
from minispec.errors import MinispecError
from minispec.fields import Fields
from minispec.rope import read_rope

from . import tiny

YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}
K25_IGNORE = tiny.INT4["ignore"]


def read(tmp_path, config, **options):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return TargetConfig.read(str(tmp_path), **options)


def refused(tmp_path, config, *words, **options):
    with pytest.raises(MinispecError) as error:
        read(tmp_path, config, **options)
    text = str(error.value)
    assert "\n" not in text and "config.json" in text, text
    for word in words:
        assert str(word) in text, text


def rope(values, dim=64, style="interleaved", position=4096):
    return read_rope(Fields(values, "config.json"), dim, style, position)


# --- rope -------------------------------------------------------------------------------------------------------------------

ROPES = [
    {"rope_theta": 10000},
    {"rope_theta": 50000.0, "rope_scaling": YARN},
    {"rope_theta": 50000.0, "rope_scaling": {**YARN, "factor": 32, "beta_fast": 1.0}},
    {"rope_parameters": {**YARN, "type": None, "rope_type": "yarn", "rope_theta": 50000.0}},
    {"rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "factor": 40}},
    {"rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    {"rope_theta": 10000, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    {"rope_theta": 10000, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "mscale_all_dim": 1.0}},
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0,
                                              "original_max_position_embeddings": 8192}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
]


def transformers_rope(values, dim, position):
    """(inverse frequencies, cos and sin factor, softmax factor) of transformers' DeepseekV3 classes."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_apply_mscale
    config = DeepseekV3Config(qk_rope_head_dim=dim, max_position_embeddings=position, **json.loads(json.dumps(values)))
    embedding = DeepseekV3RotaryEmbedding(config)
    return embedding.inv_freq, embedding.attention_scaling, yarn_apply_mscale(config.rope_parameters, 1.0)


@pytest.mark.parametrize("values", ROPES)
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_frequencies_are_those_of_transformers_bit_for_bit(values, dim):
    ours = rope(values, dim)
    frequencies, multiplier, score = transformers_rope(values, dim, 4096)
    assert torch.equal(ours.inverse_frequencies(), frequencies)
    assert ours.multiplier == pytest.approx(multiplier, rel=1e-12) and ours.score_factor == pytest.approx(score, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(theta=st.floats(100, 1e7), factor=st.floats(1, 128), original=st.integers(16, 65536), fast=st.floats(1, 64),
       slow=st.floats(0.1, 1), mscale=st.floats(0, 2), every=st.floats(0, 2), truncate=st.booleans(), half=st.integers(1, 64))
def test_yarn_frequencies_everywhere(theta, factor, original, fast, slow, mscale, every, truncate, half):
    values = {"rope_theta": theta, "rope_scaling": {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow,
        "mscale": mscale, "mscale_all_dim": every, "truncate": truncate}}
    ours = rope(values, 2 * half)
    frequencies, multiplier, score = transformers_rope(values, 2 * half, 4096)
    assert torch.equal(ours.inverse_frequencies(), frequencies)
    assert ours.multiplier == pytest.approx(multiplier, rel=1e-12) and ours.score_factor == pytest.approx(score, rel=1e-12)


def test_kimi_numbers():
    """K2.5: m 1.4158883, softmax scale 0.1446796, pairs 8 to 20 blended."""
    kimi = rope({"rope_theta": 50000.0, "rope_scaling": YARN})
    assert kimi.score_factor ** 0.5 == pytest.approx(1.4158883, abs=1e-7) and kimi.multiplier == 1.0
    assert 192 ** -0.5 * kimi.score_factor == pytest.approx(0.1446796, abs=1e-7)
    ratio = rope({"rope_theta": 50000.0}).inverse_frequencies() / kimi.inverse_frequencies()
    assert torch.allclose(ratio[:9], torch.ones(9)) and torch.allclose(ratio[20:], torch.full((12,), 64.0)) and 1 < ratio[9] < 64


@pytest.mark.parametrize("values, words", [
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ("rope_scaling.type", "longrope")),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_scaling.type", "dynamic")),
    ({"rope_scaling": {"type": ["yarn"]}}, ("rope_scaling.type",)),
    ({"rope_scaling": "yarn"}, ("rope_scaling", "object")),
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, ("rope_scaling.type", "linear")),
    ({"rope_scaling": {"type": "linear"}}, ("rope_scaling.factor", "missing")),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, ("rope_scaling.factor", "'2'")),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ("rope_scaling.factor", 0.5)),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, ("rope_scaling.mscale",)),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ("rope_scaling.factor",)),
    ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ("partial_rotary_factor", 0.5)),
    ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", 0.5)),
    ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, ("beta_fast",)),
    ({"rope_scaling": {**YARN, "mrope_section": [1]}}, ("mrope_section",)),
    ({"rope_theta": 1.0}, ("rope_theta", "1.0")),
    ({"rope_theta": True}, ("rope_theta", "True")),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
     ("rope_theta", "rope_parameters.rope_theta")),
    ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}}, ("rope_scaling", "rope_parameters")),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
     ("high_freq_factor",)),
])
def test_ropes_that_are_refused(values, words):
    with pytest.raises(MinispecError) as error:
        rope(values)
    for word in words:
        assert str(word) in str(error.value)


def test_both_spellings_are_one_rope():
    legacy = rope({"rope_theta": 5e4, "rope_scaling": YARN})
    new = {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5e4}}
    assert legacy == rope(new) == rope({**new, "rope_theta": 5e4, "rope_scaling": YARN})
    assert rope({}) == rope({"rope_scaling": None, "rope_theta": 10000}) == Rope(64, 10000.0, "interleaved")


# --- the target's config ----------------------------------------------------------------------------------------------------

def test_kimi_wrapper(tmp_path):
    text = {**tiny.TARGET, "model_type": "kimi_k2", "rope_theta": 5e4, "rope_scaling": YARN, "quantization_config": tiny.INT4,
            "rms_norm_eps": 1e-5, "eos_token_id": [1, 2, 1]}
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text,
             "vision_config": {"hidden_size": 9}, "vocab_size": 7, "hidden_size": 3, "tie_word_embeddings": True,
             "eos_token_id": 3}
    config = read(tmp_path, outer)
    assert (config.prefix, config.vocab_size, config.hidden_size) == ("language_model.", 512, 64)
    assert config.eos_token_ids == (1, 2) and not config.tie_word_embeddings
    assert config.quantization == Quantization("int4", group=32, ignore=tuple(K25_IGNORE))
    assert config.rope.kind == "yarn" and config.latent_norm_eps == 1e-6 and config.rms_norm_eps == 1e-5
    notes = "\n".join(config.notes)
    assert "outer vocab_size 7 ignored" in notes and "outer hidden_size 3 ignored" in notes
    assert "--latent-norm-eps config" in notes
    assert read(tmp_path, outer, latent_norm_eps="config").latent_norm_eps == 1e-5
    at_top = {**outer, "quantization_config": tiny.INT4, "text_config": {k: v for k,
                                                                         v in text.items() if k != "quantization_config"}}
    assert read(tmp_path, at_top).quantization == config.quantization


def test_what_transformers_saves_is_read_back(tmp_path):
    """save_pretrained leaves scoring_func, topk_method and moe_layer_freq out, and writes rope_parameters."""
    from transformers import DeepseekV2Config, DeepseekV3Config
    sizes = {k: tiny.TARGET[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
                                         "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
                                         "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")}
    DeepseekV3Config(**sizes, num_key_value_heads=4, q_lora_rank=None, n_group=4, topk_group=2).save_pretrained(tmp_path)
    v3 = TargetConfig.read(str(tmp_path))
    assert (v3.scoring_func, v3.topk_method, v3.moe_layer_freq, v3.norm_topk_prob) == ("sigmoid", "noaux_tc", 1, True)
    assert (v3.q_lora_rank, v3.n_group, v3.topk_group, v3.first_k_dense_replace, v3.routed_scaling_factor) == (None, 4, 2, 3, 2.5)
    assert any("scoring_func sigmoid" in note and "moe_layer_freq" not in note for note in v3.notes)
    assert [v3.is_moe(i) for i in range(8)] == [False] * 3 + [True] * 5
    DeepseekV2Config(**sizes, q_lora_rank=16, topk_method="group_limited_greedy", n_group=4,
                     topk_group=2).save_pretrained(tmp_path)
    v2 = TargetConfig.read(str(tmp_path))
    assert (v2.scoring_func, v2.topk_method, v2.n_group, v2.topk_group) == ("softmax", "group_limited_greedy", 4, 2)
    assert (v2.norm_topk_prob, v2.routed_scaling_factor, v2.n_shared_experts, v2.is_moe(0)) == (False, 1.0, 2, True)


def test_a_target_without_experts(tmp_path):
    config = read(tmp_path, {**tiny.TARGET, "n_routed_experts": None})
    assert config.n_routed_experts == 0 and not any(config.is_moe(i) for i in range(8))


def test_moe_layer_freq(tmp_path):
    for every, layers in ((1, [3, 4, 5, 6, 7]), (2, [4, 6]), (3, [3, 6])):
        config = read(tmp_path, {**tiny.TARGET, "moe_layer_freq": every, "first_k_dense_replace": 3})
        assert [i for i in range(8) if config.is_moe(i)] == layers


@pytest.mark.parametrize("change, words", [
    ({"hidden_size": None}, ("hidden_size",)), ({"hidden_size": "64"}, ("hidden_size", "'64'")),
    ({"hidden_size": 64.0}, ("64.0",)),
    ({"hidden_size": True}, ("hidden_size", "True")), ({"vocab_size": 0}, ("vocab_size", 0)), ({"num_hidden_layers": -1}, (-1,)),
    ({"kv_lora_rank": None}, ("kv_lora_rank",)), ({"q_lora_rank": 0}, ("q_lora_rank", 0)),
    ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps",)),
    ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")), ({"max_position_embeddings": 0}, ("max_position_embeddings",)),
    ({"attention_bias": True}, ("attention_bias", "True", "bias")), ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
    ({"index_topk": 2048}, ("index_topk", 2048, "sparse")), ({"num_key_value_heads": 2}, ("num_key_value_heads", 2, 4)),
    ({"scoring_func": "tanh"}, ("scoring_func", "tanh")), ({"topk_method": "greedy"}, ("topk_method", "greedy", "noaux_tc")),
    ({"num_experts_per_tok": 9}, ("num_experts_per_tok", 9, 4)), ({"n_group": 3}, ("n_group", 3, 8)),
    ({"topk_group": 3}, ("topk_group", 3)),
    ({"n_group": 8, "topk_group": 8}, ("n_group", 8)), ({"moe_layer_freq": 0}, ("moe_layer_freq", 0)),
    ({"qk_rope_head_dim": 7}, ("qk_rope_head_dim", 7, "even")), ({"eos_token_id": 512}, ("eos_token_id", 512)),
    ({"eos_token_id": [1, "2"]}, ("eos_token_id",)), ({"bos_token_id": -1}, ("bos_token_id", -1)),
    ({"model_type": "llama"}, ("model_type", "llama")),
    ({"model_type": "deepseek_v32"}, ("deepseek_v32",)), ({"model_type": ["x"]}, ("model_type",)),
    ({"text_config": []}, ("text_config",)),
    ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "no")), ({"routed_scaling_factor": 0}, ("routed_scaling_factor", 0)),
    ({"text_config": {"model_type": "kimi_k2"}}, ("model_type", "deepseek_v3", "kimi_k25")),
    ({"scoring_func": "softmax", "topk_method": "greedy"}, ("norm_topk_prob", "True")),
    ({"quantization_config": 4}, ("quantization_config", 4)), ({"rope_interleave": 1}, ("rope_interleave", 1)),
])
def test_configs_that_are_refused(change, words, tmp_path):
    refused(tmp_path, {**tiny.TARGET, **change}, *words)


def quantized(**change):
    config = json.loads(json.dumps(tiny.INT4))
    group = config["config_groups"]["group_0"]
    for name, value in change.items():
        place = group["weights"] if name in group["weights"] else group if name in group else config
        place[name] = value
    return {**tiny.TARGET, "quantization_config": config}


@pytest.mark.parametrize("config, words", [
    (quantized(num_bits=8), ("weights.num_bits", 8)), (quantized(type="float"), ("weights.type", "float")),
    (quantized(symmetric=False), ("weights.symmetric", False)), (quantized(actorder="group"), ("weights.actorder", "group")),
    (quantized(group_size=16), ("weights.group_size", 16, 32)), (quantized(group_size=None), ("weights.group_size",)),
    (quantized(strategy="channel"), ("weights.strategy", "channel")), (quantized(dynamic=True), ("weights.dynamic",)),
    (quantized(format="nvfp4-pack-quantized"), ("format", "nvfp4-pack-quantized")),
    (quantized(quantization_status="frozen"), ("frozen",)),
    (quantized(input_activations={"num_bits": 8}), ("input_activations",)),
    (quantized(kv_cache_scheme={"num_bits": 8}), ("kv_cache_scheme",)),
    (quantized(ignore="lm_head"), ("ignore", "lm_head")), (quantized(ignore=["re:("]), ("ignore", "re:(")),
    (quantized(ignore=["re:(a|a)*b"]), ("ignore", "repeats a group")),
    (quantized(ignore=["re:.*.*.*.*.*.*.*x"]), ("ignore", "wildcards")), (quantized(ignore=["re:" + ".?" * 40]), ("ignore", "wildcards")),
    (quantized(ignore=["re:" + "(.|.)" * 30]), ("ignore", "groups")), (quantized(targets=[1]), ("targets",)),
    (quantized(config_groups={}), ("config_groups",)), (quantized(quant_method="nvfp4"), ("quant_method", "nvfp4")),
    (quantized(quant_method="modelopt"), ("modelopt", "INT4")), (quantized(quant_method=None), ("quant_method",)),
    ({**tiny.TARGET, "quantization_config": {**tiny.FP8, "weight_block_size": None}}, ("weight_block_size", "128")),
    ({**tiny.TARGET, "quantization_config": {**tiny.FP8, "weight_block_size": [128, 0]}}, ("weight_block_size",)),
    ({**tiny.TARGET, "quantization_config": {**tiny.FP8, "fmt": "e5m2"}}, ("fmt", "e5m2")),
    ({**tiny.TARGET, "quantization_config": {**tiny.FP8, "activation_scheme": "static"}}, ("activation_scheme", "static")),
])
def test_storage_that_is_refused(config, words, tmp_path):
    refused(tmp_path, config, "quantization_config", *words)


def test_ignore_list_of_kimi():
    """Only routed experts are packed; the wrapper's prefix makes no difference."""
    stored = Quantization("int4", group=32, ignore=tuple(K25_IGNORE))
    for prefix in ("", "language_model."):
        names = {f"{prefix}model.layers.1.mlp.experts.3.gate_proj": True, f"{prefix}model.layers.0.mlp.gate_proj": False,
                 f"{prefix}model.layers.1.mlp.shared_experts.up_proj": False, f"{prefix}model.layers.1.self_attn.o_proj": False}
        assert {name: stored.covers((name,)) for name in names} == names
    assert not stored.covers(("language_model.lm_head", "lm_head"))
    assert not Quantization("int4", group=32, targets=("re:.*experts.*",)).covers(("model.layers.0.mlp.up_proj",))


@pytest.mark.parametrize("text, word", [("", "JSON"), ("[1]", "list"), ("{", "JSON"), ('"x"', "str"), ("[" * 100000, "JSON"),
                                        ("{\"a\": " + "9" * 5000 + "}", "")])
def test_files_that_are_no_config(text, word, tmp_path):
    refused(tmp_path, text, word)


def test_no_file_no_folder_no_utf8(tmp_path):
    with pytest.raises(MinispecError, match="no such folder"):
        TargetConfig.read(str(tmp_path / "none"))
    with pytest.raises(MinispecError, match="config.json: no such file"):
        TargetConfig.read(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(MinispecError, match="not valid JSON"):
        TargetConfig.read(str(tmp_path))
    for eps in ("servers", None, [1], True, 0):
        with pytest.raises(MinispecError, match="latent_norm_eps"):
            read(tmp_path, tiny.TARGET, latent_norm_eps=eps)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(MinispecError, match="config.json: not a regular file"):
        TargetConfig.read(str(tmp_path))


@pytest.mark.parametrize("capture", [5, [3, 2], [[1]], [True], [-1], [9], "12", {1: 2}])
def test_captures_that_are_refused(capture):
    with pytest.raises(MinispecError, match="capture is .* from 0 to 8"):
        layer_inputs(capture, 8)
    assert layer_inputs(None, 8) == () and layer_inputs([0, 8], 8) == (0, 8)


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-3, 2**40), st.floats(), st.text(max_size=6), st.just([]), st.just({}),
                 st.lists(st.integers(0, 600), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_value_anywhere_is_read_or_refused(data):
    """No value in any field of a K2.5-style config ends in another exception."""
    config = json.loads(json.dumps({**tiny.TARGET, "rope_scaling": YARN, "quantization_config": tiny.INT4}))
    for _ in range(data.draw(st.integers(1, 3))):
        place = config
        while True:
            key = data.draw(st.sampled_from(sorted(place)))
            if isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(JUNK)
            break
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            got = TargetConfig.read(folder)
        except MinispecError as error:
            assert "\n" not in str(error) and folder in str(error)
        else:
            assert got.rope.inverse_frequencies().isfinite().all() if got.rope.dim < 10000 else True
            assert got.softmax_scale > 0

"""Small checkpoints in the layouts of the hub: random DeepSeek-V3/V2 targets.

A target of random weights soon falls into a loop under greedy decoding, which hides faults. So the head of a tiny target
favours a successor of every token (one long cycle over the vocabulary), which its layers perturb by `branch`.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import naive

TARGET = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=512, hidden_size=64, num_hidden_layers=8,
    num_attention_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    intermediate_size=160, moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2,
    topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5, scoring_func="sigmoid", topk_method="noaux_tc",
    first_k_dense_replace=1, moe_layer_freq=1, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None,
    max_position_embeddings=256, hidden_act="silu", attention_bias=False, tie_word_embeddings=False, bos_token_id=0,
    eos_token_id=1, num_nextn_predict_layers=0)
V2 = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", scoring_func="softmax", topk_method="greedy",
          n_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32, beta_slow=1, mscale=1.0,
            mscale_all_dim=1.0)
INT4 = dict(
    quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None,
    config_groups=dict(group_0=dict(targets=["Linear"], input_activations=None, output_activations=None, weights=dict(
        num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, dynamic=False, actorder=None))),
    ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"])
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
DTYPE = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16, fp8=torch.bfloat16, int4=torch.bfloat16)


class Random:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, std=1.0):
        return torch.randn(*shape, generator=self.generator) * std

    def linear(self, rows, columns, gain=1.0):
        return self.normal(rows, columns, std=gain * columns ** -0.5)

    def norm(self, n):
        return torch.rand(n, generator=self.generator) + 0.5

    def permutation(self, n):
        return torch.randperm(n, generator=self.generator)


def mla_tensors(config, width, random, branch=1.0):
    heads, rank, nope, rope = (config[k] for k in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    out = {"kv_a_proj_with_mqa": random.linear(rank + rope, width), "kv_a_layernorm": random.norm(rank),
           "kv_b_proj": random.linear(heads * (nope + config["v_head_dim"]), rank),
           "o_proj": random.linear(config["hidden_size"], heads * config["v_head_dim"], branch)}
    if q_rank := config.get("q_lora_rank"):
        out |= {"q_a_proj": random.linear(q_rank, width), "q_a_layernorm": random.norm(q_rank),
                "q_b_proj": random.linear(heads * (nope + rope), q_rank, 1.5)}
    else:
        out["q_proj"] = random.linear(heads * (nope + rope), width, 1.5)
    return {f"self_attn.{name}.weight": value for name, value in out.items()}


def mlp_tensors(prefix, width, inner, random, branch=1.0):
    return {f"{prefix}gate_proj.weight": random.linear(inner, width, 1.5), f"{prefix}up_proj.weight": random.linear(inner, width),
            f"{prefix}down_proj.weight": random.linear(width, inner, branch)}


def target_tensors(config, seed, branch):
    """Hub names -> fp32 tensors. `branch` scales what the layers add to the residual stream."""
    random, h, vocab = Random(seed), config["hidden_size"], config["vocab_size"]
    embed, cycle, successor = random.normal(vocab, h), random.permutation(vocab), torch.empty(vocab, dtype=torch.long)
    successor[cycle] = cycle.roll(-1)
    head = torch.zeros(vocab, h)
    head[successor] = embed * 1.5 * h ** -0.5
    w = {"model.embed_tokens.weight": embed, "model.norm.weight": random.norm(h),
         "lm_head.weight": head + random.normal(vocab, h, std=0.02)}
    for i in range(config["num_hidden_layers"]):
        layer = mla_tensors(config, h, random, branch)
        layer |= {"input_layernorm.weight": random.norm(h), "post_attention_layernorm.weight": random.norm(h)}
        if naive.is_moe(config, i):
            inner = config["moe_intermediate_size"]
            layer["mlp.gate.weight"] = random.linear(config["n_routed_experts"], h, 2.0)
            if config["topk_method"] == "noaux_tc":
                layer["mlp.gate.e_score_correction_bias"] = random.normal(config["n_routed_experts"], std=0.1)
            for e in range(config["n_routed_experts"]):
                layer |= mlp_tensors(f"mlp.experts.{e}.", h, inner, random, branch)
            if shared := config["n_shared_experts"]:
                layer |= mlp_tensors("mlp.shared_experts.", h, inner * shared, random, branch)
        else:
            layer |= mlp_tensors("mlp.", h, config["intermediate_size"], random, branch)
        w |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    if config["tie_word_embeddings"]:
        del w["lm_head.weight"]
    return w


def pack_int4(weight):
    """[out, in] -> weight_packed int32 [out, in/8], weight_scale bf16 [out, in/32], weight_shape int32 [2]."""
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7.5).clamp(min=1e-8).bfloat16()
    q = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    words = sum(q[:, i::8] << 4 * i for i in range(8))
    return {"_packed": torch.where(words >= 2 ** 31, words - 2 ** 32, words).int(), "_scale": scale,
            "_shape": torch.tensor(weight.shape, dtype=torch.int32)}


def pack_fp8(weight):
    """[out, in] -> float8_e4m3fn and one fp32 multiplier per 128 x 128 tile, the edge tiles cut."""
    rows, columns = weight.shape
    tiles = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    tiles[:rows, :columns] = weight
    scale = (tiles.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3)) / 448).clamp(min=1e-8)
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"": (weight / wide).to(torch.float8_e4m3fn), "_scale_inv": scale}


def stored(w, storage):
    out = {}
    for name, value in w.items():
        linear = name.endswith("_proj.weight") or name.endswith("_with_mqa.weight")
        if storage == "int4" and ".experts." in name:
            out |= {name + suffix: part for suffix, part in pack_int4(value).items()}
        elif storage == "fp8" and linear:
            out |= {name + suffix: part for suffix, part in pack_fp8(value).items()}
        else:
            out[name] = value if name.endswith("e_score_correction_bias") else value.to(DTYPE[storage])
    return out


def save(directory, tensors, shards=1):
    """One file, or `shards` of them with an index; scales go to the last one, away from their weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if shards == 1:
        return save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    place = {name: shards if "_scale" in name else 1 + i % shards for i, name in enumerate(sorted(tensors))}
    files = {s: f"model-{s:05d}-of-{shards:06d}.safetensors" for s in range(1, shards + 1)}
    for s, file in files.items():
        save_file({name: tensors[name] for name in place if place[name] == s}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": {name: files[s] for name, s in place.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_target(directory, seed=0, storage="fp32", wrapper=False, shards=1, mtp=False, v2=False, branch=0.35, **config):
    """A random target; returns its directory. `wrapper`: Kimi-K2.5's, with vision tensors and decoy fields."""
    directory = Path(directory)
    config = {**TARGET, **(V2 if v2 else {}), **config, "torch_dtype": str(DTYPE[storage])[6:]}
    config["num_key_value_heads"] = config["num_attention_heads"]
    w = stored(target_tensors(config, seed, branch), storage)
    if storage in ("fp8", "int4"):
        config["quantization_config"] = INT4 if storage == "int4" else FP8
    if mtp:
        config["num_nextn_predict_layers"] = 1
        n, h = config["num_hidden_layers"], config["hidden_size"]
        w |= {f"model.layers.{n}.{name}.weight": torch.ones(h) for name in ("enorm", "hnorm", "shared_head.norm")}
        w |= {f"model.layers.{n}.eh_proj.weight": torch.ones(h, 2 * h), f"model.layers.{n}.embed_tokens.weight": torch.ones(4, h)}
    if wrapper:
        w = {"language_model." + name: value for name, value in w.items()}
        w |= {"vision_tower.patch_embed.proj.weight": torch.ones(4, 3), "mm_projector.proj.0.weight": torch.ones(4, 4)}
        config = dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", vocab_size=7, hidden_size=3,
                      eos_token_id=config["eos_token_id"], bos_token_id=config["bos_token_id"], media_placeholder_token_id=5,
                      text_config={**config, "model_type": "kimi_k2"}, vision_config=dict(vt_hidden_size=4),
                      tie_word_embeddings=False)
    save(directory, w, shards)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def write_tokenizer(directory, vocab=512, **config):
    """tiktoken form: 256 bytes, then pairs of lower-case letters, then 16 special tokens that close the vocabulary."""
    from base64 import b64encode
    letters = [bytes([c]) for c in b"etaoinshrdlucmfwypvbgkjqxz_ "]
    pieces = ([bytes([b]) for b in range(256)] + [a + b for a in letters for b in letters])[:vocab - 16]
    (directory / "tiktoken.model").write_text("".join(f"{b64encode(p).decode()} {i}\n" for i, p in enumerate(pieces)))
    special = {str(i): dict(content=f"<|special_{i}|>", special=True) for i in range(vocab - 16, vocab)}
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": special, "pat_str": r"[a-z]+|\s|\S", **config}))

"""The definition, slowly: a DeepSeek-V3/V2 target and an EAGLE-3 draft in float64 that read a checkpoint's raw tensors.

Written from the formulas (MLA not absorbed, no cache, everything recomputed from token 0 at every step, expert after expert) and
sharing no code with minispec, so that an error has to be made twice to go unseen. Leading batch dimensions are allowed.
"""
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

LATENT_EPS = 1e-6       # transformers builds the q_a and kv_a norms with its default, whatever the config says


def read(directory, dtype=torch.float64):
    """Every tensor of every .safetensors file, dequantised: {hub name: tensor}. Floats come in `dtype`."""
    raw = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        raw |= load_file(path)
    out = {}
    for name, value in raw.items():
        if name.endswith(".weight_packed"):
            base = name[:-len("_packed")]
            out[base] = dequantise_int4(value, raw[base + "_scale"]).to(dtype)
        elif name + "_scale_inv" in raw:
            scale = raw[name + "_scale_inv"].double()
            rows, columns = value.shape
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            out[name] = (value.double() * scale).to(dtype)
        elif not name.endswith((".weight_scale", ".weight_shape", ".weight_scale_inv")):
            out[name] = value.to(dtype) if value.is_floating_point() else value
    return out


def dequantise_int4(packed, scale):
    """packed int32 [out, in/8], nibble i of word c is column 8c + i holding q + 8; scale [out, in/32]."""
    words = packed.long() & 0xFFFFFFFF
    q = torch.stack([(words >> 4 * i & 15) - 8 for i in range(8)], -1).flatten(1)
    return q.double() * scale.double().repeat_interleave(32, 1)


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rope_numbers(config, dim):
    """(inverse frequencies [dim/2], multiplier of cos and sin, the m of the softmax scale) for default, linear and YaRN."""
    spec = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = spec.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = spec.get("rope_type", spec.get("type", "default"))
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind == "linear":
        return inverse / spec["factor"], 1.0, 1.0
    if kind == "default":
        return inverse, 1.0, 1.0
    assert kind == "yarn", kind
    factor, original = spec["factor"], spec["original_max_position_embeddings"]
    turn = [dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))
            for beta in (spec.get("beta_fast", 32), spec.get("beta_slow", 1))]
    low, high = max(math.floor(turn[0]), 0), min(math.ceil(turn[1]), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / (high - low or 0.001)).clamp(0, 1)
    inverse = inverse * (1 - ramp) + inverse / factor * ramp

    def m(mscale):
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
    mscale, all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
    return inverse, m(mscale) / m(all_dim) if mscale and all_dim else m(1.0), m(all_dim) if all_dim else 1.0


def rotate(x, positions, numbers, interleaved):
    """x [..., n, heads, dim]; interleaved pairs (2j, 2j+1), otherwise pairs (j, j + dim/2)."""
    inverse, multiplier, _ = numbers
    angle = positions.double()[..., None] * inverse
    cos, sin = (f(angle).to(x.dtype)[..., None, :] * multiplier for f in (torch.cos, torch.sin))
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)


def attend(q, k, v, mask, scale):
    """q [..., n, H, d], k [..., n, H, d], v [..., n, H, e], mask bool [n, n] (row may see column) -> [..., n, H * e]."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * scale
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("...hqk,...khe->...qhe", weights, v).flatten(-2)


def mla(w, prefix, config, x, positions, mask):
    """Multi-head latent attention as written, without absorption."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, width = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    numbers = rope_numbers(config, rope)
    if config.get("q_lora_rank"):
        latent = rms(x @ w[prefix + "q_a_proj.weight"].T, w[prefix + "q_a_layernorm.weight"], LATENT_EPS)
        q = latent @ w[prefix + "q_b_proj.weight"].T
    else:
        q = x @ w[prefix + "q_proj.weight"].T
    q = q.unflatten(-1, (heads, nope + rope))
    latent, k_rope = (x @ w[prefix + "kv_a_proj_with_mqa.weight"].T).split([rank, rope], -1)
    latent = rms(latent, w[prefix + "kv_a_layernorm.weight"], LATENT_EPS)
    k_nope, v = (latent @ w[prefix + "kv_b_proj.weight"].T).unflatten(-1, (heads, nope + width)).split([nope, width], -1)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], positions, numbers, True)], -1)
    k_rope = rotate(k_rope.unsqueeze(-2), positions, numbers, True).expand(*k_nope.shape[:-1], rope)
    out = attend(q, torch.cat([k_nope, k_rope], -1), v, mask, numbers[2] ** 2 / math.sqrt(nope + rope))
    return out @ w[prefix + "o_proj.weight"].T


def swiglu(w, prefix, x):
    gate, up = x @ w[prefix + "gate_proj.weight"].T, x @ w[prefix + "up_proj.weight"].T
    return (silu(gate) * up) @ w[prefix + "down_proj.weight"].T


def is_moe(config, i):
    return bool(config.get("n_routed_experts")) and i >= config.get("first_k_dense_replace", 0) \
        and i % (config.get("moe_layer_freq") or 1) == 0


class Target:
    """A DeepSeek-V3 or V2 checkpoint, bare or in Kimi-K2.5's wrapper."""

    def __init__(self, directory, dtype=torch.float64):
        config = json.loads((Path(directory) / "config.json").read_text())
        self.config = config.get("text_config", config)
        self.w = {name.removeprefix("language_model."): value for name, value in read(directory, dtype).items()}
        self.embed = self.w["model.embed_tokens.weight"]
        self.head = self.embed if self.config.get("tie_word_embeddings") else self.w["lm_head.weight"]
        self.width = self.config["hidden_size"]

    def forward(self, ids):
        """ids [..., n] -> logits [..., n, V], states: list of n_layers + 1 tensors [..., n, h], states[i] enters layer i."""
        config, eps = self.config, self.config["rms_norm_eps"]
        ids = torch.as_tensor(ids)
        positions = torch.arange(ids.shape[-1])
        mask = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
        states = [self.embed[ids]]
        for i in range(config["num_hidden_layers"]):
            p, x = f"model.layers.{i}.", states[-1]
            x = x + mla(self.w, p + "self_attn.", config, rms(x, self.w[p + "input_layernorm.weight"], eps), positions, mask)
            normed = rms(x, self.w[p + "post_attention_layernorm.weight"], eps)
            states.append(x + (self.moe(p + "mlp.", normed) if is_moe(config, i) else swiglu(self.w, p + "mlp.", normed)))
        return rms(states[-1], self.w["model.norm.weight"], eps) @ self.head.T, states

    def moe(self, prefix, x):
        weights = self.route(prefix, x)
        out = swiglu(self.w, prefix + "shared_experts.", x) if self.config.get("n_shared_experts") else torch.zeros_like(x)
        for e in range(self.config["n_routed_experts"]):
            out = out + weights[..., e:e + 1] * swiglu(self.w, f"{prefix}experts.{e}.", x)
        return out

    def route(self, prefix, x):
        """The weight of every expert, 0 for those not chosen: [..., n, E]."""
        config = self.config
        logits = x @ self.w[prefix + "gate.weight"].to(x.dtype).T
        v3 = config.get("topk_method", "noaux_tc") == "noaux_tc"
        scores = logits.sigmoid() if config.get("scoring_func", "sigmoid") == "sigmoid" else logits.softmax(-1)
        select = scores + self.w[prefix + "gate.e_score_correction_bias"].to(x.dtype) if v3 else scores
        groups = config.get("n_group") or 1
        if groups > 1 and (v3 or config["topk_method"] == "group_limited_greedy"):
            grouped = select.unflatten(-1, (groups, -1))
            value = grouped.topk(2, -1).values.sum(-1) if v3 else grouped.amax(-1)
            kept = torch.zeros_like(value).scatter(-1, value.topk(config["topk_group"], -1).indices, 1.0).bool()
            select = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
        chosen = select.topk(config["num_experts_per_tok"], -1).indices
        weight = scores.gather(-1, chosen)
        if config.get("norm_topk_prob", v3):
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, chosen, weight * config.get("routed_scaling_factor", 1.0))


class Draft:
    """A one-layer EAGLE-3 head of any dialect. `capture`: inputs of these target layers, read from the config when None."""

    def __init__(self, directory, target, capture=None, dtype=torch.float64):
        raw = json.loads((Path(directory) / "config.json").read_text())
        self.config = raw.get("transformer_layer_config", raw)
        w = {name.removeprefix("model.").replace("midlayer.", "").replace("layers.0.", ""): value
             for name, value in read(directory, dtype).items()}
        self.w, self.target, self.eps = w, target, self.config["rms_norm_eps"]
        self.flags = {f: bool(raw.get(f, raw.get("eagle_config", {}).get(f, False)))
                      for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        self.embed, self.head = w.get("embed_tokens.weight", target.embed), w.get("lm_head.weight", target.head)
        self.d2t = torch.arange(len(self.head)) + w.get("d2t", torch.zeros(len(self.head), dtype=torch.long))
        self.capture = tuple(capture or canonical_capture(raw, target.config["num_hidden_layers"]))

    def aux(self, states):
        """The captured states of a target forward, concatenated in ascending layer order: [..., n, A * th]."""
        return torch.cat([states[i] for i in self.capture], -1)

    def fuse(self, aux):
        if self.flags["fc_norm"]:
            parts = aux.split(self.target.width, -1)
            aux = torch.cat([rms(part, self.w[f"fc_norm.{i}.weight"], self.eps) for i, part in enumerate(parts)], -1)
        if self.flags["norm_before_fc"]:
            aux = rms(aux, self.w["input_norm.weight"], self.eps)
        return aux @ self.w["fc.weight"].T

    def forward(self, tokens, g, positions, mask):
        """tokens [..., n] target ids, g [..., n, h], positions [n], mask bool [n, n] -> logits [..., n, Vd], next g."""
        w, eps = self.w, self.eps
        normed = rms(g, w["hidden_norm.weight"], eps)
        x = torch.cat([rms(self.embed[tokens], w["input_layernorm.weight"], eps), normed], -1)
        attention = mla(w, "self_attn.", self.config, x, positions, mask) if "self_attn.kv_a_proj_with_mqa.weight" in w \
            else self.gqa(x, positions, mask)
        r = (normed if self.flags["norm_before_residual"] else g) + attention
        y = r + swiglu(w, "mlp.", rms(r, w["post_attention_layernorm.weight"], eps))
        z = rms(y, w["norm.weight"], eps)
        return z @ self.head.T, z if self.flags["norm_output"] else y

    def chain(self, tokens, g):
        """forward for rows that stand at 0, 1, ... and see what is before them."""
        n = len(tokens)
        return self.forward(tokens, g, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())

    def gqa(self, x, positions, mask):
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        w, dim = self.w, self.config.get("head_dim") or self.config["hidden_size"] // heads
        q, k, v = ((x @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv")
        if "self_attn.q_norm.weight" in w:
            q, k = (rms(t, w[f"self_attn.{n}_norm.weight"], self.eps) for n, t in (("q", q), ("k", k)))
        q, k = (rotate(t, positions, rope_numbers(self.config, dim), False) for t in (q, k))
        k, v = (t.repeat_interleave(heads // kv, -2) for t in (k, v))
        return attend(q, k, v, mask, dim ** -0.5) @ w["self_attn.o_proj.weight"].T


def canonical_capture(config, n):
    """Inputs of layers, by the order of reasons that minispec prints."""
    top, nested = config.get("eagle_aux_hidden_state_layer_ids"), config.get("eagle_config", {})
    ids = top or nested.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    nvidia = {"use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular"} & set(nested)
    outputs = nested.get("capture_convention", "input" if top else "output" if nvidia or ids[0] == 1 else "input") == "output"
    return [i + outputs for i in ids]

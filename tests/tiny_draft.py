"""Small EAGLE-3 drafts: random ones in the layout of every dialect, and `fit`, which trains one on its target for a few seconds.

A draft of random weights is never accepted, right or wrong, and so tests nothing; a fitted one is accepted in part.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from . import naive
from .tiny import Random, mla_tensors, mlp_tensors, save

LLAMA = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)      # head_dim is not hidden / heads
MLA = dict(num_attention_heads=4, q_lora_rank=32, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
SHAPE = dict(intermediate_size=96, num_hidden_layers=1, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None,
             max_position_embeddings=256, hidden_act="silu", attention_bias=False, tie_word_embeddings=False)
PREFIX = dict(safeailab="midlayer.", specforge="midlayer.", torchspec="midlayer.", speculators="layers.0.", nvidia="layers.0.")
OUTPUTS = ("specforge", "torchspec", "nvidia")          # dialects that number the outputs of layers
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# one draft per dialect, for `checkpoints.fitted`
DIALECTS = {
    "safeailab": dict(dialect="safeailab", vocab=384),
    "speculators": dict(dialect="speculators", qk_norm=True, own_embed=True,
                        flags=("norm_before_residual", "norm_before_fc", "norm_output")),
    "specforge": dict(dialect="specforge", vocab=384, flags=("fc_norm", "norm_output")),
    "torchspec": dict(dialect="torchspec", attention="mla", flags=("fc_norm", "norm_output")),
    "nvidia": dict(dialect="nvidia", attention="mla", vocab=384, order="frequency"),
}


def draft_tensors(config, target, captured, flags, qk_norm, vocab, random):
    """Bare names -> fp32 tensors of a random draft without embedding, head and map."""
    h, th = config["hidden_size"], target["hidden_size"]
    w = {f"{name}.weight": random.norm(h) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")}
    w |= {"fc.weight": random.linear(h, captured * th)} | mlp_tensors("mlp.", h, config["intermediate_size"], random)
    if "kv_lora_rank" in config:
        w |= mla_tensors(config, 2 * h, random)
    else:
        dim = config["head_dim"]
        rows = dict(q=config["num_attention_heads"], k=config["num_key_value_heads"], v=config["num_key_value_heads"])
        w |= {f"self_attn.{n}_proj.weight": random.linear(heads * dim, 2 * h) for n, heads in rows.items()}
        w["self_attn.o_proj.weight"] = random.linear(h, rows["q"] * dim)
        if qk_norm:
            w |= {f"self_attn.{n}_norm.weight": random.norm(dim) for n in "qk"}
    if "norm_before_fc" in flags:
        w["input_norm.weight"] = random.norm(captured * th)
    if "fc_norm" in flags:
        w |= {f"fc_norm.{i}.weight": random.norm(th) for i in range(captured)}
    return w


def write_draft(directory, target_dir, dialect="safeailab", attention="llama", flags=(), capture=None, vocab=None, order="sorted",
                own_embed=None, own_head=True, qk_norm=False, dtype=torch.float32, prefix=None, outer="", seed=1, weights=None,
                **config):
    """A random draft for the target in `target_dir`; returns its directory.

    `flags`: a subset of FLAGS; `capture`: inputs of layers, default (2, n//2, n-3); `vocab`: of the draft, None for the full one;
    `order`: of the kept ids, "sorted" or "frequency"; `own_embed`: None is the dialect's habit; `prefix` and `outer` replace the
    dialect's names; `weights`: bare names -> tensors instead of random ones, to write one draft under several names.
    """
    directory, random, config_target = Path(directory), Random(seed), json.loads((Path(target_dir) / "config.json").read_text())
    target = config_target.get("text_config", config_target)
    n, full, th = target["num_hidden_layers"], target["vocab_size"], target["hidden_size"]
    layer = {**SHAPE, "hidden_size": th, "vocab_size": full, **(MLA if attention == "mla" else LLAMA), **config}
    inputs = list(capture or (2, n // 2, n - 3))
    w = draft_tensors(layer, target, len(inputs), flags, qk_norm, vocab, random)
    if own_embed if own_embed is not None else dialect in ("speculators", "torchspec") or layer["hidden_size"] != th:
        w["embed_tokens.weight"] = random.normal(full, layer["hidden_size"])
    if own_head:
        w["lm_head.weight"] = random.linear(vocab or full, layer["hidden_size"])
    if vocab:
        kept = random.permutation(full - 8)[:vocab] + 8             # never the first ids
        kept = kept if order == "frequency" else kept.sort().values
        w["d2t"] = kept - torch.arange(vocab)
        if dialect != "nvidia":
            w["t2d"] = torch.zeros(full, dtype=torch.bool).index_fill(0, kept, True)
    w = weights or w
    place = outer + (prefix or PREFIX[dialect])
    inside = ("self_attn.", "mlp.", "input_layernorm", "hidden_norm", "post_attention_layernorm")
    save(directory, {(place if name.startswith(inside) else outer) + name: v.to(dtype) if v.is_floating_point() else v
                     for name, v in w.items()})
    (directory / "config.json").write_text(json.dumps(draft_config(dialect, layer, inputs, flags, qk_norm, vocab, th), indent=1))
    return directory


def draft_config(dialect, layer, inputs, flags, qk_norm, vocab, target_width):
    """config.json as the dialect writes it."""
    full, mla = layer["vocab_size"], "kv_lora_rank" in layer
    shared = {"draft_vocab_size": vocab or full} | dict.fromkeys(flags, True)
    if layer["hidden_size"] != target_width:
        shared["target_hidden_size"] = target_width
    if dialect == "speculators":
        return dict(architectures=["Eagle3DraftModel"], speculators_model_type="eagle3", speculators_version="0.3.0", **shared,
                    **{flag: False for flag in FLAGS if flag not in flags}, eagle_aux_hidden_state_layer_ids=inputs,
                    transformer_layer_config={**layer, "model_type": "qwen3" if qk_norm else "llama"},
                    speculators_config=dict(algorithm="eagle3", default_proposal_method="greedy", verifier=dict(name_or_path="x"),
                                            proposal_methods=[dict(proposal_type="greedy", speculative_tokens=3)]))
    ids = [i - 1 for i in inputs] if dialect in OUTPUTS else inputs
    eagle = dict(use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=ids)
    if dialect == "nvidia":
        eagle |= dict(use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False,
                      next_layer_regular=True)
    elif ids[0] != 1 and dialect in OUTPUTS or ids[0] == 1 and dialect not in OUTPUTS:
        eagle["capture_convention"] = "output" if dialect in OUTPUTS else "input"
    arch = dict(architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2") if mla else \
        dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    return {**layer, **arch, **shared, "eagle_config": eagle}


def bare(name):
    return name.removeprefix("model.").replace("midlayer.", "").replace("layers.0.", "")


def bare_tensors(directory):
    """What `write_draft(weights=)` takes, to write the draft in `directory` in another dialect."""
    return {bare(name): value for name, value in load_file(Path(directory) / "model.safetensors").items()}


def fit(directory, target_dir, steps=120, depths=3, batch=24, length=16, rate=4e-3, pool=512, seed=0):
    """Train the draft in `directory` on its target, in place: test-time training over `depths`, soft cross-entropy."""
    generator = torch.Generator().manual_seed(seed)
    target = naive.Target(target_dir, torch.float32)
    draft = naive.Draft(directory, target, dtype=torch.float32)
    vocab = len(target.embed)
    successor = target.forward(torch.arange(vocab)[:, None])[0][:, 0].argmax(-1)
    learned = {name: w.requires_grad_() for name, w in draft.w.items() if w.is_floating_point() and name != "embed_tokens.weight"}
    if "lm_head.weight" in learned and draft.head.shape[1] == target.width:
        draft.head.data.copy_(target.head[draft.d2t])
    optimiser = torch.optim.Adam(learned.values(), lr=rate, betas=(0.9, 0.98))
    rows = length - depths
    row, depth = torch.arange(rows).repeat(depths), torch.arange(depths).repeat_interleave(rows)
    mask = (depth == 0) & (row <= row[:, None]) | (depth > 0) & (depth <= depth[:, None]) & (row == row[:, None])
    ids = torch.randint(vocab, (pool, length + 1), generator=generator)
    keep = torch.rand(pool, length, generator=generator) < 0.85
    for i in range(length):
        ids[:, i + 1] = torch.where(keep[:, i], successor[ids[:, i]], ids[:, i + 1])
    with torch.no_grad():
        logits, states = target.forward(ids)
        captured = draft.aux(states)[:, :rows]
        goals = torch.cat([logits[:, 1 + d:1 + d + rows, draft.d2t] for d in range(depths)], 1).softmax(-1)
    tokens = torch.cat([ids[:, 1 + d:1 + d + rows] for d in range(depths)], 1)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * min(1, 1.2 - step / steps)
        pick = torch.randint(pool, (batch,), generator=generator)
        g = draft.fuse(captured[pick])
        for s in range(1, depths + 1):
            live = slice(0, rows * s)
            out, following = draft.forward(tokens[pick, live], g, (row + depth)[live], mask[live, live])
            g = torch.cat([g, following[:, -rows:]], 1)
        loss = cross_entropy(out.flatten(0, 1), goals[pick].flatten(0, 1))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimiser.step()
    raw = load_file(Path(directory) / "model.safetensors")
    raw |= {name: draft.w[bare(name)].detach().to(raw[name].dtype) for name in raw if bare(name) in learned}
    save_file(raw, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    return loss.item()

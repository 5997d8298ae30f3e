"""What a checkpoint holds: which file tensor fills which part of which parameter, and which tensors are skipped, and why."""

import re
from dataclasses import dataclass

from minispec.config import DraftConfig, TargetConfig


@dataclass(frozen=True)
class Entry:
    """One file tensor and its place: parameters[param][index] takes `source`, stored with `shape`, in the index' own shape.

    `fields` names, per dimension of `shape`, the config fields that set it. `linear`: stored quantised where the config says so.
    """

    param: str
    index: tuple
    source: str
    shape: tuple[int, ...]
    fields: tuple[str, ...]
    linear: bool = False


@dataclass(frozen=True)
class Table:
    """`shapes`: parameter -> shape; `entries`: what fills them, completely and without overlap."""

    shapes: dict[str, tuple[int, ...]]
    entries: list[Entry]


class _Builder:
    """Collects entries; `stack` lays several file tensors one after another along the first dimension of a region."""

    def __init__(self):
        self.shapes, self.entries = {}, []

    def one(self, param: str, source: str, shape: tuple, fields: tuple, *, view: tuple | None = None, linear: bool = False):
        self.shapes[param] = view or shape
        self.entries.append(Entry(param, (), source, shape, fields, linear))

    def stack(self, param: str, parts: list, columns: int, field: str, *, index: tuple = (), lead: tuple = (),
              linear: bool = True):
        """parts: (source, rows, field of the rows)."""
        start = 0
        for source, rows, rows_field in parts:
            self.entries.append(Entry(param, index + (slice(start, start + rows),), source, (rows, columns), (rows_field, field),
                                      linear))
            start += rows
        self.shapes[param] = lead + (start, columns)

    def latent(self, at: str, to: str, c: TargetConfig | DraftConfig, width: int, width_field: str) -> None:
        """Latent attention reading `width` channels: target layers read hidden_size, the draft's twice that."""
        heads, key, value = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
        q_field = "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
        query = ("q_a_proj", c.q_lora_rank, "q_lora_rank") if c.q_lora_rank else ("q_proj", heads * key, q_field)
        self.stack(to + "qkv_a", [(at + query[0] + ".weight", *query[1:]),
                                  (at + "kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.qk_rope_head_dim,
                                   "kv_lora_rank + qk_rope_head_dim")], width, width_field)
        if c.q_lora_rank:
            self.one(to + "q_norm", at + "q_a_layernorm.weight", (c.q_lora_rank,), ("q_lora_rank",))
            self.one(to + "q_b", at + "q_b_proj.weight", (heads * key, c.q_lora_rank), (q_field, "q_lora_rank"), linear=True)
        self.one(to + "kv_norm", at + "kv_a_layernorm.weight", (c.kv_lora_rank,), ("kv_lora_rank",))
        self.one(to + "kv_b", at + "kv_b_proj.weight", (heads * (c.qk_nope_head_dim + value), c.kv_lora_rank),
                 ("num_attention_heads x (qk_nope_head_dim + v_head_dim)", "kv_lora_rank"),
                 view=(heads, c.qk_nope_head_dim + value, c.kv_lora_rank), linear=True)
        self.one(to + "o", at + "o_proj.weight", (c.hidden_size, heads * value),
                 ("hidden_size", "num_attention_heads x v_head_dim"), linear=True)

    def mlp(self, at: str, to: tuple[str, str], hidden: int, inner: int, field: str, index: tuple = (), lead: tuple = ()) -> None:
        """SwiGLU: gate rows, then up rows, in one parameter; down in the other."""
        self.stack(to[0], [(f"{at}{part}_proj.weight", inner, field) for part in ("gate", "up")], hidden, "hidden_size",
                   index=index, lead=lead)
        self.entries.append(Entry(to[1], index, at + "down_proj.weight", (hidden, inner), ("hidden_size", field), True))
        self.shapes[to[1]] = lead + (hidden, inner)


def target_table(c: TargetConfig) -> Table:
    """Names without the wrapper's prefix (`strip_target` removes it)."""
    b, h = _Builder(), c.hidden_size
    norm = ("hidden_size",)
    b.one("embed", "model.embed_tokens.weight", (c.vocab_size, h), ("vocab_size", "hidden_size"))
    b.one("norm", "model.norm.weight", (h,), norm)
    head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    b.one("head", head, (c.vocab_size, h), ("vocab_size", "hidden_size"), linear=not c.tie_word_embeddings)
    for i in range(c.num_hidden_layers):
        at, to = f"model.layers.{i}.", f"layers.{i}."
        b.one(to + "attn_norm", at + "input_layernorm.weight", (h,), norm)
        b.one(to + "ffn_norm", at + "post_attention_layernorm.weight", (h,), norm)
        b.latent(at + "self_attn.", to, c, h, "hidden_size")
        if not c.is_moe(i):
            b.mlp(at + "mlp.", (to + "gate_up", to + "down"), h, c.intermediate_size, "intermediate_size")
            continue
        experts, inner = c.n_routed_experts, c.moe_intermediate_size
        b.one(to + "router", at + "mlp.gate.weight", (experts, h), ("n_routed_experts", "hidden_size"))
        if c.topk_method == "noaux_tc":
            b.one(to + "bias", at + "mlp.gate.e_score_correction_bias", (experts,), ("n_routed_experts",))
        for e in range(experts):
            b.mlp(f"{at}mlp.experts.{e}.", (to + "w13", to + "w2"), h, inner, "moe_intermediate_size", (e,), (experts,))
        if c.n_shared_experts:
            b.mlp(at + "mlp.shared_experts.", (to + "gate_up", to + "down"), h, c.n_shared_experts * inner,
                  "n_shared_experts x moe_intermediate_size")
    return Table(b.shapes, b.entries)


def strip_target(name: str, c: TargetConfig) -> str:
    """A file's name without what a multimodal wrapper put before it: `model....` or `lm_head.weight`."""
    if not c.prefix:
        return name
    for start in ("language_model.", "model.language_model."):
        if name.startswith(start):
            rest = name[len(start):]
            return rest if rest.startswith(("model.", "lm_head.")) else "model." + rest
    return name


def skip_target(name: str, c: TargetConfig, mtp: set[str]) -> str | None:
    """Why a (stripped) name is not needed, or None. mtp: numbers of the layers with an eh_proj, which no ordinary layer has."""
    layer = re.match(r"model\.layers\.(\d{1,6})\.", name)
    if layer and layer[1] in mtp and int(layer[1]) >= c.num_hidden_layers:
        return f"multi-token-prediction layer (num_hidden_layers is {c.num_hidden_layers})"
    if c.prefix and name.startswith(("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")):
        return "vision part of the wrapper"
    if name.endswith(".rotary_emb.inv_freq"):
        return "computed from the config"
    return None


_DRAFT_ALIASES = {"aux_norm_low.weight": "fc_norm.0.weight", "aux_norm_mid.weight": "fc_norm.1.weight",
                  "aux_norm_high.weight": "fc_norm.2.weight"}


def strip_draft(name: str) -> str:
    """A file's name in the one dialect used here: no leading `model.`, `layers.0.` for `midlayer.`, aliases resolved."""
    name = name.removeprefix("model.")
    name = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
    return _DRAFT_ALIASES.get(name, name)


def skip_draft(name: str) -> str | None:
    """Why a (stripped) name is not needed, or None."""
    if name.startswith(("verifier_lm_head.", "verifier_norm.")):
        return "a copy of the target's, needed in training only"
    if name.endswith("rotary_emb.inv_freq"):
        return "computed from the config"
    return None


def draft_table(c: DraftConfig, present: set[str], own: frozenset[str], tied: bool) -> Table:
    """`present`: stripped names of the file, which decide between fused and split spellings. `own`: "embed", "head"."""
    b, h, features = _Builder(), c.hidden_size, len(c.capture) * c.target_hidden_size
    width = "captured states x target_hidden_size"
    norms = {"embed_norm": "layers.0.input_layernorm", "hidden_norm": "layers.0.hidden_norm",
             "mlp_norm": "layers.0.post_attention_layernorm", "norm": "norm"}

    def fused(name):
        return any(name + end in present for end in ("", "_packed"))

    b.one("fc", "fc.weight", (h, features), ("hidden_size", width), linear=True)
    for param, source in norms.items():
        b.one(param, source + ".weight", (h,), ("hidden_size",))
    if c.norm_before_fc:
        b.one("input_norm", "input_norm.weight", (features,), (width,))
    if c.fc_norm:
        for k in range(len(c.capture)):
            b.entries.append(Entry("fc_norm", (k,), f"fc_norm.{k}.weight", (c.target_hidden_size,), ("target_hidden_size",)))
        b.shapes["fc_norm"] = (len(c.capture), c.target_hidden_size)
    at = "layers.0.self_attn."
    if c.attention == "mla":
        b.latent(at, "", c, 2 * h, "2 x hidden_size")
        if c.q_lora_rank and fused(at + "fused_qkv_a_proj_with_mqa.weight"):
            b.entries = [e for e in b.entries if e.param != "qkv_a"]
            b.one("qkv_a", at + "fused_qkv_a_proj_with_mqa.weight", b.shapes["qkv_a"],
                  ("q_lora_rank + kv_lora_rank + qk_rope_head_dim", "2 x hidden_size"), linear=True)
    else:
        d, heads, shared = c.head_dim, c.num_attention_heads, c.num_key_value_heads
        q_field, kv_field = "num_attention_heads x head_dim", "num_key_value_heads x head_dim"
        if fused(at + "qkv_proj.weight"):
            b.one("qkv", at + "qkv_proj.weight", ((heads + 2 * shared) * d, 2 * h),
                  ("(num_attention_heads + 2 x num_key_value_heads) x head_dim", "2 x hidden_size"), linear=True)
        else:
            b.stack("qkv", [(at + "q_proj.weight", heads * d, q_field), (at + "k_proj.weight", shared * d, kv_field),
                            (at + "v_proj.weight", shared * d, kv_field)], 2 * h, "2 x hidden_size")
        if c.qk_norm:
            b.one("q_norm", at + "q_norm.weight", (d,), ("head_dim",))
            b.one("k_norm", at + "k_norm.weight", (d,), ("head_dim",))
        b.one("o", at + "o_proj.weight", (h, heads * d), ("hidden_size", q_field), linear=True)
    b.mlp("layers.0.mlp.", ("gate_up", "down"), h, c.intermediate_size, "intermediate_size")
    if fused("layers.0.mlp.gate_up_proj.weight"):
        b.entries = [e for e in b.entries if e.param != "gate_up"]
        b.one("gate_up", "layers.0.mlp.gate_up_proj.weight", b.shapes["gate_up"],
              ("2 x intermediate_size", "hidden_size"), linear=True)
    if "embed" in own:
        b.one("embed", "embed_tokens.weight", (c.vocab_size, h), ("vocab_size", "hidden_size"))
    if "head" in own:
        b.one("head", "embed_tokens.weight" if tied else "lm_head.weight", (c.draft_vocab_size, h),
              ("draft_vocab_size", "hidden_size"), linear=not tied)
    return Table(b.shapes, b.entries)

"""What a checkpoint holds: which file tensor fills which part of which parameter, and which tensors are skipped, and why."""
import re
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from minispec.config import DraftConfig, TargetConfig

DRAFT_SKIPS = {r".*rotary_emb\.inv_freq$": "computed from the config",
               r"verifier_(lm_head|norm)\.": "a copy of the target's, needed in training only"}


class Dim(int):
    """A size that knows which config fields give it, also after + and *: what a message about a wrong shape quotes."""

    def __new__(cls, size: int, label: str):
        self = super().__new__(cls, size)
        self.label = label
        return self

    def __add__(self, other: "Dim") -> "Dim":
        return Dim(int(self) + int(other), f"{self.label} + {other.label}")

    def __mul__(self, other: "Dim") -> "Dim":
        return Dim(int(self) * int(other), " x ".join(f"({d.label})" if " + " in d.label else d.label for d in (self, other)))


def dims(config: DraftConfig | TargetConfig, *names: str) -> list[Dim]:
    return [Dim(getattr(config, name), name) for name in names]


@dataclass(frozen=True)
class Entry:
    """One file tensor and its place: parameters[param][index] takes `source`, stored with `shape`, in the index' own shape.

    `linear`: stored quantised where the config says so. `part`: the rows, or rows and columns, of the file tensor that are read;
    () is all of it.
    """
    param: str
    index: tuple
    source: str
    shape: tuple[Dim, ...]
    linear: bool
    part: tuple[slice, ...] = ()


@dataclass
class Table:
    """`shapes`: parameter -> shape; `entries`: what fills them, completely and without overlap.

    `present`: names in the file, which decide between the fused and the split spelling of a draft's projections.
    """
    present: set[str] = field(default_factory=set)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def add(self, param: str, *parts: tuple, fused: str = "", index: tuple = (), lead: tuple = (), view: tuple = (),
            linear: bool = True) -> None:
        """`parts`: (name without .weight, shape) each, one after another along the first dimension of a region.

        fused: their name where the file holds them as one. index, lead: the region, and the dimensions before it.
        view: the parameter's shape where it differs. linear: False for matrices that are no Linear module.
        """
        rows, inner = reduce(add, (shape[0] for _, shape in parts)), parts[0][1][1:]
        if fused and {fused + ".weight", fused + ".weight_packed"} & self.present:
            parts = [(fused, (rows, *inner))]
        self.shapes[param] = view or (*lead, rows, *inner)
        start = 0
        for source, shape in parts:
            part = (slice(start, start := start + int(shape[0])),) if len(parts) > 1 else ()
            source = source if source.endswith("_bias") else source + ".weight"
            self.entries.append(Entry(param, index + part, source, shape, linear and len(shape) == 2))

    def latent(self, at: str, to: str, c: TargetConfig | DraftConfig, width: Dim) -> None:
        """Latent attention reading `width` channels: target layers read hidden_size, the draft's twice that."""
        h, heads, nope, rope, value, latent = dims(c, "hidden_size", "num_attention_heads", "qk_nope_head_dim",
                                                   "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        queries, rank = heads * (nope + rope), Dim(c.q_lora_rank or 0, "q_lora_rank")
        first = (at + "q_a_proj", (rank, width)) if rank else (at + "q_proj", (queries, width))
        self.add(to + "qkv_a", first, (at + "kv_a_proj_with_mqa", (latent + rope, width)),
                 fused=at + "fused_qkv_a_proj_with_mqa" if rank else "")
        if rank:
            self.add(to + "q_norm", (at + "q_a_layernorm", (rank,)))
            self.add(to + "q_b", (at + "q_b_proj", (queries, rank)))
        self.add(to + "kv_norm", (at + "kv_a_layernorm", (latent,)))
        self.add(to + "kv_b", (at + "kv_b_proj", (heads * (nope + value), latent)), view=(heads, nope + value, latent))
        self.add(to + "o", (at + "o_proj", (h, heads * value)))

    def mlp(self, at: str, to: tuple[str, str], hidden: Dim, inner: Dim, index: tuple = (), lead: tuple = ()) -> None:
        """SwiGLU: gate rows, then up rows, in one parameter; down in the other."""
        self.add(to[0], (at + "gate_proj", (inner, hidden)), (at + "up_proj", (inner, hidden)), fused=at + "gate_up_proj",
                 index=index, lead=lead)
        self.add(to[1], (at + "down_proj", (hidden, inner)), index=index, lead=lead)


def target_table(c: TargetConfig) -> Table:
    """Names without the wrapper's prefix (`strip_target` removes it)."""
    t, tied = Table(), c.tie_word_embeddings
    h, vocab, dense, experts, expert, shared = dims(c, "hidden_size", "vocab_size", "intermediate_size", "n_routed_experts",
                                                    "moe_intermediate_size", "n_shared_experts")
    t.add("embed", ("model.embed_tokens", (vocab, h)), linear=False)
    t.add("norm", ("model.norm", (h,)))
    t.add("head", ("model.embed_tokens" if tied else "lm_head", (vocab, h)), linear=not tied)
    for i in range(c.num_hidden_layers):
        at, to = f"model.layers.{i}.", f"layers.{i}."
        t.add(to + "attn_norm", (at + "input_layernorm", (h,)))
        t.add(to + "ffn_norm", (at + "post_attention_layernorm", (h,)))
        t.latent(at + "self_attn.", to, c, h)
        if not c.is_moe(i):
            t.mlp(at + "mlp.", (to + "gate_up", to + "down"), h, dense)
            continue
        t.add(to + "router", (at + "mlp.gate", (experts, h)), linear=False)
        if c.topk_method == "noaux_tc":
            t.add(to + "bias", (at + "mlp.gate.e_score_correction_bias", (experts,)))
        for e in range(experts):
            t.mlp(f"{at}mlp.experts.{e}.", (to + "w13", to + "w2"), h, expert, (e,), (experts,))
        if c.n_shared_experts:
            t.mlp(at + "mlp.shared_experts.", (to + "gate_up", to + "down"), h, shared * expert)
    return t


def strip_target(name: str, c: TargetConfig) -> str:
    """A file's name without what a multimodal wrapper put before it: `model....` or `lm_head.weight`."""
    if not c.prefix or not name.startswith(("language_model.", "model.language_model.")):
        return name
    rest = name.removeprefix("model.").removeprefix("language_model.")
    return rest if rest.startswith(("model.", "lm_head.")) else "model." + rest


def skip_target(names: dict[str, str], c: TargetConfig) -> dict[str, str]:
    """File name -> "skipped: ..." of what the target does not need. names: stripped -> file name."""
    reasons = {r".*\.rotary_emb\.inv_freq$": "computed from the config"}
    layers = [match[1] for name in names if (match := re.match(r"model\.layers\.(\d{1,6})\..*eh_proj\.", name))]
    beyond = "|".join(layer for layer in layers if int(layer) >= c.num_hidden_layers)
    if beyond:                                       # known by their eh_proj: a wrong num_hidden_layers must not drop layers
        reasons[rf"model\.layers\.({beyond})\."] = f"multi-token-prediction layer (num_hidden_layers is {c.num_hidden_layers})"
    if c.prefix:
        reasons[r"(model\.)?(vision_tower|mm_projector)\."] = "vision part of the wrapper"
    return skip(names, reasons)


def skip(names: dict[str, str], reasons: dict[str, str]) -> dict[str, str]:
    """File name -> "skipped: ..." where a pattern of `reasons` matches the stripped name."""
    return {file: f"skipped: {why}" for name, file in names.items() for start, why in reasons.items() if re.match(start, name)}


def strip_draft(name: str) -> str:
    """A file's name in the one dialect used here: no leading `model.`, `layers.0.` for `midlayer.`, aliases resolved."""
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    place = {"aux_norm_low.weight": 0, "aux_norm_mid.weight": 1, "aux_norm_high.weight": 2}.get(name)
    return name if place is None else f"fc_norm.{place}.weight"


def draft_table(c: DraftConfig, present: set[str], own: frozenset[str], tied: bool) -> Table:
    """present: stripped names of the file. own: "embed" and "head", where the file has them. tied: the head is the embedding."""
    t = Table(present)
    h, width, vocab, ids, inner = dims(c, "hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size",
                                       "intermediate_size")
    features, double, at = Dim(len(c.capture), "captured states") * width, Dim(2, "2") * h, "layers.0.self_attn."
    t.add("fc", ("fc", (h, features)))
    for param, source in (("embed_norm", "layers.0.input_layernorm"), ("hidden_norm", "layers.0.hidden_norm"),
                          ("mlp_norm", "layers.0.post_attention_layernorm"), ("norm", "norm")):
        t.add(param, (source, (h,)))
    if c.norm_before_fc:
        t.add("input_norm", ("input_norm", (features,)))
    for k in range(len(c.capture) * c.fc_norm):
        t.add("fc_norm", (f"fc_norm.{k}", (width,)), index=(k,), lead=(len(c.capture),))
    if c.attention == "mla":
        t.latent(at, "", c, double)
    else:
        heads, shared, d = dims(c, "num_attention_heads", "num_key_value_heads", "head_dim")
        t.add("qkv", *((f"{at}{part}_proj", (count * d, double)) for part, count in (("q", heads), ("k", shared), ("v", shared))),
              fused=at + "qkv_proj")
        t.add("o", (at + "o_proj", (h, heads * d)))
        for part in "qk" if c.qk_norm else "":
            t.add(part + "_norm", (f"{at}{part}_norm", (d,)))
    t.mlp("layers.0.mlp.", ("gate_up", "down"), h, inner)
    if "embed" in own:
        t.add("embed", ("embed_tokens", (vocab, h)), linear=False)
    if "head" in own:
        t.add("head", ("embed_tokens" if tied else "lm_head", (ids, h)), linear=not tied)
    return t

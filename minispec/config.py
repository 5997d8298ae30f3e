"""What a checkpoint's config.json says, as frozen objects: the target, its storage, the draft."""

from dataclasses import dataclass, field

from minispec.errors import MinispecError
from minispec.fields import Fields, short
from minispec.quantization import Quantization
from minispec.rope import Rope, read_rope

__all__ = ["DraftConfig", "Quantization", "Rope", "TargetConfig", "latent_eps", "latent_widths", "widths"]

LATENT_EPS = 1e-6
# What transformers assumes when a config omits the field; sizes are never assumed.
_V3 = {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
       "norm_topk_prob": True, "max_position_embeddings": 4096, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_V2 = {"n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "first_k_dense_replace": 0,
       "norm_topk_prob": False, "max_position_embeddings": 2048, "scoring_func": "softmax", "topk_method": "greedy"}
_DEFAULTS = {"deepseek_v3": _V3, "kimi_k2": _V3, "deepseek_v2": _V2}
_ARCHITECTURES = {"DeepseekV3ForCausalLM": "deepseek_v3", "DeepseekV2ForCausalLM": "deepseek_v2"}


@dataclass(frozen=True)
class TargetConfig:
    """A DeepSeek-V3-family target (facts: target.md 1). Sizes in channels, eps and factors as the forward uses them.

    `prefix` is what the checkpoint's language-model names start with; `notes` are the assumptions made while reading.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    first_k_dense_replace: int
    moe_layer_freq: int
    rms_norm_eps: float
    latent_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None
    prefix: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)

    def is_moe(self, i: int) -> bool:
        """Whether layer i routes to experts (the others are dense)."""
        return self.n_routed_experts > 0 and i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.score_factor

    @classmethod
    def read(cls, folder: str, latent_norm_eps: float | str = LATENT_EPS) -> "TargetConfig":
        """Read `folder`/config.json, Kimi-K2.5's wrapper included.

        latent_norm_eps: eps of the q_a and kv_a norms; transformers uses 1e-6 whatever the config says,
        "config" takes rms_norm_eps as vLLM and SGLang do. MinispecError for anything the forward cannot do.
        """
        top = Fields.read(folder)
        fields, prefix, notes = _unwrap(top)
        c = widths(fields)
        if fields.get("num_key_value_heads", c["num_attention_heads"]) != c["num_attention_heads"]:
            raise fields.refuse("num_key_value_heads", f"latent attention has as many key heads as num_attention_heads "
                                                       f"({c['num_attention_heads']}); correct the config")
        if "q_lora_rank" not in fields.values:
            raise fields.refuse("q_lora_rank", "an integer or null is needed; take the config.json of the weights")
        c |= latent_widths(fields)
        style = "interleaved" if fields.flag("rope_interleave", True) else "half"
        positions = c["max_position_embeddings"] = fields.integer("max_position_embeddings")
        c["rope"] = read_rope(fields, c["qk_rope_head_dim"], style, positions)
        c |= _routing(fields)
        c["tie_word_embeddings"] = fields.flag("tie_word_embeddings", False)
        ids = fields if fields.has("eos_token_id") else top
        c["bos_token_id"] = fields.integer("bos_token_id", None, low=0, high=c["vocab_size"] - 1)
        c["eos_token_ids"] = _ids(ids, "eos_token_id", c["vocab_size"])
        c["latent_norm_eps"], note = latent_eps(latent_norm_eps, c["rms_norm_eps"])
        section = fields.section("quantization_config") or top.section("quantization_config")
        c["quantization"] = Quantization.read(section) if section else None
        unsaid = [name for name in ("rms_norm_eps", *fields.defaults) if name not in fields.values and c[name] is not None]
        if unsaid:
            notes.append("missing in config.json, read as transformers does: " + ", ".join(f"{name} {c[name]}" for name in unsaid))
        return cls(**c, prefix=prefix, notes=tuple(notes + [note, str(c["rope"])]))


@dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 head of one layer (facts: eagle3.md 1 and 2), every dialect resolved.

    `attention` is "llama" (num_key_value_heads, head_dim, qk_norm) or "mla" (the ranks and widths of latent attention; its
    other fields are 0 or None). `capture` numbers the residual streams entering target layers, ascending.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    attention: str
    num_attention_heads: int
    intermediate_size: int
    rms_norm_eps: float
    latent_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    capture: tuple[int, ...]
    capture_reason: str
    num_key_value_heads: int = 0
    head_dim: int = 0
    qk_norm: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def softmax_scale(self) -> float:
        if self.attention == "llama":
            return self.head_dim ** -0.5
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.score_factor


def _unwrap(top: Fields) -> tuple[Fields, str, list[str]]:
    """The language model's fields, the prefix of its tensor names, and what was ignored around it."""
    inner, prefix, notes = top.section("text_config"), "", []
    if inner is not None:
        top.text("model_type", "kimi_k25", ("kimi_k25",))
        prefix = "language_model."
        decoys = sorted(k for k, v in top.values.items() if k in inner.values and k != "model_type" and v != inner.values[k])
        notes = [f"{top.file}: outer {k} {short(top.values[k], 60)} ignored, text_config.{k} is {short(inner.values[k], 60)}"
                 for k in decoys if k not in ("architectures", "auto_map", "transformers_version")]
    elif top.values.get("model_type") == "kimi_k25":
        raise top.refuse("text_config", "a kimi_k25 config holds its language model there; download the file again")
    fields = inner or top
    kind = fields.get("model_type", None)
    if kind is None:
        named = fields.get("architectures", top.get("architectures", []))
        kind = next((_ARCHITECTURES[a] for a in named if a in _ARCHITECTURES), None) if isinstance(named, list) else None
        kind = kind or ("deepseek_v3" if prefix else None)
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise fields.refuse("model_type", f"targets of type {', '.join(_DEFAULTS)} and kimi_k25 are supported; use one of those")
    return Fields(fields.values, top.file, path=fields.path, defaults=_DEFAULTS[kind]), prefix, notes


# Fields that would change the forward, with the values it implements.
_REFUSED = {
    "hidden_act": (("silu",), "only silu is supported; use another checkpoint"),
    "attention_bias": ((False,), "biases in attention are not supported; use another checkpoint"),
    "mlp_bias": ((False,), "biases in the MLP are not supported; use another checkpoint"),
    "use_sliding_window": ((False,), "sliding-window attention is not supported; use another checkpoint"),
    "index_topk": ((), "sparse attention (DeepSeek-V3.2) is not supported; use a dense checkpoint"),
    "index_n_heads": ((), "sparse attention (DeepSeek-V3.2) is not supported; use a dense checkpoint"),
    "index_head_dim": ((), "sparse attention (DeepSeek-V3.2) is not supported; use a dense checkpoint"),
}


def widths(fields: Fields) -> dict:
    """The sizes that a target and a draft share, after refusing fields that would change the forward."""
    for name, (allowed, why) in _REFUSED.items():
        fields.only(name, allowed, why)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {name: fields.integer(name) for name in names} | {"rms_norm_eps": fields.number("rms_norm_eps", LATENT_EPS)}


def latent_widths(fields: Fields) -> dict:
    """Ranks and head widths of multi-head latent attention; q_lora_rank None is a plain q_proj."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": fields.integer("q_lora_rank", None)} | {name: fields.integer(name) for name in names}


def latent_eps(choice: float | str, rms_norm_eps: float) -> tuple[float, str]:
    """Eps of the q_a and kv_a norms and the line that says so."""
    if choice == "config":
        return rms_norm_eps, f"latent norm eps {rms_norm_eps:g} from rms_norm_eps, as vLLM and SGLang read it"
    if isinstance(choice, str) or not 0 < choice < 1:
        raise MinispecError(f"latent_norm_eps is {choice!r}: a number between 0 and 1, or 'config', is expected")
    return float(choice), (f"latent norm eps {choice:g} as transformers"
                           + (f"; --latent-norm-eps config gives the servers' reading "
                              f"({rms_norm_eps:g})" * (choice != rms_norm_eps)))


def _routing(fields: Fields) -> dict:
    """Experts and how tokens choose them. Everything is 0 or neutral in a target without experts."""
    experts = next((fields.integer(name, 0, low=0) for name in ("n_routed_experts", "num_experts", "num_local_experts")
                    if fields.has(name)), 0)
    c = {"n_routed_experts": experts, "first_k_dense_replace": fields.integer("first_k_dense_replace", 0, low=0),
         "moe_layer_freq": fields.integer("moe_layer_freq", 1), "n_shared_experts": fields.integer("n_shared_experts", 0, low=0),
         "routed_scaling_factor": fields.number("routed_scaling_factor"), "norm_topk_prob": fields.flag("norm_topk_prob", False)}
    c["scoring_func"] = fields.text("scoring_func", choices=("sigmoid", "softmax"))
    methods = {"sigmoid": ("noaux_tc",), "softmax": ("greedy", "group_limited_greedy")}[c["scoring_func"]]
    c["topk_method"] = fields.text("topk_method", choices=methods)
    if not experts:
        return c | {"moe_intermediate_size": 0, "num_experts_per_tok": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}
    if c["scoring_func"] == "softmax" and c["norm_topk_prob"]:
        raise fields.refuse("norm_topk_prob", "implementations of softmax routing disagree on it; only false is supported")
    c["moe_intermediate_size"] = fields.integer("moe_intermediate_size")
    c["num_experts_per_tok"] = fields.integer("num_experts_per_tok")
    grouped = c["topk_method"] != "greedy"
    groups = c["n_group"] = fields.integer("n_group", 1) if grouped else 1
    groups = c["n_group"] = groups or 1
    kept = c["topk_group"] = (fields.integer("topk_group", 1) if grouped else 1) or 1
    if experts % groups:
        raise fields.refuse("n_group", f"must divide the {experts} experts; correct the config")
    if kept > groups:
        raise fields.refuse("topk_group", f"must not exceed n_group ({groups}); correct the config")
    if groups > 1 and c["topk_method"] == "noaux_tc" and experts // groups < 2:
        raise fields.refuse("n_group", f"a group's score is the sum of its best two, and {experts} experts give it fewer; "
                                       "correct the config")
    if c["num_experts_per_tok"] > experts // groups * kept:
        raise fields.refuse("num_experts_per_tok", f"must not exceed the {experts // groups * kept} experts that the groups "
                                                   "leave; correct the config")
    return c


def _ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """One token id or a list of them; every id is checked against the vocabulary."""
    value = fields.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
        raise fields.refuse(name, f"token ids from 0 to {vocab_size - 1} are expected; correct the config")
    return tuple(dict.fromkeys(ids))

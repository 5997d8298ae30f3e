"""What a checkpoint's config.json says, as frozen objects: the target, its storage, the draft."""
from dataclasses import dataclass, field

from minispec.errors import MinispecError
from minispec.fields import REQUIRED, Fields, short
from minispec.quantization import Quantization
from minispec.rope import Rope, read_rope

LATENT_EPS = 1e-6
# What transformers assumes when a config omits the field; sizes are never assumed.
_V3 = {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
       "norm_topk_prob": True, "max_position_embeddings": 4096, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_V2 = {"n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "first_k_dense_replace": 0,
       "norm_topk_prob": False, "max_position_embeddings": 2048, "scoring_func": "softmax", "topk_method": "greedy"}
_DEFAULTS = {"deepseek_v3": _V3, "kimi_k2": _V3, "deepseek_v2": _V2}
# Fields that would change the forward, with the one value that it implements, if any.
_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,),
          "index_topk": (), "index_n_heads": (), "index_head_dim": ()}


@dataclass(frozen=True, kw_only=True)
class _Widths:
    """What a target and a draft share. Sizes in channels; the ranks and widths of latent attention are 0 or None without it."""
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float
    rope: Rope
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.score_factor


@dataclass(frozen=True, kw_only=True)
class TargetConfig(_Widths):
    """A DeepSeek-V3-family target (arXiv 2412.19437), eps and factors as the forward uses them.

    `prefix` is what the checkpoint's language-model names start with; `notes` are the assumptions made while reading.
    """
    num_hidden_layers: int
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
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None
    prefix: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)

    def is_moe(self, i: int) -> bool:
        """Whether layer i routes to experts (the others are dense)."""
        return self.n_routed_experts > 0 and i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0

    @classmethod
    def read(cls, folder: str, latent_norm_eps: float | str = LATENT_EPS) -> "TargetConfig":
        """Read `folder`/config.json, Kimi-K2.5's wrapper included.

        latent_norm_eps: eps of the q_a and kv_a norms; transformers uses 1e-6 whatever the config says,
        "config" takes rms_norm_eps as vLLM and SGLang do. MinispecError for anything the forward cannot do.
        """
        top = Fields.read(folder)
        fields, prefix, notes = _unwrap(top)
        c = widths(fields)
        fields.only("num_key_value_heads", (c["num_attention_heads"],), "latent attention has num_attention_heads of them")
        if "q_lora_rank" not in fields.values:
            raise fields.refuse("q_lora_rank", "an integer or null is needed; take the config.json of the weights")
        c |= latent_widths(fields) | _routing(fields)
        c["max_position_embeddings"] = fields.integer("max_position_embeddings")
        c["rope"] = read_rope(fields, c["qk_rope_head_dim"], "interleaved" if fields.flag("rope_interleave", True) else "half",
                              c["max_position_embeddings"])
        c["tie_word_embeddings"] = fields.flag("tie_word_embeddings", False)
        c["bos_token_id"] = fields.integer("bos_token_id", None, low=0, high=c["vocab_size"] - 1)
        ids = fields if fields.has("eos_token_id") else top
        stops = ids.get("eos_token_id", [])
        stops = stops if isinstance(stops, list) else [stops]
        if any(type(i) is not int or not 0 <= i < c["vocab_size"] for i in stops):
            raise ids.refuse("eos_token_id", f"token ids from 0 to {c['vocab_size'] - 1} are expected; correct the config")
        c["eos_token_ids"] = tuple(dict.fromkeys(stops))
        c["latent_norm_eps"], note = latent_eps(latent_norm_eps, c["rms_norm_eps"])
        section = fields.section("quantization_config") or top.section("quantization_config")
        c["quantization"] = Quantization.read(section) if section else None
        if unsaid := [name for name in ("rms_norm_eps", *fields.defaults) if name not in fields.values and c[name] is not None]:
            notes.append(f"missing in config.json, read as transformers does: {', '.join(f'{n} {c[n]}' for n in unsaid)}")
        return cls(**c, prefix=prefix, notes=(*notes, note, str(c["rope"])))


@dataclass(frozen=True, kw_only=True)
class DraftConfig(_Widths):
    """An EAGLE-3 head of one layer (arXiv 2503.01840), every dialect resolved.

    `attention` is "llama" (num_key_value_heads, head_dim, qk_norm) or "mla"; the fields of the other kind are 0 or None.
    `capture` numbers the residual streams entering target layers, ascending.
    """
    target_hidden_size: int
    draft_vocab_size: int
    attention: str
    capture: tuple[int, ...]
    capture_reason: str
    num_key_value_heads: int = 0
    head_dim: int = 0
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def softmax_scale(self) -> float:
        return self.head_dim ** -0.5 if self.attention == "llama" else super().softmax_scale


def _unwrap(top: Fields) -> tuple[Fields, str, list[str]]:
    """The language model's fields, the prefix of its tensor names, and what was ignored around it."""
    inner, prefix, notes = top.section("text_config"), "", []
    if inner is not None:
        top.text("model_type", "kimi_k25", ("kimi_k25",))
        prefix = "language_model."
        notes = [f"{top.file}: outer {name} {short(value, 60)} ignored, text_config.{name} is {short(inner.values[name], 60)}"
                 for name, value in sorted(top.values.items()) if name in inner.values and inner.values[name] != value
                 and name not in ("model_type", "architectures", "auto_map", "transformers_version")]
    elif top.values.get("model_type") == "kimi_k25":
        raise top.refuse("text_config", "a kimi_k25 config holds its language model there; download the file again")
    fields = inner or top
    kind = fields.text("model_type", "deepseek_v3" if prefix else REQUIRED, tuple(_DEFAULTS))
    return Fields(fields.values, top.file, path=fields.path, defaults=_DEFAULTS[kind]), prefix, notes


def widths(fields: Fields) -> dict:
    """The sizes that a target and a draft share, after refusing fields that would change the forward."""
    for name, allowed in _FIXED.items():
        fields.only(name, allowed, "other activations, biases, windows and sparse attention are not: use another checkpoint")
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    limits = {"vocab_size": 2**20, "num_hidden_layers": 1024}       # tables and reserved ids are built before any tensor is looked at
    sizes = {name: fields.integer(name, high=limits.get(name, 2**31 - 1)) for name in names}
    return sizes | {"rms_norm_eps": fields.number("rms_norm_eps", LATENT_EPS)}


def latent_widths(fields: Fields) -> dict:
    """Ranks and head widths of multi-head latent attention; q_lora_rank None is a plain q_proj."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": fields.integer("q_lora_rank", None)} | {name: fields.integer(name) for name in names}


def latent_eps(choice: float | str, rms_norm_eps: float) -> tuple[float, str]:
    """Eps of the q_a and kv_a norms and the line that says so."""
    if choice == "config":
        return rms_norm_eps, f"latent norm eps {rms_norm_eps:g} from rms_norm_eps, as vLLM and SGLang read it"
    if not isinstance(choice, (int, float)) or not 0 < choice < 1:
        raise MinispecError(f"latent_norm_eps is {choice!r}: a number between 0 and 1, or 'config', is expected")
    other = f"; --latent-norm-eps config gives the servers' reading ({rms_norm_eps:g})" if choice != rms_norm_eps else ""
    return float(choice), f"latent norm eps {choice:g} as transformers{other}"


def layer_inputs(capture, layers: int) -> tuple[int, ...]:
    """The caller's capture where no draft says it: ids in 0 ... layers, ascending; None is none."""
    ids = () if capture is None else capture
    if not isinstance(ids, (list, tuple)) or any(type(i) is not int or not 0 <= i <= layers for i in ids) or list(ids) != sorted(set(ids)):
        raise MinispecError(f"capture is {ids!r}: give a list of ascending layer inputs from 0 to {layers}")
    return tuple(ids)


def _routing(fields: Fields) -> dict:
    """Experts and how tokens choose them. Everything is 0 or neutral in a target without experts."""
    aliases = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = fields.integer(next(filter(fields.has, aliases), aliases[0]), 0, low=0)
    score = fields.text("scoring_func", choices=("sigmoid", "softmax"))
    method = fields.text("topk_method", choices=("noaux_tc",) if score == "sigmoid" else ("greedy", "group_limited_greedy"))
    c = {"n_routed_experts": experts, "scoring_func": score, "topk_method": method,
         "first_k_dense_replace": fields.integer("first_k_dense_replace", 0, low=0),
         "moe_layer_freq": fields.integer("moe_layer_freq", 1), "n_shared_experts": fields.integer("n_shared_experts", 0, low=0),
         "routed_scaling_factor": fields.number("routed_scaling_factor"), "norm_topk_prob": fields.flag("norm_topk_prob", False)}
    if not experts:
        return c | {"moe_intermediate_size": 0, "num_experts_per_tok": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}
    chosen = fields.integer("num_experts_per_tok")
    groups, kept = (fields.integer(name, 1) or 1 if method != "greedy" else 1 for name in ("n_group", "topk_group"))
    per_group = experts // groups
    for wrong, name, why in (
            (score == "softmax" and c["norm_topk_prob"], "norm_topk_prob",
             "implementations of softmax routing disagree on it: only false is supported; use another checkpoint"),
            (experts % groups, "n_group", f"must divide the {experts} experts; correct the config"),
            (kept > groups, "topk_group", f"must not exceed n_group ({groups}); correct the config"),
            (groups > 1 and method == "noaux_tc" and per_group < 2, "n_group",
             f"a group's score is the sum of its best two, and {experts} experts give it fewer; correct the config"),
            (chosen > per_group * kept, "num_experts_per_tok",
             f"must not exceed the {per_group * kept} experts that the groups leave; correct the config")):
        if wrong:
            raise fields.refuse(name, why)
    return c | {"moe_intermediate_size": fields.integer("moe_intermediate_size"), "num_experts_per_tok": chosen,
                "n_group": groups, "topk_group": kept}

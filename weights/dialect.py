"""Reading a draft's config in any dialect: where the fields stand, which norms are on, which attention it has (eagle3.md 1)."""

from dataclasses import replace

from minispec.config import LATENT_EPS, latent_eps, latent_widths
from minispec.errors import MinispecError
from minispec.fields import Fields, short
from minispec.rope import read_rope
from minispec.weights.checkpoint import Checkpoint

# speculators stores transformer_layer_config as the difference to these transformers classes.
_CLASSES = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
}
_FLAGS = {"norm_before_residual": (), "norm_before_fc": (), "fc_norm": ("use_aux_norm",),
          "norm_output": ("return_hidden_post_norm",)}     # with their other names
_LAYOUT = {                         # eagle_config key -> values with which the head is the one implemented here
    "use_aux_hidden_state": ((True,), "heads without captured states are not supported; use one with an fc over captured states"),
    "use_input_layernorm_in_first_layer": ((True,), "heads without an input norm are not supported"),
    "use_last_layernorm": ((True,), "heads without a final norm are not supported"),
    "use_mtp_layernorm": ((False,), "MTP-style norms are not supported"),
    "eh_proj_before_attn": ((False,), "fusing before attention is not supported"),
    "parallel_draft_step": ((0, 1), "parallel drafting is not supported"),
    "parallel_draft_heads_num_layers": ((0,), "parallel drafting is not supported"),
}
_READ = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "capture_convention", "next_layer_regular")


def layer_fields(fields: Fields) -> Fields:
    """The fields of the decoder layer: the file itself, or speculators' nested object over its class defaults."""
    layer = fields.section("transformer_layer_config")
    if layer is None:
        if fields.has("speculators_model_type"):
            raise fields.refuse("transformer_layer_config", "a speculators config holds its layer there; download the file again")
        return Fields(fields.values, fields.file, defaults={"num_hidden_layers": 1})
    fields.text("speculators_model_type", "eagle3", ("eagle3",))
    kind = layer.text("model_type", "llama", tuple(_CLASSES))
    return Fields(layer.values, layer.file, path=layer.path, defaults=_CLASSES[kind])


def refuse_layouts(fields: Fields, checkpoint: Checkpoint, names: dict[str, str]) -> list[str]:
    """Refuse heads of the family that this forward does not compute, by config key and by tensor; say which keys are ignored."""
    eagle = fields.section("eagle_config")
    for place in filter(None, (eagle, fields)):
        for name, (allowed, why) in _LAYOUT.items():
            place.only(name, allowed, why + "; use another draft")
    for name, file in names.items():
        why = ("is of a parallel-drafting head "
               "(P-EAGLE)" if name == "mask_hidden" or name.startswith("parallel_draft_heads.") else
               "is of a second layer" if name.startswith("layers.") and not name.startswith("layers.0.") else "")
        if why:
            raise MinispecError(f"{checkpoint.tensors[file].file}: tensor {file} {why}; drafts of one layer, one step a "
                                "forward, are supported: use one of those")
    known = {*_LAYOUT, *_READ, *_FLAGS, *(alias for aliases in _FLAGS.values() for alias in aliases)}
    return [f"eagle_config.{key} ignored: {short(value, 60)}" for key, value in (eagle.values if eagle else {}).items()
            if key not in known and value is not None]


def checked_overrides(overrides: dict, lines: list[str]) -> dict:
    """The caller's flags, which win over the config; each is stated in `lines`."""
    for name, value in overrides.items():
        if name not in (*_FLAGS, "rope_theta"):
            raise MinispecError(f"overrides name {name!r}: {', '.join(_FLAGS)} and rope_theta can be overridden")
        right = type(value) is bool if name in _FLAGS else type(value) in (int, float) and 1 < value < 1e30
        if not right:
            wanted = "true or false" if name in _FLAGS else "a number above 1"
            raise MinispecError(f"override {name} is {value!r}: {wanted} is expected")
        lines.append(f"{name} {value} given by the caller, not read from the config")
    return overrides


def attention(layer: Fields, checkpoint: Checkpoint, names: dict[str, str], lines: list[str], latent: float | str,
              overrides: dict) -> dict:
    """Kind, widths and rope of the attention; the kind is told by the tensors."""
    at = "layers.0.self_attn."
    heads, positions = layer.integer("num_attention_heads"), layer.integer("max_position_embeddings", None)
    if positions is None:
        positions = 2048
        lines.append("max_position_embeddings is missing, read as 2048 (the default of transformers' llama)")
    c: dict = {"max_position_embeddings": positions}
    c["latent_norm_eps"], note = latent_eps(latent, layer.number("rms_norm_eps", LATENT_EPS))
    if any(name.startswith((at + "kv_a_proj_with_mqa.", at + "fused_qkv_a_proj_with_mqa.")) for name in names):
        c |= {"attention": "mla"} | latent_widths(layer)
        lines.append(note)
        turned, style = c["qk_rope_head_dim"], "interleaved" if layer.flag("rope_interleave", True) else "half"
    else:
        shared = layer.integer("num_key_value_heads", heads)
        if heads % shared:
            raise layer.refuse("num_key_value_heads", f"must divide num_attention_heads ({heads}); correct the config")
        head_dim = layer.integer("head_dim", None)
        if head_dim is None:
            fused = any(at + "qkv_proj.weight" + end in names for end in ("", "_packed"))
            rows = matrix(checkpoint, names, at + ("qkv_proj.weight" if fused else "q_proj.weight"))[0]
            parts = heads + 2 * shared * fused
            if rows % parts:
                raise layer.refuse("head_dim", f"and {rows} rows of queries are not {parts} whole heads; add head_dim")
            head_dim = rows // parts
            lines.append(f"head_dim is missing, read as {head_dim} ({rows} rows / {parts} heads)")
        c |= {"attention": "llama", "num_key_value_heads": shared, "head_dim": head_dim, "qk_norm": at + "q_norm.weight" in names}
        if layer.path and c["qk_norm"] != (layer.get("model_type", "llama") == "qwen3"):
            raise layer.refuse("model_type", f"but {at}q_norm.weight is {'present' if c['qk_norm'] else 'missing'}: in "
                                             "speculators' format qwen3 layers, and no others, norm queries and keys; correct "
                                             "the config")
        turned, style = head_dim, "half"
    c["rope"] = read_rope(layer, turned, style, positions)
    stated = [layer, *(layer.section(name) for name in ("rope_parameters", "rope_scaling"))]
    if "rope_theta" in overrides:
        c["rope"] = replace(c["rope"], theta=float(overrides["rope_theta"]))
    elif not any(place and place.has("rope_theta") for place in stated):
        lines.append("rope_theta is missing, read as 10000 (the default of transformers)")
    return c


def matrix(checkpoint: Checkpoint, names: dict[str, str], name: str) -> tuple[int, int]:
    """Rows and inputs of a matrix that an EAGLE-3 head must have, as stored or packed eight to a word."""
    file = names.get(name, names.get(name + "_packed"))
    if file is None:
        raise MinispecError(f"{checkpoint.folder}: tensor {name} is missing, which every EAGLE-3 head has (found: "
                            f"{', '.join(sorted(names)[:6])}, ...); give an EAGLE-3 draft with its complete weights")
    shape = checkpoint.tensors[file].shape
    if len(shape) != 2 or 0 in shape:
        raise MinispecError(f"{checkpoint.tensors[file].file}: tensor {file} has shape {list(shape)}, a matrix is expected; "
                            "download the file again")
    return shape[0], shape[1] * (8 if file.endswith("_packed") else 1)


def norm_flags(fields: Fields, names: dict[str, str], checkpoint: Checkpoint, overrides: dict, lines: list[str]) -> dict:
    """The four norm switches, wherever the dialect keeps them, against the tensors that two of them need."""
    places = [place for place in (fields, fields.section("eagle_config")) if place]
    flags = {}
    for flag, aliases in _FLAGS.items():
        said = [(place.path + name, place.flag(name)) for place in places for name in (flag, *aliases) if place.has(name)]
        if len({value for _, value in said}) > 1:
            raise MinispecError(f"{fields.file}: " + " and ".join(f"{name} is {value}" for name, value in said)
                                + "; remove the wrong one, or override " + flag)
        flags[flag] = overrides.get(flag, said[0][1] if said else False)
        if flag == "norm_before_residual" and not said and flag not in overrides:
            lines.append("norm_before_residual is missing, read as False (vLLM reads a speculators config without it as True)")
    lines.append("flags: " + ", ".join(f"{name} {value}" for name, value in flags.items()))
    for flag, start in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        tensor = next((names[name] for name in sorted(names) if name.startswith(start)), None)
        if (tensor is not None) != flags[flag]:
            state = f"tensor {tensor} is present" if tensor else f"no tensor {start}* is there"
            raise MinispecError(f"{fields.file}: {flag} is {flags[flag]} but {state} in {checkpoint.folder}; set {flag} to "
                                f"{not flags[flag]} in the config, or use the draft's original files")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise MinispecError(f"{fields.file}: norm_before_fc and fc_norm are both true, and a head norms before fc in one way "
                            "only; set one to false")
    return flags

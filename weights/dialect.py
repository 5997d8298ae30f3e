"""Reading a draft's config in any dialect: where the fields stand, which norms are on, which attention it has."""
from dataclasses import dataclass

from minispec.config import latent_eps, latent_widths
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
# Keys of eagle_config -> the values with which the head is the one implemented here; those after them are read elsewhere.
_LAYOUT = {"use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
           "use_mtp_layernorm": (False,), "eh_proj_before_attn": (False,), "parallel_draft_step": (0, 1),
           "parallel_draft_heads_num_layers": (0,)}
_READ = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "capture_convention", "next_layer_regular")
_AT = "layers.0.self_attn."


@dataclass(frozen=True)
class Source:
    """A draft's files: config, fields of the decoder layer, tensors, canonical name -> name in the file, lines for the report."""
    fields: Fields
    layer: Fields
    checkpoint: Checkpoint
    names: dict[str, str]
    lines: list[str]

    def stored(self, name: str) -> str | None:
        """The file's name of a weight, plain or packed, or None."""
        return self.names.get(name + ".weight", self.names.get(name + ".weight_packed"))

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and inputs of a matrix that an EAGLE-3 head must have, as stored or packed eight to a word."""
        if (file := self.stored(name)) is None:
            raise MinispecError(f"{self.checkpoint.folder}: tensor {name}.weight is missing, as in no EAGLE-3 head; give an "
                                f"EAGLE-3 draft with its complete weights (found: {short(sorted(self.names))})")
        shape = self.checkpoint.tensors[file].shape
        if len(shape) != 2 or 0 in shape:
            raise self.checkpoint.refuse(file, f"has shape {list(shape)}, a matrix is expected; download the file again")
        return shape[0], shape[1] * (8 if file.endswith("_packed") else 1)


def layer_fields(fields: Fields) -> Fields:
    """The fields of the decoder layer: the file itself, or speculators' nested object over its class defaults."""
    if (layer := fields.section("transformer_layer_config")) is None:
        if fields.has("speculators_model_type"):
            raise fields.refuse("transformer_layer_config", "speculators keep the layer there; download the file again")
        return Fields(fields.values, fields.file, defaults={"num_hidden_layers": 1})
    fields.text("speculators_model_type", "eagle3", ("eagle3",))
    kind = layer.text("model_type", "llama", tuple(_CLASSES))
    return Fields(layer.values, layer.file, path=layer.path, defaults=_CLASSES[kind])


def refuse_layouts(s: Source) -> None:
    """Refuse heads of the family that this forward does not compute, by config key and by tensor; say which keys are ignored."""
    eagle = s.fields.section("eagle_config") or Fields({}, s.fields.file)
    for place in (eagle, s.fields):
        for name, allowed in _LAYOUT.items():
            place.only(name, allowed, "other layouts of a head are not: use another draft")
    for name, file in s.names.items():
        parallel = name == "mask_hidden" or name.startswith("parallel_draft_heads.")
        if parallel or name.startswith("layers.") and not name.startswith("layers.0."):
            kind = "a parallel-drafting head (P-EAGLE)" if parallel else "a second layer"
            raise s.checkpoint.refuse(file, f"is of {kind}; use a draft of one layer that drafts one step a forward")
    known = {*_LAYOUT, *_READ, *_FLAGS, *sum(_FLAGS.values(), ())}
    s.lines.extend(f"eagle_config.{key} ignored: {short(value, 60)}" for key, value in eagle.values.items()
                   if key not in known and value is not None)


def check_overrides(overrides: dict, lines: list[str]) -> None:
    """The caller's flags, which win over the config; each is stated in `lines`."""
    for name, value in overrides.items():
        if name not in _FLAGS:
            raise MinispecError(f"overrides name {name!r}: {', '.join(_FLAGS)} can be overridden")
        if type(value) is not bool:
            raise MinispecError(f"override {name} is {value!r}: true or false is expected")
        lines.append(f"{name} {value} given by the caller, not read from the config")


def attention(s: Source, rms_norm_eps: float, latent: float | str) -> dict:
    """Kind, widths and rope of the attention; the kind is told by the tensors."""
    layer, style = s.layer, "half"
    positions = layer.integer("max_position_embeddings", 0)
    if not positions:
        positions = 2048
        s.lines.append("max_position_embeddings is missing, read as 2048 (the default of transformers' llama)")
    c: dict = {"max_position_embeddings": positions}
    c["latent_norm_eps"], note = latent_eps(latent, rms_norm_eps)
    if s.stored(_AT + "kv_a_proj_with_mqa") or s.stored(_AT + "fused_qkv_a_proj_with_mqa"):
        c |= {"attention": "mla"} | latent_widths(layer)
        s.lines.append(note)
        turned, style = c["qk_rope_head_dim"], "interleaved" if layer.flag("rope_interleave", True) else "half"
    else:
        c |= _heads(s)
        turned = c["head_dim"]
    c["rope"] = read_rope(layer, turned, style, positions)
    stated = (layer, layer.section("rope_parameters"), layer.section("rope_scaling"))
    if not any(place and place.has("rope_theta") for place in stated):
        s.lines.append("rope_theta is missing, read as 10000 (the default of transformers)")
    return c


def _heads(s: Source) -> dict:
    """Heads of Llama's attention, where the config leaves head_dim out from the rows of the query projection."""
    layer, heads = s.layer, s.layer.integer("num_attention_heads")
    shared, head_dim = layer.integer("num_key_value_heads", heads), layer.integer("head_dim", None)
    if heads % shared:
        raise layer.refuse("num_key_value_heads", f"must divide num_attention_heads ({heads}); correct the config")
    if head_dim is None:
        fused = s.stored(_AT + "qkv_proj") is not None
        rows, parts = s.matrix(_AT + ("qkv_proj" if fused else "q_proj"))[0], heads + 2 * shared * fused
        if rows % parts:
            raise layer.refuse("head_dim", f"and {rows} rows of queries are not {parts} whole heads; add head_dim")
        head_dim = rows // parts
        s.lines.append(f"head_dim is missing, read as {head_dim} ({rows} rows / {parts} heads)")
    normed = _AT + "q_norm.weight" in s.names
    if layer.path and normed != (layer.get("model_type", "llama") == "qwen3"):
        raise layer.refuse("model_type", f"but {_AT}q_norm.weight is {'present' if normed else 'missing'}: of speculators' "
                                         "layers qwen3's alone norm queries and keys; correct the config")
    return {"attention": "llama", "num_key_value_heads": shared, "head_dim": head_dim, "qk_norm": normed}


def norm_flags(s: Source, overrides: dict) -> dict:
    """The four norm switches, wherever the dialect keeps them, against the tensors that two of them need."""
    places = [place for place in (s.fields, s.fields.section("eagle_config")) if place]
    where, flags = f"{s.fields.file}:", {}
    for flag, aliases in _FLAGS.items():
        said = {place.path + name: place.flag(name) for place in places for name in (flag, *aliases) if place.has(name)}
        if len(set(said.values())) > 1:
            raise MinispecError(f"{where} " + " and ".join(f"{name} is {value}" for name, value in said.items())
                                + f"; remove the wrong one, or override {flag}")
        flags[flag] = overrides.get(flag, next(iter(said.values()), False))
        if flag == "norm_before_residual" and not said and flag not in overrides:
            s.lines.append("norm_before_residual is missing, read as False (vLLM reads a speculators config without it as True)")
    s.lines.append("flags: " + ", ".join(f"{name} {value}" for name, value in flags.items()))
    for flag, start in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        tensor = next((s.names[name] for name in sorted(s.names) if name.startswith(start)), None)
        if bool(tensor) != flags[flag]:
            state = f"tensor {tensor} is present" if tensor else f"no tensor {start}* is there"
            raise MinispecError(f"{where} {flag} is {flags[flag]} but {state}; set it to {not flags[flag]}, or use other files")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise MinispecError(f"{where} norm_before_fc and fc_norm are both true, a head norms in one way only; set one to false")
    return flags

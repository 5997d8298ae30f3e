"""`minispec inspect`: what a checkpoint holds and how it is read, from configs and headers alone; no weight is loaded."""
import math
import re
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from textwrap import wrap

import torch

from minispec.config import LATENT_EPS, TargetConfig
from minispec.device import HEADROOM, available, read_bytes, resolve_device, size, weight_bytes, workspace
from minispec.draft import kv_shape
from minispec.errors import MinispecError
from minispec.fields import Fields, printable
from minispec.ranks import Ranks
from minispec.speculate import Shape
from minispec.tokenizer import Tokenizer, stop_ids
from minispec.weights.resolve import NVIDIA_KEYS
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.draft import open_draft
from minispec.weights.load import DEFAULT, Report, open_target
from minispec.weights.packed import keep_packed
from minispec.weights.shard import shard_pair

WIDTHS = {"float32": 4, "bfloat16": 2}
PARTS = {"embed": "embedding", "head": "head", "w13": "routed experts", "w2": "routed experts", "gate_up": "other MLPs",
         "down": "other MLPs", "fc": "fusion", "d2t": "vocabulary map",
         **dict.fromkeys(("qkv_a", "q_b", "kv_b", "qkv", "o"), "attention")}


def describe(directory=None, target=None, draft=None, latent_norm_eps=None, tensor_parallel=None, expert_parallel=False, shard_latent=False,
             memory=None, **dialect):
    """{"target": ..., "draft": ...} as plain values. A folder with a fusion layer (fc) is a draft, read beside its target.

    tensor_parallel or memory (bytes a device): also "ranks", what each of them would hold.
    """
    if "" in (directory, target, draft):
        raise MinispecError("a folder's name is empty: give one, or leave the option out for the default pair")
    names = Checkpoint.open(str(directory), pickled=True).tensors if directory else {}
    is_draft = any(re.search(r"(^|\.)fc\.weight$", name) for name in names)
    unused = ["draft"] * bool(directory and draft) + ["target"] * bool(directory and not is_draft and target)
    unused += list(dialect) * (draft == "none" or bool(directory) and not is_draft)
    if unused:
        raise MinispecError(f"--{unused[0].replace('_', '-')} has no use for {directory or 'a target alone'}: drop it, or leave out DIR")
    target = directory if directory and not is_draft else target or DEFAULT / "target"
    draft = directory if is_draft else None if directory else draft or DEFAULT / "draft"
    eps = LATENT_EPS if latent_norm_eps is None else latent_norm_eps
    config = TargetConfig.read(str(target), eps)
    asked, count = tensor_parallel is not None or memory is not None, 1 if tensor_parallel is None else tensor_parallel
    if not 0 < count <= 1024:
        raise MinispecError(f"--tensor-parallel {count}: give a whole number from 1 to 1024")
    plan, other = None if is_draft and not asked else open_target(str(target), config), None
    found = {} if is_draft else {"target": describe_target(str(target), config, plan)}
    if draft not in (None, "none"):
        overrides = {name: dialect.pop(name) for name in list(dialect) if name not in ("capture", "capture_convention", "d2t")}
        other = open_draft(str(draft), config, latent_norm_eps=eps, overrides=overrides, **dialect)
        found["draft"] = describe_draft(str(draft), other)
    if not asked and (expert_parallel or shard_latent):
        raise MinispecError(f"--{'expert-parallel' if expert_parallel else 'shard-latent'} says how ranks share the model: give --tensor-parallel")
    if asked:
        ranks = [Ranks(rank, count, expert_parallel=expert_parallel, shard_latent=shard_latent) for rank in range(count)]
        found["ranks"] = describe_ranks(plan, config, other, ranks, memory)
    return found


def describe_ranks(plan, config, draft, ranks, memory):
    """What Engine would put where, in bfloat16 on CUDA, where routed experts stay as stored; its defaults in everything else."""
    dtype, shape, count = torch.bfloat16, Shape() if draft else Shape(0), len(ranks)
    weights, firsts = {}, {rank.experts(config.n_routed_experts)[0] for rank in ranks}
    few = [piece for piece in plan.pieces if not piece[0].param.endswith((".w13", ".w2")) or piece[0].index[0] in firsts]   # all are alike
    for rank in ranks:
        own, other = shard_pair(replace(plan, pieces=few, report=Report()), config, draft, rank)
        own = keep_packed(own)
        sizes = {name: weight_bytes({name: one}, dtype, own.dtypes) for name, one in own.shapes.items()}
        shared = weight_bytes(other.shapes, dtype) if draft else 0
        weights[f"rank {rank.rank}"] = sum(sizes.values()) + shared
        if rank.rank == 0 or sum(sizes.values()) + shared > max(list(weights.values())[:-1]):           # of the rank that holds most
            drafted = shared - weight_bytes({"embed": other.shapes["embed"]}, dtype) if draft and "embed" in other.shapes else shared
            drafted += sizes["head"] if draft and "head" not in other.shapes else 0
            rounds = {str(rows): int(read_bytes(sizes, config, rows)) for rows in range(1, 17)}
    token = {"target": config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize}
    token |= {"draft": math.prod(kv_shape(draft.config, ranks[0])) * dtype.itemsize} if draft else {}
    device = resolve_device("auto")
    free = memory if memory is not None else available(device) // (count if device.type == "cpu" else 1)
    aside = workspace(config, draft and draft.config, shape, 8, len(draft.config.capture) if draft else 0, dtype)
    room, kv = int((free - aside) * HEADROOM) - max(weights.values()), sum(token.values())
    fits = room // kv - shape.scratch
    need, context = f"{size(max(weights.values()))} of weights a rank", min(fits, config.max_position_embeddings) if fits >= 2 else 0
    return {
        "folder": f"{count} of {size(free)} each, bfloat16, experts {'whole' if ranks[0].expert_parallel else 'cut'}",
        "fits": f"no: {need}, and {HEADROOM:.0%} of {size(free)} may be used: give more ranks, or more memory" if fits < 2 else
                f"yes: {need}, caches for {fits} tokens, a context of {context}",
        "context": context, "weights_bytes": weights, "workspace_bytes": aside, "kv_bytes_per_token": token,
        "target_bytes_a_round_by_rows": rounds, **({"draft_bytes_a_level": drafted} if draft else {}),
        "note": "a round reads also the cache, and of its experts a rank's mean: the busiest reads more" if ranks[0].expert_parallel else
                "a round reads also the cache"}


def describe_target(folder, config, plan):
    tokenizer = Tokenizer.load(folder, config.vocab_size)
    moe = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    return {
        "folder": folder,
        "model": chosen(config, "num_hidden_layers hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
                                "qk_rope_head_dim v_head_dim vocab_size max_position_embeddings tie_word_embeddings"),
        "experts": {"layers": moe, **chosen(config, "n_routed_experts num_experts_per_tok n_shared_experts scoring_func topk_method "
                                                    "n_group topk_group norm_topk_prob routed_scaling_factor")} if moe else None,
        "norms": chosen(config, "rms_norm_eps latent_norm_eps"),
        "rope": describe_rope(config.rope),
        **account(plan, config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)),
        "stop_ids": {str(token): origin for token, origin in stop_ids(folder, config.vocab_size, tokenizer).items()},
        "tokenizer": None if tokenizer is None else {"kind": type(tokenizer).__name__, "chat_template": tokenizer.has_template},
    }


def describe_draft(folder, plan):
    c, ids = plan.config, plan.d2t
    layers = {match[0] + "*" for name in plan.checkpoint.tensors if (match := re.match(r"(model\.)?(midlayer|layers\.\d+)\.", name))}
    return {
        "folder": folder,
        "dialect": {"config": family(Fields.read(folder)), "layer_names": sorted(layers)},
        "model": chosen(c, "hidden_size target_hidden_size attention num_attention_heads num_key_value_heads head_dim qk_norm "
                           "q_lora_rank kv_lora_rank intermediate_size max_position_embeddings rms_norm_eps"),
        "capture": {"inputs_of_layers": list(c.capture), "outputs_of_layers": [i - 1 if i else "embedding" for i in c.capture],
                    "reason": c.capture_reason},
        "vocabulary": {"draft_ids": c.draft_vocab_size, "target_ids": c.vocab_size, "mapped": ids is not None,
                       "ascending": None if ids is None else bool((ids[1:] > ids[:-1]).all()),
                       "highest_target_id": c.vocab_size - 1 if ids is None else int(ids.max())},
        "own": {name: name in plan.own for name in ("embed", "head")},
        "flags": chosen(c, "norm_before_residual norm_before_fc fc_norm norm_output"),
        "rope": describe_rope(c.rope),
        **account(plan, math.prod(kv_shape(c))),
    }


def chosen(config, names):
    return {name: getattr(config, name) for name in names.split()}


def account(plan, kv):
    """What target and draft share; kv: cached values a token."""
    return {"read_as": plan.report.lines, "tensors": grouped(plan.report.tensors), "bytes": sizes(plan),
            "kv_bytes_per_token": {name: kv * width for name, width in WIDTHS.items()}}


def family(fields):
    """Which trainer's config this is, by the keys that only it writes."""
    eagle = fields.values.get("eagle_config") or {}
    if "transformer_layer_config" in fields.values:
        return "speculators"
    if any(key in eagle for key in NVIDIA_KEYS):
        return "Model-Optimizer export"
    return "SpecForge or TorchSpec (eagle_config)" if eagle else "SafeAILab"


def describe_rope(rope):
    always = ("dim", "theta", "style", "kind")
    kept = {name: value for name, value in asdict(rope).items() if rope.kind != "default" or name in always}
    return kept | {"cos_sin_multiplier": rope.multiplier, "softmax_factor": rope.score_factor}


def grouped(tensors):
    """[{tensors, state, count}]: names that differ in numbers only are one line."""
    def star(text):
        return re.sub(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])", "*", text)
    groups = Counter((star(name), star(state) if state.startswith("consumed") else state) for name, state in tensors.items())
    return [{"tensors": name, "state": state, "count": count} for (name, state), count in groups.items()]


def sizes(plan):
    """Part -> bytes in the file and in each dtype that the engine may compute in."""
    parts = defaultdict(lambda: dict.fromkeys(("file", *WIDTHS), 0))

    def add(parameter, column, count):
        parts[PARTS.get(parameter.split(".")[-1], "norms and router")][column] += count

    for name, state in plan.report.tensors.items():
        if state.startswith("consumed by "):
            add(state.removeprefix("consumed by ").split(",")[0], "file", plan.checkpoint.tensors[name].bytes)
    for name, shape in plan.shapes.items():
        for dtype, width in WIDTHS.items():
            add(name, dtype, math.prod(shape) * width)
    return parts


def render(found):
    """The same for people."""
    return "\n\n".join("\n".join(map(printable, [f"{kind}: {facts['folder']}", *lines_of(facts)])) for kind, facts in found.items())


def lines_of(facts):
    for name, value in facts.items():
        title = name.replace("_", " ")
        if isinstance(value, list):                  # read_as, tensors
            yield f"  {title}"
            yield from (f"    {x['count']:>6}  {x['tensors']}  {x['state']}" if isinstance(x, dict) else f"    {x}" for x in value)
        elif name == "bytes":
            yield f"  {title:<26}{'in the file':>16}" + "".join(f"{dtype:>16}" for dtype in WIDTHS)
            total = {column: sum(part[column] for part in value.values()) for column in ("file", *WIDTHS)}
            for part, row in {**value, "all": total}.items():
                yield f"    {part:<24}" + "".join(f"{row[column]:>16,}" for column in total)
        elif name == "capture":
            yield f"  capture: inputs of layers {value['inputs_of_layers']} = outputs of layers {value['outputs_of_layers']}"
        elif "_bytes" in name and not name.startswith("kv"):
            value = {key: size(count) for key, count in value.items()} if isinstance(value, dict) else size(value)
            yield from lines_of({name.replace("_bytes", ""): value})
        elif isinstance(value, dict):
            line = f"  {title}: " + ", ".join(f"{key} {inner}" for key, inner in value.items())
            yield from wrap(line, 120, subsequent_indent="    ")
        elif name != "folder":
            yield f"  {title}: {value}"

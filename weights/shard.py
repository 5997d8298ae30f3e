"""Which part of a checkpoint a rank holds: heads, rows and columns of MLPs and of each expert, or whole experts, rows of the vocabulary."""
from dataclasses import replace
from math import prod

from minispec.errors import MinispecError

_ROWS = "rows"          # ceil(size / ranks) each, as ranks.span says: nothing has to divide


def _sections(name, c, rows, columns, ranks):
    """(axis, [(size, units), ...]) of a parameter's file tensors, or None for one that every rank holds whole.

    Along the axis, 0 for rows, sections lie one after another; each is cut into `units` equal ones, dealt evenly in order, or by _ROWS,
    or is not cut (None).
    """
    heads, shared = c.num_attention_heads, getattr(c, "num_key_value_heads", 0)
    latent, key = _ROWS if ranks.shard_latent else None, c.kv_lora_rank + c.qk_rope_head_dim
    if name in ("embed", "head", "fc"):
        return 0, [(rows, _ROWS)]
    if name == "qkv_a":
        return 0, [(rows, latent)] if c.q_lora_rank else [(rows - key, heads), (key, latent)]
    if name in ("q_b", "kv_b"):
        return 0, [(rows, heads)]
    if name == "qkv":
        return 0, [(heads * c.head_dim, heads), *[(shared * c.head_dim, shared)] * 2]
    if name == "o":
        return 1, [(columns, heads)]
    if name in ("gate_up", "w13"):
        return 0, [(rows // 2, rows // 2)] * 2
    return (1, [(columns, columns)]) if name in ("down", "w2") else None


def _matrix(name, shape):
    """(rows, columns) of a parameter's file tensors."""
    return int(shape[-2] if name in ("w13", "w2") else prod(shape[:-1])), int(shape[-1])


def _own(size, units, ranks):
    """(start, stop) of this rank in a section. Of fewer units than ranks (KV heads) several ranks hold the same one."""
    if units is None:
        return 0, size
    if units == _ROWS:
        return ranks.span(size)
    first = ranks.rank * units // ranks.size
    return first * size // units, max(first + 1, (ranks.rank + 1) * units // ranks.size) * size // units


def _whole(name, ranks):
    return ranks.expert_parallel and name in ("w13", "w2")


def limits(plan, c, ranks):
    """What a number of ranks must divide: (field and value, allows(n)), for `refuse`."""
    found, seen = [], set()
    for entry, kind, _ in plan.pieces:
        name = entry.param.rpartition(".")[2]
        if (name, kind, plan.shapes[entry.param]) in seen:      # a shared expert's matrices are named as a dense layer's
            continue
        seen.add((name, kind, plan.shapes[entry.param]))
        if _whole(name, ranks):
            experts = plan.shapes[entry.param][0]
            found.append((f"n_routed_experts {experts}", lambda n, experts=experts: n <= experts))
            continue
        axis, sections = _sections(name, c, *_matrix(name, plan.shapes[entry.param]), ranks) or (0, [])
        for place, (size, units) in enumerate(sections):
            field = entry.shape[axis].label
            if name in ("embed", "head"):
                found.append((f"{field} {size}", lambda n, size=size: (n - 1) * -(-size // n) < size))
            elif name == "qkv" and place:
                found.append((f"num_key_value_heads {units}", lambda n, units=units: units % n == 0 or n % units == 0))
            elif isinstance(units, int):
                found.append((f"{field} {size}" if units == size else f"num_attention_heads {units}", lambda n, units=units: units % n == 0))
                block = (plan.quantization.group if kind == "int4" and axis else
                         plan.quantization.block[axis] if kind == "fp8" and name in ("w13", "w2") else 1)
                if block > 1:
                    groups = size // block if size % block == 0 else 1
                    found.append((f"{field} {size} ({groups} group{'s' * (groups > 1)} of {block})", lambda n, groups=groups: groups % n == 0))
    return found


def refuse(size, found):
    """MinispecError unless `size` ranks can share everything in `found`; it says what cannot be split, and which numbers work."""
    if wrong := list(dict.fromkeys(text for text, allows in found if not allows(size))):
        wrong = [text for text in wrong if not any(other.startswith(text + " (") for other in wrong)]
        sizes = [str(n) for n in range(1, 1025) if all(allows(n) for _, allows in found)]
        raise MinispecError(f"tensor_parallel={size}: {' and '.join(wrong)} cannot be split over {size} ranks; {', '.join(sizes)} "
                            f"work{'s' * (len(sizes) < 2)}")


def shard_pair(target, config, draft, ranks):
    """The Plans of one rank for a target and its draft, or None, whose numbers of ranks have to agree; see `shard`."""
    found = limits(target, config, ranks) if ranks.size > 1 else []
    if found and draft:
        found += [(f"the draft's {text}", allows) for text, allows in limits(draft, draft.config, ranks)]
    refuse(ranks.size, found)
    return shard(target, config, ranks), draft and shard(draft, draft.config, ranks)


def shard(plan, c, ranks):
    """The Plan of one rank: local shapes, and of every file tensor the part that this rank reads. `replicated` names what all ranks hold alike."""
    if ranks.size == 1:
        return plan
    shapes, cuts = dict(plan.shapes), {}
    for param, shape in plan.shapes.items():
        name = param.rpartition(".")[2]
        if _whole(name, ranks):
            first, last = ranks.experts(shape[0])
            shapes[param] = (last - first, *shape[1:])
        elif found := _sections(name, c, *_matrix(name, shape), ranks):
            (axis, sections), own, at = found, [], 0
            for size, units in sections:
                start, stop = _own(size, units, ranks)
                own.append((at + start, at + stop))
                at += size
            count, total = sum(stop - start for start, stop in own), _matrix(name, shape)[axis]
            cuts[param] = axis, own, count, total
            place = axis - 2 if name in ("w13", "w2") else -1 if axis else 0
            shapes[param] = tuple(int(size) * count // total if i == place % len(shape) else size for i, size in enumerate(shape))
    pieces = []
    for entry, kind, sources in plan.pieces:
        if entry.param in cuts:
            pieces += ((cut, kind, sources) for cut in _cut(entry, *cuts[entry.param]))
        elif not _whole(entry.param.rpartition(".")[2], ranks):
            pieces.append((entry, kind, sources))
        else:
            first, last = ranks.experts(plan.shapes[entry.param][0])
            if first <= entry.index[0] < last:
                pieces.append((replace(entry, index=(entry.index[0] - first, *entry.index[1:])), kind, sources))
    return replace(plan, shapes=shapes, pieces=pieces, replicated=frozenset(name for name in shapes if shapes[name] == plan.shapes[name]))


def _cut(entry, axis, own, count, total):
    """The entries that take this rank's ranges `own`, in order `count` rows or columns of the parameter's `total`, from one file tensor."""
    if axis:
        yield replace(entry, part=(slice(None), slice(*own[0])))
        return
    lead = tuple(i for i in entry.index if not isinstance(i, slice))
    here = entry.index[-1] if len(lead) < len(entry.index) else slice(0, total)
    at = 0
    for start, stop in own:
        first, last = max(start, here.start), min(stop, here.stop)
        if first < last:
            local = at + first - start, at + last - start
            yield replace(entry, index=lead + ((slice(*local),) if local != (0, count) else ()),
                          part=(slice(first - here.start, last - here.start),))
        at += stop - start

"""Opening a draft: its dialect becomes one DraftConfig, one set of parameters and one table of ids, each reading stated."""

from dataclasses import dataclass
from typing import Callable

import torch

from minispec.config import LATENT_EPS, DraftConfig, Quantization, TargetConfig, widths
from minispec.errors import MinispecError
from minispec.fields import Fields
from minispec.weights.capture import resolve_capture
from minispec.weights.account import Plan, Report, account, rename
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.dialect import attention, checked_overrides, layer_fields, matrix, norm_flags, refuse_layouts
from minispec.weights.load import fill
from minispec.weights.names import draft_table, skip_draft, strip_draft
from minispec.weights.vocabulary import read_map

@dataclass
class DraftPlan:
    """A draft whose account is complete and whose weights are not read yet.

    `shapes`: parameters to allocate. `own`: which of "embed" and "head" the file has; the others are the target's.
    `d2t`: int64 [draft_vocab_size] target ids, on the CPU, or None when the draft has the full vocabulary.
    """

    config: DraftConfig
    plan: Plan
    own: frozenset[str]
    d2t: torch.Tensor | None

    @property
    def report(self) -> Report:
        return self.plan.report

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.plan.shapes


def open_draft(folder: str, target: TargetConfig, *, capture=None, capture_convention: str | None = None, d2t: str = "offset",
               latent_norm_eps: float | str = LATENT_EPS, overrides: dict | None = None) -> DraftPlan:
    """Read a draft's config and headers and fit them to `target`. MinispecError for whatever does not fit.

    capture, capture_convention, d2t: the caller's reading, which wins over the file's. overrides: norm_before_residual,
    norm_before_fc, fc_norm, norm_output (bool) or rope_theta (float), in place of what the config says.
    """
    fields = Fields.read(folder)
    layer = layer_fields(fields)
    checkpoint = Checkpoint.open(folder, pickled=True)
    names = rename(checkpoint, strip_draft)
    lines = refuse_layouts(fields, checkpoint, names)
    overrides = checked_overrides(overrides or {}, lines)
    c = widths(layer)
    if c.pop("num_hidden_layers") != 1:
        raise layer.refuse("num_hidden_layers", "drafts of one layer are supported; use one of those")
    if not layer.has("rms_norm_eps"):
        lines.append(f"rms_norm_eps is missing, read as {c['rms_norm_eps']:g} (the default of transformers)")
    c["target_hidden_size"] = fields.integer("target_hidden_size", target.hidden_size)
    if c["target_hidden_size"] != target.hidden_size:
        raise fields.refuse("target_hidden_size", f"the target's hidden size is {target.hidden_size}; use the draft of this "
                                                  "target")
    if c["vocab_size"] != target.vocab_size:
        raise layer.refuse("vocab_size", f"{c['vocab_size']} ids do not fit the target's {target.vocab_size}; use the draft of "
                                         "this target")
    c["draft_vocab_size"] = fields.integer("draft_vocab_size", None)
    if c["draft_vocab_size"] is None:
        c["draft_vocab_size"] = c["vocab_size"]
        lines.append(f"draft_vocab_size is missing, read as vocab_size ({c['vocab_size']})")
    c |= attention(layer, checkpoint, names, lines, latent_norm_eps, overrides)
    c |= norm_flags(fields, names, checkpoint, overrides, lines)
    width = matrix(checkpoint, names, "fc.weight")[1]
    c["capture"], c["capture_reason"] = resolve_capture(fields, target.num_hidden_layers, width, target.hidden_size, capture,
                                                        capture_convention)
    config = DraftConfig(**c)
    ids, map_lines = read_map(checkpoint, names.get("d2t"), names.get("t2d"), config.vocab_size, config.draft_vocab_size, d2t)
    own, tied = _provenance(layer, target, config, names, lines)
    others = {file: f"skipped: {why}" for name, file in names.items() if (why := skip_draft(name))}
    mapped = "consumed by d2t" if ids is not None else "skipped: the full vocabulary needs no map"
    others |= {names[name]: mapped if (name == "d2t") != (d2t == "from-t2d") else "skipped: checked, not needed to run"
               for name in ("d2t", "t2d") if name in names}
    section = fields.section("quantization_config")
    lines = [config.capture_reason, *map_lines, str(config.rope), *lines]
    table = draft_table(config, set(names), own, tied)
    plan = account(checkpoint, table, names, others, Quantization.read(section) if section else None, notes=lines)
    return DraftPlan(config, plan, own, ids)


def load_draft(plan: DraftPlan, parameters: dict[str, torch.Tensor],
               progress: Callable[[int, int], None] | None = None) -> Report:
    """Fill `parameters` (names and shapes of plan.shapes) in place; warn where rows of the head repeat."""
    report = fill(plan.plan, parameters, progress)
    if "head" in plan.own:
        repeated = _repeated_rows(parameters["head"])
        if repeated:
            report.lines.append(f"WARNING: {repeated} rows of the draft's head repeat others, as a wrongly pruned vocabulary "
                                "does")
    return report


def _provenance(layer: Fields, target: TargetConfig, c: DraftConfig, names: dict[str, str],
                lines: list[str]) -> tuple[frozenset[str], bool]:
    """Which of embedding and head are the draft's own, and whether its head is its embedding."""
    present = {"embed": _present(names, "embed_tokens.weight"), "head": _present(names, "lm_head.weight")}
    same_width = c.hidden_size == target.hidden_size
    tied = layer.flag("tie_word_embeddings", False)
    if tied and present["head"]:
        raise layer.refuse("tie_word_embeddings", f"but the file has {names[present['head']]}, a head of its own; set it to "
                                                  "false")
    if tied and not present["embed"]:
        raise layer.refuse("tie_word_embeddings", "but the file has no embedding to tie the head to; set it to false to borrow "
                                                  "the target's head")
    if tied and c.draft_vocab_size != c.vocab_size:
        raise layer.refuse("tie_word_embeddings", f"but the embedding's {c.vocab_size} rows cannot serve {c.draft_vocab_size} "
                                                  "draft ids; set it to false and supply lm_head.weight")
    if not present["embed"] and not same_width:
        raise MinispecError(f"{layer.file}: embed_tokens.weight is missing, and the target's embedding, {target.hidden_size} "
                            f"wide, does not fit hidden_size {c.hidden_size}; use the draft's complete weights")
    if not present["head"] and not tied:
        if c.draft_vocab_size != c.vocab_size:
            raise MinispecError(f"{layer.file}: lm_head.weight is missing, and the target's head of {c.vocab_size} rows cannot "
                                f"serve draft_vocab_size {c.draft_vocab_size}; use the draft's complete weights")
        if not same_width:
            raise MinispecError(f"{layer.file}: lm_head.weight is missing, and the target's head, {target.hidden_size} wide, "
                                f"does not fit hidden_size {c.hidden_size}; use the draft's complete weights")
    for part, file in present.items():
        lines.append(f"{part}: " + ("own" if file else "the draft's embedding "
                                                       "(tie_word_embeddings)" if part == "head" and tied else
                                    "borrowed from the target because absent"))
    return frozenset(part for part in present if present[part] or part == "head" and tied), tied


def _present(names: dict[str, str], name: str) -> str | None:
    return next((name + end for end in ("", "_packed") if name + end in names), None)


def _repeated_rows(head: torch.Tensor, chunk: int = 4096) -> int:
    """How many rows of [rows, width] equal an earlier one, by a random projection in fp64 (equal rows project equally)."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(head.shape[1], generator=generator, dtype=torch.float64).to(head.device)
    marks = torch.cat([(rows.to(torch.float64) * direction).sum(-1) for rows in head.split(chunk)])
    return len(marks) - len(torch.unique(marks))

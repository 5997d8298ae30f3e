"""Opening a draft: its dialect becomes one DraftConfig, one set of parameters and one table of ids, each reading stated."""
from dataclasses import dataclass
from typing import Callable

import torch

from minispec.config import LATENT_EPS, DraftConfig, Quantization, TargetConfig, widths
from minispec.fields import Fields, refuse_first
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.dialect import Source, attention, check_overrides, layer_fields, norm_flags, refuse_layouts
from minispec.weights.load import Plan, Report, account, fill, rename
from minispec.weights.names import DRAFT_SKIPS, draft_table, skip, strip_draft
from minispec.weights.resolve import read_map, resolve_capture


@dataclass
class DraftPlan(Plan):
    """`own`: which of "embed" and "head" the file has; the others are the target's.

    `d2t`: int64 [draft_vocab_size] target ids, on the CPU, or None when the draft has the full vocabulary.
    """
    config: DraftConfig
    own: frozenset[str]
    d2t: torch.Tensor | None


def open_draft(folder: str, target: TargetConfig, *, capture=None, capture_convention: str | None = None, d2t: str = "offset",
               latent_norm_eps: float | str = LATENT_EPS, overrides: dict | None = None) -> DraftPlan:
    """Read a draft's config and headers and fit them to `target`. MinispecError for whatever does not fit.

    capture, capture_convention, d2t: the caller's reading, which wins over the file's. overrides: norm_before_residual,
    norm_before_fc, fc_norm or norm_output (bool), in place of what the config says.
    """
    fields, overrides = Fields.read(folder), overrides or {}
    layer, checkpoint, lines = layer_fields(fields), Checkpoint.open(folder, pickled=True), []
    names = rename(checkpoint, strip_draft)
    s = Source(fields, layer, checkpoint, names, lines)
    refuse_layouts(s)
    check_overrides(overrides, lines)
    c = widths(layer)
    c |= {"target_hidden_size": fields.integer("target_hidden_size", target.hidden_size),
          "draft_vocab_size": fields.integer("draft_vocab_size", c["vocab_size"])}
    for place, name, wanted in ((layer, "num_hidden_layers", 1), (fields, "target_hidden_size", target.hidden_size),
                                (layer, "vocab_size", target.vocab_size)):
        if c[name] != wanted:
            raise place.refuse(name, f"{c[name]} does not fit, {wanted} is needed; use a one-layer draft of this target")
    for place, name, what in ((layer, "rms_norm_eps", "the default of transformers"), (fields, "draft_vocab_size", "vocab_size")):
        if not place.has(name):
            lines.append(f"{name} is missing, read as {c[name]} ({what})")
    del c["num_hidden_layers"]
    c |= attention(s, c["rms_norm_eps"], latent_norm_eps) | norm_flags(s, overrides)
    c["capture"], c["capture_reason"] = resolve_capture(fields, target.num_hidden_layers, s.matrix("fc")[1], target.hidden_size,
                                                        capture, capture_convention)
    config = DraftConfig(**c)
    ids, map_lines = read_map(checkpoint, names.get("d2t"), names.get("t2d"), config.vocab_size, config.draft_vocab_size, d2t)
    own, tied = _provenance(s, target, config)
    used, other = ("t2d", "d2t") if d2t == "from-t2d" else ("d2t", "t2d")
    others = skip(names, DRAFT_SKIPS) | {names[name]: why for name, why in (
        (used, "consumed by d2t" if ids is not None else "skipped: the full vocabulary needs no map"),
        (other, "skipped: checked, not needed to run")) if name in names}
    section = fields.section("quantization_config")
    plan = account(checkpoint, draft_table(config, set(names), own, tied), names, others, section and Quantization.read(section),
                   notes=(config.capture_reason, *map_lines, str(config.rope), *lines))
    return DraftPlan(**vars(plan), config=config, own=own, d2t=ids)


def load_draft(plan: DraftPlan, parameters: dict[str, torch.Tensor],
               progress: Callable[[int, int, str], None] | None = None) -> Report:
    """Fill `parameters` (names and shapes of plan.shapes) in place; warn where rows of the head repeat."""
    report = fill(plan, parameters, progress)
    if "head" in plan.own and (repeated := repeated_rows(parameters["head"])):
        report.lines.append(f"warning: {repeated} rows of the draft's head repeat others, as a wrongly pruned vocabulary does")
    return report


def _provenance(s: Source, target: TargetConfig, c: DraftConfig) -> tuple[frozenset[str], bool]:
    """Which of embedding and head are the draft's own, and whether its head is its embedding."""
    embed, head, tied = s.stored("embed_tokens"), s.stored("lm_head"), s.layer.flag("tie_word_embeddings", False)
    whole, same_width = c.draft_vocab_size == c.vocab_size, c.hidden_size == target.hidden_size
    narrow = f"{target.hidden_size} wide, does not fit hidden_size {c.hidden_size}; use the draft's complete weights"
    refuse_first(
        f"{s.layer.file}:",
        (tied and head, f"tie_word_embeddings is true, but the file has {head}, a head of its own; set it to false"),
        (tied and not embed, "tie_word_embeddings is true, but the file has no embedding to tie the head to; set it to false to "
                             "borrow the target's head"),
        (tied and not whole, f"tie_word_embeddings is true, but the embedding's {c.vocab_size} rows cannot serve "
                             f"{c.draft_vocab_size} draft ids; set it to false and supply lm_head.weight"),
        (not embed and not same_width, f"embed_tokens.weight is missing, and the target's embedding, {narrow}"),
        (not head and not tied and not whole, f"lm_head.weight is missing, and the target's head of {c.vocab_size} rows cannot "
                                              f"serve draft_vocab_size {c.draft_vocab_size}; use the draft's complete weights"),
        (not head and not tied and not same_width, f"lm_head.weight is missing, and the target's head, {narrow}"))
    borrowed = "borrowed from the target because absent"
    s.lines.append("embed: " + ("own" if embed else borrowed))
    s.lines.append("head: " + ("own" if head else "the draft's embedding (tie_word_embeddings)" if tied else borrowed))
    return frozenset(part for part, there in (("embed", embed), ("head", head or tied)) if there), tied


def repeated_rows(head: torch.Tensor, chunk: int = 4096) -> int:
    """How many rows of [rows, width] equal an earlier one, by a random projection in fp64 (equal rows project equally)."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(head.shape[1], generator=generator, dtype=torch.float64).to(head.device)
    marks = torch.cat([(rows.to(torch.float64) * direction).sum(-1) for rows in head.split(chunk)])
    return len(marks) - len(torch.unique(marks))

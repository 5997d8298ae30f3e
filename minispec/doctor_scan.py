"""Which reading of a draft's files agrees best with the target: every single change of the declared one, compared row by row."""
from dataclasses import dataclass, replace
from itertools import permutations

import torch
import torch.nn.functional as F

from minispec.rope import Rope

NOISE = 4.0         # standard errors by which a reading must beat another: 3 in 100,000 by chance, for some 50 to 200 readings
THETAS = (10000.0, 50000.0, 500000.0, 1000000.0)


@dataclass(frozen=True)
class Score:
    """hit: the draft's first choice is the target's token; rank: the logarithm of that token's rank, NaN where the draft has no row for it.

    Ranks, not likelihoods: a reading that only makes the draft less sure of wrong tokens does not rank the right one higher.
    """
    hit: torch.Tensor
    rank: torch.Tensor

    @property
    def agreement(self):
        return self.hit.float().mean().item()

    def beats(self, other):
        """By McNemar's z of the hits, or, where no fewer rows are hit, by the paired t of the ranks: over NOISE."""
        ours, theirs = (self.hit & ~other.hit).sum().item(), (other.hit & ~self.hit).sum().item()
        gain = (other.rank - self.rank)[~(other.rank - self.rank).isnan()]
        t = (gain.mean() / gain.std().clamp(min=1e-9) * len(gain) ** 0.5).item() if len(gain) > 30 else 0.0
        return ours - theirs > NOISE * max(ours + theirs, NOISE ** 2) ** 0.5 or ours >= theirs and t > NOISE and self.agreement > 0.1


def distinct(text):
    """Rows that count, int64: the token two places on was written by the target, and its four-gram is new, as copies are no new evidence."""
    (before, _), (following, _), (true, written) = (text.after(count) for count in (-1, 1, 2))
    rows = written.nonzero().flatten()
    grams = torch.stack([before, text.ids, following, true], 1)[rows]
    inverse = torch.unique(grams, dim=0, return_inverse=True)[1]
    first = torch.full((int(inverse.max()) + 1 if len(rows) else 0,), len(rows)).to(rows.device)
    return rows[first.scatter_reduce(0, inverse, torch.arange(len(rows), device=rows.device), "amin")]


def score(subject, reading, rows):
    """The reading's Score on `rows`, for the first draft token."""
    logits = next(subject.steps(reading, rows))
    true, best = subject.text.after(1 + reading.shift)[0][rows], logits.argmax(-1)
    ids = torch.arange(logits.shape[-1], device=best.device) if subject.ids is None else subject.ids
    if reading.vocab == "nearest":
        used, place = best.unique(return_inverse=True)
        head = F.normalize(subject.p.get("head", subject.head)[used], dim=-1) @ F.normalize(subject.head, dim=-1).T
        return Score(head.argmax(-1)[place] == true, torch.full(true.shape, torch.nan))
    ids = ids.sort().values if reading.vocab == "order" else ids
    inverse = torch.full((len(subject.head),), -1, device=ids.device).scatter(0, ids, torch.arange(len(ids), device=ids.device))
    place = inverse[true]
    rank = 1 + (logits > logits.gather(1, place.clamp(min=0)[:, None])).sum(-1)
    return Score(ids[best] == true, torch.where(place < 0, torch.nan, rank.log()))


def variants(subject, c, rope):
    """[edit]: functions from a Reading to one that differs in one respect (or in none). c: the draft's config; rope: the target's."""
    layers = len(subject.text.states) - 1

    def config(**changes):
        return lambda r: replace(r, config=replace(r.config, **{k: v(r.config) if callable(v) else v for k, v in changes.items()}))

    def part(k, layer):
        return config(capture=lambda c: (*c.capture[:k], layer, *c.capture[k + 1:]))

    def turned(**changes):
        return config(rope=lambda c: replace(c.rope, **changes))

    def free(name, *values):
        return [lambda r, value=value: replace(r, **{name: value}) for value in values]

    def halves(c, factor):
        whole = all(size % factor == 0 for size in (c.num_attention_heads, c.num_key_value_heads))
        return c.attention == "llama" and not c.qk_norm and (whole if factor > 1 else c.head_dim % 4 == 0)

    captured, p = range(len(c.capture)), subject.p
    edits = [part(k, layer) for k in captured for layer in range(layers + 1)]
    edits += [config(capture=lambda c, by=by: tuple(min(max(i + by, 0), layers) for i in c.capture)) for by in (-1, 1)]
    edits += [config(capture=lambda c, order=order: tuple(c.capture[i] for i in order))
              for order in (permutations(captured) if len(captured) < 5 else [captured[::-1]])]
    edits += [config(norm_before_residual=lambda c: not c.norm_before_residual)]
    edits += [*free("form", "normed", "delta"), *free("shift", 0, 2), *free("swapped", True)]
    edits += free("bypass", *c.capture, layers) if c.hidden_size == c.target_hidden_size else []
    edits += free("split", *(factor for factor in (2, 0.5) if halves(c, factor)))
    edits += [turned(theta=theta) for theta in dict.fromkeys((rope.theta, *THETAS))]
    edits += [config(rope=lambda c: replace(c.rope, style={"half": "interleaved", "interleaved": "half"}[c.rope.style])),
              config(rope=lambda c: replace(rope, dim=c.rope.dim, style=c.rope.style)),
              config(rope=lambda c: Rope(c.rope.dim, c.rope.theta, c.rope.style))]
    same = c.hidden_size == c.target_hidden_size
    edits += free("vocab", "order", *["nearest"] * same) if subject.ids is not None else []
    return edits + [edit for name in ("embed", "head") if name in p and same for edit in free(name, "target")]


def search(subject, declared, rope, rows, open_fields=frozenset()):
    """(best reading, {reading: Score}): from the declared one, the best single change by more than noise, again and again; then every
    change that is not needed is taken back. open_fields: what no file declares, chosen by ranks alone."""
    known = {}

    def measured(reading):
        if reading not in known:
            known[reading] = score(subject, reading, rows)
        return known[reading]

    best, edits = declared, variants(subject, declared.config, rope)
    for _ in range(8):
        tried = []
        for place, edit in enumerate(edits):
            reading = edit(best)
            if reading != best and measured(reading).beats(measured(best)):
                tried.append((measured(reading).agreement, -measured(reading).rank.nanmean().item(), place, reading))
        if not tried:
            break
        best = max(tried)[-1]
    changed = differences(declared, best).keys()
    while "capture" in {*changed, *open_fields}:            # that the layers are wrong is settled: now the best of them, by ranks alone
        near = [reading for reading in (edit(best) for edit in edits) if not differences(declared, reading).keys() - {"capture", *changed}]
        following = min(near, key=lambda reading: measured(reading).rank.nanmean().nan_to_num(torch.inf).item())
        if not measured(following).rank.nanmean() < measured(best).rank.nanmean():
            break
        best = following
    for name, value in differences(declared, best).items() if not open_fields else ():
        without = assign(best, name, value)
        if not measured(best).beats(measured(without)):
            best = without
    return best, known


CONFIG = ("capture", "norm_before_residual", "rope")


def differences(declared, best):
    """{field: the declared value} of the fields in which two readings differ."""
    a, b = ({**vars(r), **{name: getattr(r.config, name) for name in CONFIG}} for r in (declared, best))
    return {name: value for name, value in a.items() if name != "config" and b[name] != value}


def assign(reading, name, value):
    return replace(reading, config=replace(reading.config, **{name: value})) if name in CONFIG else replace(reading, **{name: value})

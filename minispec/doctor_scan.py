"""Which reading of a draft's files agrees best with the target: every single change of the declared one, compared row by row."""
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations

import torch
import torch.nn.functional as F

from minispec.rope import Rope

NOISE = 4.0         # standard errors by which a reading must beat another: 3 in 100,000 by chance, for some 50 to 200 readings
ENOUGH = 60         # distinct places below which a difference in agreement of a quarter passes for noise
THETAS = (10000.0, 50000.0, 500000.0, 1000000.0)

OFFSETS = {"absolute": -1, "offset": 1}         # vocab of a Reading: times the draft id, what the other reading of d2t adds to the ids


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
        return Score(head.argmax(-1)[place] == true, torch.full_like(true, torch.nan, dtype=torch.float32))
    ids = ids.sort().values if reading.vocab == "order" else ids + OFFSETS.get(reading.vocab, 0) * torch.arange(len(ids), device=ids.device)
    inverse = torch.full((len(subject.head),), -1, device=ids.device).scatter(0, ids, torch.arange(len(ids), device=ids.device))
    place = inverse[true]
    rank = 1 + (logits > logits.gather(1, place.clamp(min=0)[:, None])).sum(-1)
    return Score(ids[best] == true, torch.where(place < 0, torch.nan, rank.log()))


def variants(subject, declared, rope):
    """[edit]: functions from a Reading to one that differs from it in one respect, or in none. rope: the target's."""
    c, layers, places = declared.config, len(subject.text.states) - 1, range(len(declared.capture))
    same, thetas = c.hidden_size == c.target_hidden_size, dict.fromkeys((rope.theta, *THETAS))

    def one(name, *values):                             # a value, or a function of the old one
        return [lambda r, v=value: replace(r, **{name: v(getattr(r, name)) if callable(v) else v}) for value in values]
    edits = one("capture", *(lambda ids, k=k, layer=layer: (*ids[:k], layer, *ids[k + 1:]) for k in places for layer in range(layers + 1)),
                *(lambda ids, by=by: tuple(min(max(i + by, 0), layers) for i in ids) for by in (-1, 1)),
                *(lambda ids, order=order: tuple(ids[k] for k in order) for order in (permutations(places) if len(places) < 5 else [places[::-1]])))
    edits += one("norm_before_residual", lambda on: not on) + one("form", "normed", "delta") + one("shift", 0, 2) + one("swapped", True)
    edits += one("rope", *(lambda old, theta=theta: replace(old, theta=theta) for theta in thetas), lambda old: Rope(old.dim, old.theta, old.style),
                 lambda old: replace(old, style="interleaved" if old.style == "half" else "half"),
                 lambda old: replace(rope, dim=old.dim, style=old.style))
    if c.attention == "llama" and not c.qk_norm:
        edits += one("split", *[2] * (c.num_attention_heads % 2 == c.num_key_value_heads % 2 == 0), *[0.5] * (c.head_dim % 4 == 0))
    if same:
        edits += one("bypass", *declared.capture, layers) + [edit for name in ("embed", "head") if name in subject.p for edit in one(name, "target")]
    if subject.ids is not None:
        other = {name: subject.ids + k * torch.arange(len(subject.ids), device=subject.ids.device) for name, k in OFFSETS.items()}
        possible = [name for name, ids in other.items() if 0 <= ids.min() and ids.max() < len(subject.head) and len(ids.unique()) == len(ids)]
        edits += one("vocab", *possible, "order", *["nearest"] * same)
    return edits


def search(subject, declared, rope, rows, open_fields=frozenset()):
    """(best reading, measured: Reading -> its Score): from the declared one, the best single change by more than noise, again and again; then every
    change that is not needed is taken back. open_fields: what no file declares, chosen by ranks alone."""
    measured = cache(lambda reading: score(subject, reading, rows))
    best, edits = declared, variants(subject, declared, rope)
    for _ in range(8):
        tried = [(measured(new).agreement, -measured(new).rank.nanmean().item(), place, new) for place, new in enumerate(edit(best) for edit in edits)
                 if new != best and (new.bypass is None or new.shift) and measured(new).beats(measured(best))]
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
        without = replace(best, **{name: value})
        if not measured(best).beats(measured(without)):
            best = without
    return best, measured


def differences(declared, best):
    """{field: the declared value} of the fields in which two readings differ."""
    return {name: value for name, value in vars(declared).items() if vars(best)[name] != value}

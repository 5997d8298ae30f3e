"""The depth probe, what it says each round must accept, and what the engine accepted: by depth, round, context and prompt."""
from dataclasses import dataclass

import torch

from minispec.doctor_finding import finding
from minispec.doctor_scan import NOISE, Score

DEPTHS = 6


@dataclass(frozen=True)
class Depths:
    """Teacher-forced on rows [R]: hit [DEPTHS, R], the draft's choice at that depth is the target's; valid [DEPTHS, R]: the text goes on so far;
    margin [DEPTHS, R]: between the draft's two best logits."""
    rows: torch.Tensor
    hit: torch.Tensor
    valid: torch.Tensor
    margin: torch.Tensor

    @property
    def agreement(self):
        return [(hit.sum() / valid.sum().clamp(min=1)).item() for hit, valid in zip(self.hit, self.valid)]


@dataclass(frozen=True)
class Round:
    """prompt, index in it, context (tokens before the root), accepted, previous (accepted in the round before, None for the first), expected."""
    prompt: int
    index: int
    context: int
    accepted: int
    previous: int | None
    expected: int


def depths(subject, reading, recycle=None):
    """The Depths of a reading over every row whose continuation the target wrote."""
    text = subject.text
    rows = text.after(2)[1].nonzero().flatten()
    ids, found = subject.ids, []
    for depth, logits in enumerate(subject.steps(reading, rows, DEPTHS, recycle), 1 + reading.shift):
        (true, written), (two, best) = text.after(depth), logits.topk(2)
        best = best[:, 0] if ids is None else ids[best[:, 0]]
        found.append((written[rows] & (best == true[rows]), written[rows], two[:, 0] - two[:, 1]))
    return Depths(rows, *(torch.stack(part) for part in zip(*found)))


def recycling(given, other, name, rows):
    """Pre- or post-norm state recycled: the other one than `name` ("pre" or "post"), where it does better by more than noise at depth 2, on
    `rows`. Deeper, a state may help that the draft never met in training."""
    valid = given.valid[1] & torch.isin(given.rows, rows)
    declared, better = (Score(d.hit[1][valid], torch.full((int(valid.sum()),), torch.nan, device=valid.device)) for d in (given, other))
    if better.beats(declared):
        shown = [" ".join(f"{a:.3f}" for a in d.agreement) for d in (given, other)]
        post = name == "pre"                            # what the draft was trained with
        yield finding("recycle-norm", f"agreement by depth {shown[0]}, recycling the {name}-norm state as declared",
                      {"declared": given.agreement, "better": other.agreement}, better=f"{shown[1]}, with the other state",
                      wrong=str(not post).lower(), right=str(post).lower(), flag="" if post else "no-")


def rounds(outputs, truth, found, text, tolerance):
    """[Round] of outputs of a chain of DEPTHS, up to where each leaves `truth` (plain ids); rounds that the end cuts, or that hang on two
    logits closer than `tolerance`, are left out. found: the Depths of the reading that the engine runs."""
    place, count = {(s, p): i for i, (s, p) in enumerate(zip(text.sequence[found.rows].tolist(), text.position[found.rows].tolist()))}, []
    expected = found.hit.long().cumprod(0).sum(0).tolist()
    for prompt, out in enumerate(outputs):
        at, previous = 0, None
        same = next((i for i, (a, b) in enumerate(zip(out.ids, truth[prompt])) if a != b), len(out.ids))
        for index, accepted in enumerate(out.accepted):
            row = place.get((prompt, len(out.prompt_ids) + at - 1))
            if row is None or at + DEPTHS + 1 >= same:
                break
            deciding = found.margin[:min(expected[row], accepted) + 1, row]
            if expected[row] == accepted or (deciding > tolerance).all():
                count.append(Round(prompt, index, len(out.prompt_ids) + at, accepted, previous, expected[row]))
            at, previous = at + accepted + 1, accepted
    return count


def by_depth(counts):
    """Conditional acceptance: of the rounds that came to a depth, the share that passed it."""
    tried = [sum(c >= d for c in counts) for d in range(DEPTHS + 1)]
    return [round(tried[d + 1] / tried[d], 3) if tried[d] else None for d in range(DEPTHS)]


def engine_findings(found, share):
    """Where the engine does not accept what the depth probe says. found: [Round]; share: of them that may differ (numerics)."""
    if len(wrong := [r for r in found if r.accepted != r.expected]) > share * len(found):
        name = next(name for fits, name in ((all(r.index == 0 for r in wrong), "engine-prefill"),
                                            (all(min(r.accepted, r.expected) for r in wrong), "engine-recycle"),
                                            (all(r.previous for r in wrong), "engine-pairing"), (True, "engine-cache")) if fits)
        yield finding(name, f"{len(wrong)} of {len(found)} rounds accepted another number of draft tokens; by depth "
                      f"{by_depth([r.accepted for r in found])}", {"first": vars(wrong[0])}, better=by_depth([r.expected for r in found]))


def text_findings(outputs, truth, margins, tolerance):
    """The first speculative output that leaves the plain one where the target's two best logits are further apart than `tolerance`."""
    for i, (out, ids) in enumerate(zip(outputs, truth)):
        at = next((at for at, (a, b) in enumerate(zip(out.ids, ids)) if a != b), None)
        if at is not None and margins[i][len(out.prompt_ids) + at - 1] > tolerance:
            return [finding("engine-text", f"prompt {i}, token {at}: {out.ids[at]} with the draft, {ids[at]} without")]
    return []


def trend(first, text, rows, oov):
    """Findings from where the draft agrees. first: Score of distinct `rows`; oov: share of the target's tokens it has no row for."""
    hit, position = first.hit.float(), text.position[rows]
    if oov > 0.1:
        yield finding("vocabulary-ceiling", f"the draft cannot propose {oov:.1%} of the tokens that the target emits", ceiling=f"{1 - oov:.1%}")
    early, late = (hit[part] for part in (position <= position.float().quantile(1 / 3), position > position.float().quantile(2 / 3)))
    z = (early.mean() - late.mean()) / (early.var() / len(early) + late.var() / len(late)).clamp(min=1e-9).sqrt()
    if len(hit) > 60 and z > NOISE and late.mean() < 0.7 * early.mean():
        yield finding("context-decay", f"agreement {late.mean():.3f} in the last third of the positions", early=f"{early.mean():.3f}")
    parts = {k: hit[text.sequence[rows] == k] for k in text.sequence.unique().tolist()}
    if low := [k for k, x in parts.items() if len(x) > 20 and x.mean() < 0.5 * hit.mean() - 2 * (0.25 / len(x)) ** 0.5]:
        yield finding("prompts-differ", f"agreement {parts[low[0]].mean():.3f} on prompt {low[0]}", {"prompts": low}, all=f"{hit.mean():.3f}")

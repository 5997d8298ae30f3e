"""How much of what the draft proposed was accepted. No tensors: everything comes from `Output.accepted`."""
from dataclasses import dataclass, replace

from minispec.request import Output

DEFINITION = "tokens emitted a round (accepted draft tokens + the target's own one; the prefill's token is not counted)"


@dataclass(frozen=True)
class Acceptance:
    """Counts over rounds. `tried[d]` rounds had everything before depth d + 1 accepted, `hit[d]` of them depth d + 1 too.

    A last round that a stop, `max_tokens` or the context cut short says nothing about the next depth: it is not a try.
    """
    rounds: int
    emitted: int
    tried: tuple
    hit: tuple

    @classmethod
    def of(cls, outputs, draft_steps):
        tried, hit = [0] * draft_steps, [0] * draft_steps
        for out in outputs:
            cut = out.finish_reason == "length" or len(out.ids) != 1 + sum(a + 1 for a in out.accepted)
            for i, accepted in enumerate(out.accepted):
                last = cut and i == len(out.accepted) - 1
                for depth in range(min(accepted + (not last), draft_steps)):
                    tried[depth] += 1
                    hit[depth] += depth < accepted
        return cls(sum(len(out.accepted) for out in outputs), sum(max(len(out.ids) - 1, 0) for out in outputs), tuple(tried), tuple(hit))

    @property
    def length(self):
        """Acceptance length: emitted a round; None before the first round."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def by_depth(self):
        """Conditional acceptance: the share of tries at each depth that were hits; None where nothing was tried."""
        return [h / t if t else None for h, t in zip(self.hit, self.tried)]

    def lines(self):
        length = "no round" if self.length is None else f"{self.length:.2f} in {self.rounds} rounds"
        yield f"acceptance length {length}: {DEFINITION}"
        if self.tried:
            rates = " ".join("-" if r is None else f"{r:.3f}" for r in self.by_depth)
            yield f"acceptance by depth (given that every depth before it was accepted; drafted or not) {rates}"

    def as_dict(self):
        return {"rounds": self.rounds, "emitted": self.emitted, "acceptance_length": self.length, "by_depth": self.by_depth}


def gather(events):
    """The outputs that a finished stream of events adds up to, without prompts and text."""
    found = {}
    for event in events:
        out = found.setdefault(event.index, Output([], [], None, None, [], None))
        out.ids.extend(event.ids)
        out.accepted.extend([] if event.accepted is None else [event.accepted])
        found[event.index] = replace(out, finish_reason=event.finish_reason)
    return [found[index] for index in sorted(found)]


def quantile(values, q):
    """Linear interpolation between order statistics, as numpy's default."""
    ordered, at = sorted(values), q * (len(values) - 1)
    low, high = ordered[int(at)], ordered[min(int(at) + 1, len(values) - 1)]
    return low + (high - low) * (at - int(at))


def distinct_bigrams(ids):
    """Share of adjacent pairs of ids that are distinct: 1.0 never repeats itself, near 0 is a loop."""
    pairs = list(zip(ids, ids[1:]))
    return len(set(pairs)) / len(pairs) if pairs else 1.0

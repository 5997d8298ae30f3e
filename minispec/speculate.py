"""The round: draft a tree, verify it in one target forward, keep the path that the target agrees with."""
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from minispec.choice import choose
from minispec.errors import MinispecError
from minispec.kernels.prune import learn
from minispec.tree import Tree
from minispec.verify import Path, accept

USUAL = "auto"  # the nodes of a Shape that asks for none
WORD = 64       # bits of an ancestor word: rows of one forward that can be told apart, the root included


@dataclass(frozen=True)
class Shape:
    """steps: levels of the tree (0: plain decoding), topk: children tried per node, both at most where nodes is "auto" (the default); nodes:
    draft tokens verified, the root excluded; "auto" (then adaptive): as many as pay, each round, up to 15."""
    steps: int = 6
    topk: int = 4
    nodes: int | str | None = None
    adaptive: bool = False

    def __post_init__(self):
        if (USUAL if self.nodes is None else self.nodes) == "auto":
            object.__setattr__(self, "adaptive", isinstance(self.steps, int) and self.steps > 0)
            object.__setattr__(self, "nodes", None)
        for name, low in (("steps", 0), ("topk", 1), ("nodes", 0)):
            value = getattr(self, name)
            if name == "nodes" and value is None:
                object.__setattr__(self, "nodes", self.steps)
            elif isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise MinispecError(f"{'draft_steps' if name == 'steps' else name} must be a whole number of at least {low}"
                                    f"{' or auto' * (name == 'nodes')}, not {value!r}")
        if self.adaptive:       # 16 rows cost what one costs but for their experts, and one captured round holds any number up to them
            object.__setattr__(self, "nodes", min(15, self.topk + (self.steps - 1) * self.topk**2))
        least, most = (1, min(self.topk + (self.steps - 1) * self.topk**2, WORD - 1)) if self.steps else (0, 0)
        if not least <= self.nodes <= most:
            raise MinispecError(f"nodes={self.nodes}: a tree of draft_steps={self.steps}, topk={self.topk} holds {least} to {most} "
                                "draft tokens; choose nodes in that range, or other draft_steps and topk")
        if (self.steps - 1) * self.topk > WORD:
            raise MinispecError(f"draft_steps={self.steps} with topk={self.topk} drafts {(self.steps - 1) * self.topk} rows a round, at most "
                                f"{WORD} can be told apart: lower draft_steps or topk")

    def check(self, config):
        """MinispecError where a draft, described by its DraftConfig or None for no draft, cannot have this shape."""
        if self.steps and config is None:
            raise MinispecError(f"draft_steps={self.steps}: this engine has no draft; make one with a draft")
        if self.steps and self.topk > config.draft_vocab_size:
            raise MinispecError(f"topk={self.topk}: the draft proposes one of {config.draft_vocab_size} ids; give at most that")

    @property
    def unread(self):
        """States of a request that may wait for the draft: those of a round, or of plain rounds too."""
        return 64 if self.adaptive else self.nodes + 1

    @property
    def scratch(self):
        """Cache entries past the committed length that a round writes at most, in either cache."""
        return max(self.nodes + 1, (self.steps - 1) * self.topk)


class Speculator:
    """Owns nothing but the order of the stages. draft and its cache are None for plain decoding: nothing is captured then."""

    def __init__(self, target, target_cache, draft, draft_cache, hidden, shape):
        self.target, self.target_cache, self.draft, self.draft_cache = target, target_cache, draft, draft_cache
        self.hidden, self.shape, self.capture = hidden, shape, draft.config.capture if draft else ()

    @torch.inference_mode()
    def round(self, batch, budget=None):
        """One round for every request of the batch. Returns the Path: what was emitted, accepted + 1 tokens each.

        budget: adapt.Budget of an adaptive shape; None then: a plain round, whose states wait for the draft with those before.
        """
        drafts, began = self.draft and (budget or not self.shape.adaptive), perf_counter()
        pool = self.draft.grow(batch, self.draft_cache, self.hidden, self.shape, budget) if drafts else None
        self.drafting = perf_counter() - began
        tree = Tree.best(batch, pool, self.shape, budget).agreed(self.target.ranks)
        rows = tree.rows(batch)
        hidden, parts = self.target(rows, self.target_cache, self.capture)
        ancestors = None if batch.sampling.repetition is None else tree.ancestors
        path = accept(tree, *self.choose(hidden, rows.positions, batch.sampling, rows.tokens, ancestors)).agreed(self.target.ranks)
        self.target_cache.commit(batch, path)
        if self.draft:
            self.hidden.put(batch, parts, path, not drafts)
        if budget and budget.cuts:
            learn(tree.laid, path.rows, path.count, budget.trust)
        return path

    @torch.inference_mode()
    def catch_up(self, batch):
        """The draft reads the states that wait. The last of each request stays: the next tree grows from it."""
        self.draft.read(batch, self.draft_cache, self.hidden)
        self.hidden.keep_last(batch)

    @torch.inference_mode()
    def prefill(self, batch, tokens, following):
        """A chunk of one request's prompt: the same forward with a chain of true tokens, the same extension of the draft.

        tokens int64 [1, R] stand at positions length ... length + R - 1. following: the prompt token after the chunk, or None at the
        prompt's end: then the target chooses it, and the last state waits for the round that reads both. Returns that choice's Path or None.
        """
        size = tokens.shape[1]
        hidden, states = self.forward(batch, tokens, self.capture)
        if self.draft:
            known = size - (following is None)
            after = torch.cat([tokens[:, 1:], tokens.new_tensor([[following]])], 1) if known == size else tokens[:, 1:]
            if known:
                done = replace(batch, length=batch.length + known, longest=batch.longest + known)
                self.draft.extend(done, self.draft_cache, states[:, :known], after, torch.full_like(batch.length, known))
        if following is not None:
            return None
        choice, logprobs, finite = self.choose(hidden[:, -1:], batch.length[:, None] + size - 1, batch.sampling)
        path = Path(torch.zeros_like(choice), finite.long()[:, 0], choice, logprobs, True).agreed(self.target.ranks)
        if self.draft:
            self.hidden.put(replace(batch, length=batch.length + size - 1), [states[:, -1:]], path)
        return path

    def choose(self, hidden, positions, sampling, tokens=None, ancestors=None):
        return choose(hidden, self.target.head, positions, sampling, tokens, ancestors, self.target.config.vocab_size, self.target.ranks)

    @torch.inference_mode()
    def forward(self, batch, tokens, capture):
        """The target over a chain of true tokens [B, R] at positions length, length + 1, ...: (hidden [B, R, h], states [B, R, A * h])."""
        index = batch.length[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        rows = batch.rows(tokens, index, index, prefix=index + 1, words=torch.zeros_like(index), extent=batch.longest + tokens.shape[1],
                          exact=batch.exact, chain=len(tokens) == 1)
        hidden, parts = self.target(rows, self.target_cache, capture)
        return hidden, torch.cat(parts, -1) if parts else hidden[..., :0]

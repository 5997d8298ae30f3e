"""Looking into a running engine: every forward of the draft layer, proposals to order, poisoned caches."""
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from minispec import draft as drafts


@contextmanager
def draft_calls(engine):
    """Yields a list that fills with one entry a forward of the draft layer, for batches of one.

    kind: "extend" (rows of the target) or "guess" (recycled), with tokens, positions, words, length; normed [rows, h] where
    the layer's second half ran: for the last row of an extension, for every row of a guess.
    """
    draft, calls = engine.draft, []
    project, attend, fuse = draft.project, draft.attend, draft.fuse
    state = SimpleNamespace(kind="guess")

    def spy_project(hidden, rows, cache, *take):
        calls.append(SimpleNamespace(kind=state.kind, tokens=rows.tokens[0].clone(), positions=rows.positions[0].clone(),
                                     words=rows.view.words[0].clone(), length=rows.view.base[0].item(), normed=None))
        state.kind = "guess"
        return project(hidden, rows, cache, *take)

    def spy_attend(*args):
        out = attend(*args)
        calls[-1].normed = out[0][0].clone()
        return out

    def spy_fuse(*args):        # the rows that follow are the target's
        state.kind = "extend"
        return fuse(*args)

    draft.project, draft.attend, draft.fuse = spy_project, spy_attend, spy_fuse
    try:
        yield calls
    finally:
        del draft.project, draft.attend, draft.fuse


@contextmanager
def script(engine, propose):
    """Replace what the draft proposes, for batches of one.

    propose(length, depth, topk, rows) -> target ids of the children of each frontier row, best first: a list of rows of topk ids.
    """
    def children(normed, batch, above, topk):
        rows, depth = normed.shape[1], (above[0, 0] - batch.length[0]).item() + 1
        ids = torch.tensor(propose(batch.length[0].item(), depth, topk, rows))
        assert ids.shape == (rows, topk)
        return ids[None], -torch.arange(1, topk + 1).float().expand(1, rows, -1)
    engine.draft.children = children
    try:
        yield
    finally:
        del engine.draft.children


@contextmanager
def poisoned(engine):
    """Before every step each cache entry that is no running request's committed KV becomes NaN, in both caches (slot 0 too)."""
    step = engine._step

    def poison():
        caches = engine.runner.speculator.target_cache.data, engine.runner.speculator.draft_cache[None]
        for layers, length in zip(caches, ("length", "draft_length")):
            live = torch.zeros(layers.shape[1], dtype=torch.bool)
            for request in engine.scheduler.running:
                pages = torch.tensor(request.pages)[:, None] * engine.pages.page_size + torch.arange(engine.pages.page_size)
                live[pages.flatten()[:getattr(request, length)]] = True
            layers[:, ~live] = float("nan")
        step()
    engine._step = poison
    try:
        yield
    finally:
        del engine._step


def draft_kv(engine, request, length):
    """The first `length` committed draft KV entries of a request: [length, KV heads, width]."""
    size = engine.pages.page_size
    slots = torch.tensor([request.pages[i // size] * size + i % size for i in range(length)])
    return engine.runner.speculator.draft_cache[slots].clone()


def first_proposal(engine, calls):
    """The logits [Vd] of the first proposal among `calls`."""
    return head_logits(engine, next(call.normed for call in calls if call.normed is not None))[0]


def head_logits(engine, normed):
    return torch.nn.functional.linear(normed, engine.draft.p.head).float()


def kv_shape(engine):
    return drafts.kv_shape(engine.draft_config)

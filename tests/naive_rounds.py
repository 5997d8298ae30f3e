"""The rounds of naive.py's models, by definition: one tree, and greedy speculative decoding with everything recomputed."""
import torch


def grow(draft, tokens, aux, steps, topk=1, nodes=None):
    """The tree of one round: tokens t_0..t_L (the last is the pending root), aux [L, A*th] -> paths (tuples of target ids).

    Level 1 holds the root's `topk` best children; each further level keeps the `topk` best of all children of the level before,
    by cumulative log-probability; the `nodes` best of everything seen are the tree, as the paths from the root that reach them.
    """
    known, fused = list(tokens[1:]), draft.fuse(aux)
    pool, frontier = [], [((), fused, 0.0)]
    for _ in range(steps):
        candidates = []
        for path, g, score in frontier:
            logits, following = draft.chain(torch.tensor(known + list(path)), g)
            logp = logits[-1].log_softmax(-1)
            for d in logp.topk(topk).indices.tolist():
                candidates.append(((*path, draft.d2t[d].item()), torch.cat([g, following[-1:]]), score + logp[d].item()))
        frontier = sorted(candidates, key=lambda c: -c[2])[:topk]
        pool += candidates
    best = sorted(pool, key=lambda c: (-c[2], len(c[0])))[:nodes or steps]
    return [path for path, _, _ in best]


def generate(target, draft, prompt, count, steps=6, topk=1, nodes=None):
    """Greedy: `count` ids after the prompt, and the number of accepted draft tokens of every round after the prefill."""
    def choice(tokens):
        return target.forward(tokens)[0][-1].argmax().item()
    tokens, accepted = [*prompt, choice(prompt)], []
    while len(tokens) < len(prompt) + count:
        aux = draft.aux(target.forward(tokens[:-1])[1])
        paths, path = set(grow(draft, tokens, aux, steps, topk, nodes)), ()
        while (*path, bonus := choice([*tokens, *path])) in paths:
            path = (*path, bonus)
        room = len(prompt) + count - len(tokens)
        accepted.append(min(len(path), room))
        tokens += [*path, bonus][:room]
    return tokens[len(prompt):], accepted

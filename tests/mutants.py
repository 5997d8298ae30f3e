"""Mutants of good checkpoints, and what an engine makes of them."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import Engine, MinispecError, SamplingParams

from . import naive, spy

PROMPT = [7, 301, 45, 12, 99]


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def mutate(source, copy, tensors=None, config=None):
    """A copy of a one-file checkpoint with `tensors(dict)` and `config(dict)` applied, each editing in place."""
    copy.mkdir()
    w, c = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    if tensors:
        tensors(w)
    if config:
        config(c)
    save_file({k: v.contiguous() for k, v in w.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(c))
    return copy


def refused(target, draft, *words, **options):
    """Engine(target, draft) ends in one line that has every one of `words`."""
    with pytest.raises(MinispecError) as error:
        Engine(target, draft, **options)
    line = str(error.value)
    assert "\n" not in line, line
    missing = [word for word in words if str(word) not in line]
    assert not missing, f"{missing} not in: {line}"


def first_logits(target, draft, **options):
    """The draft's first proposal for a prompt, its outputs, and the load report."""
    with Engine(target, draft, draft_steps=4, topk=1, **options) as engine:
        with spy.draft_calls(engine) as calls:
            out = engine.generate(PROMPT, greedy(24))
        return [spy.head_logits(engine, call.normed) for call in calls if call.normed is not None], out, "\n".join(engine.report)


def add(name, *shape):
    return lambda w: w.update({name: torch.ones(shape)})


def drop(*names):
    def edit(w):
        for name in [k for k in w if any(part in k for part in names)]:
            del w[name]
    return edit


def first_by_definition(target, draft, prompt=PROMPT, **options):
    """The first proposal's logits [1, Vd] after a prompt, in fp64."""
    model = naive.Target(target)
    definition = naive.Draft(draft, model, **options)
    logits, states = model.forward(prompt)
    rows = torch.tensor([*prompt[1:], logits[-1].argmax().item()])
    return definition.chain(rows, definition.fuse(definition.aux(states)))[0][-1:]

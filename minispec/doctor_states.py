"""The captured states in numbers, and against those that a trainer saved: which stream of the target each saved part equals."""
import pickle
import struct

import torch
from safetensors.torch import load_file

from minispec.doctor_finding import Finding
from minispec.errors import MinispecError
from minispec.weights.checkpoint import read_header


def statistics(subject, capture):
    """One dict a captured part: its source layer, mean norm, mean, spread (standard deviation) and the first five values of the first row."""
    parts = [(layer, subject.text.states[layer]) for layer in capture]
    return [{"layer": layer, "norm": x.norm(dim=-1).mean().item(), "mean": x.mean().item(), "spread": x.std().item(),
             "first_five": x[0, :5].tolist()} for layer, x in parts]


def read_states(path, width):
    """(ids int64 [n], parts: A tensors fp32 [n, width], the last state [n, width] or None) of a file that a trainer saved.

    speculators: hidden_states, a list of A + 1 or [n, A + 1, width], the last being the target's; token_ids or input_ids. SpecForge:
    aux_hidden_state [1, n, A * width], hidden_state [1, n, width], input_ids. Either as safetensors or as a pickle, read with weights_only.
    """
    try:
        if str(path).endswith(".safetensors"):
            read_header(str(path))
        data = load_file(path) if str(path).endswith(".safetensors") else torch.load(path, map_location="cpu", weights_only=True)
        ids = data.get("input_ids", data.get("token_ids")).reshape(-1).long()
        aux, last = data.get("aux_hidden_state", data.get("hidden_states")), data.get("hidden_state", data.get("verifier_last_hidden_states"))
        if isinstance(aux, list) or aux.dim() == 3 and aux.shape[0] == len(ids) != 1:
            *parts, last = aux if isinstance(aux, list) else aux.unbind(1)
        else:
            parts = aux.reshape(len(ids), -1).split(width, -1)
        parts = [part.reshape(len(ids), width).float() for part in parts]
        return ids, parts, None if last is None else last.reshape(len(ids), width).float()
    except (OSError, pickle.UnpicklingError, RuntimeError, ValueError, AttributeError, TypeError, EOFError, LookupError, struct.error) as error:
        raise MinispecError(f"--training-states {path}: {' '.join(str(error).split())[:120]}; give one saved sample with input_ids (or token_ids) "
                            f"and hidden_states or aux_hidden_state of width {width}") from None


def source(x, subject):
    """Of all streams, forms and shifts the nearest to x [n, h]: (layer, form, shift, scale, relative error); x = scale x stream, at p + shift."""
    found = []
    for layer in range(len(subject.text.states)):
        for form in ("residual", "normed", "delta"):
            for shift in (0, -1, 1):
                stream = subject.captured(layer, form).roll(-shift, 0)[1:-1]
                scale = (x[1:-1] * stream).sum() / stream.square().sum().clamp(min=1e-12)
                error = (x[1:-1] - scale * stream).norm() / x[1:-1].norm().clamp(min=1e-12)
                found.append((error.item(), layer, form, shift, scale.item()))
    error, *place = min(found)
    return *place, error


def compare(subject, parts, last, capture):
    """(findings, a dict for each saved part) for states saved in training, against the layers that the draft's files name."""
    sources, findings, n = [source(part, subject) for part in parts], [], len(subject.text.states) - 1

    def finding(name, measured, expected, cause, cure):
        findings.append(Finding(name, "error", measured, expected, cause, cure, {"sources": sources}))
    layers = [layer for layer, *_ in sources]
    strange = [k for k, (*_, error) in enumerate(sources) if error > 0.3]
    if strange:
        finding("states-unknown", f"saved part {strange[0]} equals no stream of this target (relative error {sources[strange[0]][-1]:.2f} at best)",
                "each part a layer's input", "saved from another target, checkpoint or precision, or rotated", "train on states of this very target")
    elif layers != list(capture):
        order = sorted(layers) == list(capture)
        finding("states-order" if order else "states-layer", f"the saved parts are the inputs of layers {layers}", f"{list(capture)}, as the draft says",
                "trained on another " + ("order of the parts" if order else "capture than the config names"),
                f"give --capture {','.join(map(str, layers))}, and write it to the config" if layers == sorted(layers) else
                f"reorder the columns of fc.weight, whose parts are those of layers {layers}")
    for k, (layer, form, shift, scale, error) in enumerate(sources if not strange else []):
        for name, wrong, measured, cure in (
                ("states-normed", form != "residual", f"{form}", "train on the residual stream before any norm"),
                ("states-shifted", shift != 0, f"that of position p {shift:+d}", "pair each state with its own token when saving"),
                ("states-scaled", abs(scale - 1) > 0.05, f"{scale:.3f} times the stream", "save states unscaled, or scale the columns of fc.weight")):
            if wrong:
                finding(name, f"saved part {k} (layer {layer}) is {measured}", "the residual stream entering the layer, as served",
                        "training and serving see different states", cure)
    if last is not None and (found := source(last, subject))[0] != n:
        finding("states-last", f"the last saved state is the input of layer {found[0]}", f"what the last layer leaves ({n})",
                "the training target came from one layer too early: the draft learned another distribution", "save the state after the last layer, "
                "and train again")
    return findings, [dict(zip(("layer", "form", "shift", "scale", "error"), place)) for place in sources]

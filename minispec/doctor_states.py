"""The captured states in numbers, and against those that a trainer saved: which stream of the target each saved part equals."""
import pickle
import struct
from itertools import product

from safetensors.torch import load_file

from minispec.doctor_finding import finding
from minispec.errors import MinispecError
from minispec.weights.checkpoint import read_header, unpickle


def statistics(subject, capture):
    """"layer i" of each captured part -> mean norm, mean, spread (standard deviation) and the first five values of the first row."""
    return {f"layer {layer}": {"norm": x.norm(dim=-1).mean().item(), "mean": x.mean().item(), "spread": x.std().item(),
                               "first_five": x[0, :5].tolist()} for layer in capture for x in [subject.text.states[layer]]}


def read_states(path, target):
    """(ids int64 [n], parts: A tensors fp32 [n, width], the last state [n, width] or None) of a file that a trainer saved, as much of it as
    fits the context. target: TargetConfig. MinispecError, which begins with the flag's name, for any other file.

    speculators: hidden_states, a list of A + 1 or [n, A + 1, width], the last being the target's; token_ids or input_ids. SpecForge:
    aux_hidden_state [1, n, A * width], hidden_state [1, n, width], input_ids. Either as safetensors or as a pickle, read with weights_only.
    """
    width, vocab = target.hidden_size, target.vocab_size
    try:
        if str(path).endswith(".safetensors"):
            read_header(str(path))
        data = load_file(path) if str(path).endswith(".safetensors") else unpickle(path)
        if not isinstance(data, dict) or not {"input_ids", "token_ids"} & data.keys() or not {"hidden_states", "aux_hidden_state"} & data.keys():
            raise ValueError(f"it holds {sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__}")
        ids = data.get("input_ids", data.get("token_ids")).reshape(-1).long()
        aux, last = data.get("aux_hidden_state", data.get("hidden_states")), data.get("hidden_state", data.get("verifier_last_hidden_states"))
        if isinstance(aux, list) or aux.dim() == 3 and aux.shape[0] == len(ids) != 1:
            *parts, last = aux if isinstance(aux, list) else aux.unbind(1)
        else:
            parts = aux.reshape(len(ids), -1).split(width, -1)
        *parts, last = (None if x is None else x.reshape(len(ids), width).float() for x in (*parts, last))
        if len(ids) < 8 or not 0 <= ids.min() <= ids.max() < vocab:
            raise ValueError(f"{len(ids)} ids, where 8 or more from 0 to {vocab - 1} are needed")
        if not all(x is None or x.isfinite().all() and x.any() for x in (*parts, last)):
            raise ValueError("a state is all zero, or holds NaN")
        kept = slice(target.max_position_embeddings)
        return ids[kept], [part[kept] for part in parts], None if last is None else last[kept]
    except (OSError, pickle.UnpicklingError, RuntimeError, ValueError, AttributeError, TypeError, EOFError, LookupError, struct.error) as error:
        what = "a pickle of more than tensors, which is not executed" if isinstance(error, pickle.UnpicklingError) else str(error)
        raise MinispecError(f"--training-states {path}: {' '.join(what.split())[:120]}; give one saved sample with input_ids (or token_ids) "
                            f"and hidden_states or aux_hidden_state of width {width}") from None


def source(x, subject):
    """Of all streams, forms and shifts the nearest to x [n, h]: (layer, form, shift, scale, relative error); x = scale x stream, at p + shift."""
    found = []
    for layer, form, shift in product(range(len(subject.text.states)), ("residual", "normed", "delta"), (0, -1, 1)):
        stream = subject.captured(layer, form).roll(-shift, 0)[1:-1]
        scale = (x[1:-1] * stream).sum() / stream.square().sum().clamp(min=1e-12)
        error = (x[1:-1] - scale * stream).norm() / x[1:-1].norm().clamp(min=1e-12)
        found.append((error.item(), layer, form, shift, scale.item()))
    error, *place = min(found)
    return *place, error


def compare(subject, parts, last, capture):
    """(findings, a dict for each saved part) for states saved in training, against the layers that the draft's files name."""
    sources, found, device = [source(part.to(subject.head.device), subject) for part in parts], [], subject.head.device
    layers, strange = [layer for layer, *_ in sources], [k for k, (*_, error) in enumerate(sources) if error > 0.3]
    flag = ",".join(map(str, layers))
    if strange:
        error = sources[strange[0]][-1]
        found.append(finding("states-unknown", f"no stream is nearer to saved part {strange[0]} than a relative error of {error:.2f}"))
    elif layers != list(capture):
        found.append(finding("states-order" if sorted(layers) == list(capture) else "states-layer", f"the saved parts are of layers {layers}",
                             capture=list(capture), value=layers, flag=flag))
    for k, (layer, form, shift, scale, _) in enumerate(() if strange else sources):
        cases = (("states-normed", form != "residual", form), ("states-shifted", shift, f"that of position p {shift:+d}"),
                 ("states-scaled", abs(scale - 1) > 0.05, f"{scale:.3f} times the stream"))
        found += [finding(name, f"saved part {k} (layer {layer}) is {what}") for name, wrong, what in cases if wrong]
    if last is not None and (place := source(last.to(device), subject))[0] != len(subject.text.states) - 1:
        found.append(finding("states-last", f"the last saved state is the input of layer {place[0]}"))
    return found, [dict(zip(("layer", "form", "shift", "scale", "error"), place)) for place in sources]

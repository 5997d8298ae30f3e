"""What a comparison reads: prompts, machine, ids, clock, and the statistics of all that."""
import json
import platform
import random
from pathlib import Path
from statistics import harmonic_mean
from time import perf_counter
from typing import NamedTuple

import torch

from minispec import __version__
from minispec.device import available, read_bytes
from minispec.errors import MinispecError
from minispec.kernels.choose import Sampling, process
from minispec.kernels.noise import noised
from minispec.params import SamplingParams
from minispec.stats import quantile
from minispec.weights.load import DEFAULT  # noqa: F401 (scripts take it from here)

TIE = 1e-4                                      # fp32: values closer than this may change places with the order of summation


class Prompt(NamedTuple):
    """prompt: text or ids; kind: what it stands for, "" for nothing in particular."""
    prompt: str | list
    kind: str = ""


def read_prompts(file=None, per_kind=None):
    """Prompts of a .jsonl file, at most per_kind of each kind; without a file, those that come with minispec."""
    path, prompts = Path(file or Path(__file__).with_name("prompts.jsonl")), []
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MinispecError(f"--prompts {path}: {error}; give a readable UTF-8 file") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
                prompt, form, one = (entry["prompt_ids"], list, int) if "prompt_ids" in entry else (entry["prompt"], str, str)
                kind = entry.get("kind", "")
                if not prompt or type(prompt) is not form or any(type(part) is not one for part in prompt) or type(kind) is not str:
                    raise TypeError("of another type, or empty")
                prompts.append(Prompt(prompt, kind))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                what = 'not an object with a text "prompt" or a list "prompt_ids", and a text "kind" if any'
                raise MinispecError(f"{path} line {number}: {what}: {line[:60]!r}; correct the line") from error
    if not prompts:
        raise MinispecError(f"{path} holds no prompt; give one JSON object a line")
    places = [sum(other.kind == one.kind for other in prompts[:i]) for i, one in enumerate(prompts)]
    return [one for one, place in zip(prompts, places) if per_kind is None or place < per_kind]


def read_jsonl(file=None):
    return [one.prompt for one in read_prompts(file)]


def environment(device):
    """What a figure depends on besides the code."""
    cpu, info, device = platform.machine(), Path("/proc/cpuinfo"), torch.device(device)
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {"minispec": __version__, "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu,
            "threads": torch.get_num_threads(), "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}


def copy_bandwidth(device, size=1 << 28):
    """Bytes read and written a second by copying `size` bytes, fewer where little memory is free; the best of five."""
    source, best = torch.ones(min(size, available(device) // 8) // 4, device=device), float("inf")
    target = torch.empty_like(source)
    for _ in range(5):
        began = perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(source.device)
        best = min(best, perf_counter() - began)
    return 2 * source.nbytes / best


def target_bytes(engine, rows, experts=None):
    """Weight bytes that a forward over `rows` rows reads on this device; experts: distinct ones a layer, where measured."""
    return read_bytes({name: tensor.nbytes for name, tensor in engine.target.parameters.items()}, engine.target_config, rows, experts)


def draft_bytes(engine):
    """Weight bytes that a draft forward reads: all but the embedding; the head is the target's where the draft has none."""
    parameters = {"head": engine.target.head, **engine.draft.parameters}
    return sum(tensor.nbytes for name, tensor in parameters.items() if name != "embed")


def timed(engine, prompt, params):
    """(tokens, seconds to the first, seconds after it)."""
    began, times, count = perf_counter(), [], 0
    for event in engine.stream(prompt, params):
        times.append(perf_counter())
        count += len(event.ids)
    return count, times[0] - began, times[-1] - times[0]


def difference(engine, prompt_ids, plain, other, params=SamplingParams()):
    """None when equal, else where they part, and how far apart the two best values of the choice there are: logits, or log-probabilities
    with their noise. A gap that rounding explains is a tie; narrow types round earlier."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    ids = prompt_ids + plain[:at]
    logits = engine.score(ids).logits[-1:][None]
    sampling = Sampling.build([params], [prompt_ids], [plain[:at]], logits.shape[-1], logits.device)
    every, positions = torch.arange(logits.shape[-1], device=logits.device), torch.tensor([[len(ids) - 1]], device=logits.device)
    values = noised(process(logits, sampling), sampling.temperature, sampling.seed, positions, every)
    first, second = values.flatten().topk(2).values.tolist()
    rounding = 2 * torch.finfo(engine.dtype).eps * logits.max().abs().item() / (params.temperature or 1)
    return {"at": at, "plain": plain[at:at + 1], "other": other[at:at + 1], "gap": first - second,
            "tie": first - second < (TIE if engine.dtype == torch.float32 else rounding)}


def spread(values):
    return {name: round(quantile(values, q), 3) for name, q in (("median", 0.5), ("p10", 0.1), ("p90", 0.9))}


def interval(outputs, draws=2000, seed=0):
    """95% confidence interval of the acceptance length by bootstrap over prompts, whose rounds are not independent of each other;
    None for fewer than two prompts that had rounds."""
    parts = [(len(out.ids) - 1, len(out.accepted)) for out in outputs if out.accepted]
    if len(parts) < 2:
        return None
    chance, lengths = random.Random(seed), []
    for _ in range(draws):
        emitted, rounds = zip(*chance.choices(parts, k=len(parts)))
        lengths.append(sum(emitted) / sum(rounds))
    return [round(quantile(lengths, q), 3) for q in (0.025, 0.975)]


def by_kind(table, kinds):
    """table[repeat][prompt], None for a run that says nothing -> {kind: one value a repeat}: the harmonic mean over its prompts, as speeds and
    speed-ups of equally many tokens combine. (A median is of one or two prompts, and their text is the same in every repeat.)"""
    found = {}
    for kind in dict.fromkeys(kinds):
        rows = [[value for value, of in zip(row, kinds) if of == kind and value is not None] for row in table]
        if all(rows):
            found[kind] = [harmonic_mean(row) for row in rows]
    return found


def mix(found):
    """One value a repeat over all kinds, each counting as much: their harmonic mean."""
    return [harmonic_mean(values) for values in zip(*found.values())]

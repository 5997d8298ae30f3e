"""`minispec bench`: plain and speculative decoding side by side in one process, after their ids have been found equal."""
import json
import platform
from pathlib import Path
from time import perf_counter

import torch

from minispec import __version__
from minispec.device import read_bytes
from minispec.errors import MinispecError
from minispec.params import SamplingParams
from minispec.stats import Acceptance, distinct_bigrams, quantile
from minispec.weights.load import DEFAULT

TIE = 1e-4                                      # fp32: logits closer than this may change places with the order of summation


def read_jsonl(file=None):
    """Prompts (text or ids) of a .jsonl file; without one, those that come with minispec."""
    path, prompts = Path(file or DEFAULT / "prompts.jsonl"), []
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MinispecError(f"--prompts {path}: {error}; give a readable UTF-8 file") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
                prompt, kind, one = (entry["prompt_ids"], list, int) if "prompt_ids" in entry else (entry["prompt"], str, str)
                if not prompt or type(prompt) is not kind or any(type(part) is not one for part in prompt):
                    raise TypeError("of another type, or empty")
                prompts.append(prompt)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                what = 'not an object with a text "prompt" or a list "prompt_ids"'
                raise MinispecError(f"{path} line {number}: {what}: {line[:60]!r}; correct the line") from error
    if not prompts:
        raise MinispecError(f"{path} holds no prompt; give one JSON object a line")
    return prompts


def environment(device):
    """What a figure depends on besides the code."""
    cpu, info, device = platform.machine(), Path("/proc/cpuinfo"), torch.device(device)
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {"minispec": __version__, "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu,
            "threads": torch.get_num_threads(), "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}


def copy_bandwidth(device, size=1 << 28):
    """Bytes read and written a second by copying `size` bytes; the best of five."""
    source, best = torch.ones(size // 4, device=device), float("inf")
    target = torch.empty_like(source)
    for _ in range(5):
        began = perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(source.device)
        best = min(best, perf_counter() - began)
    return 2 * size / best


def target_bytes(engine, rows):
    """Weight bytes that a forward over `rows` rows reads on this device."""
    return read_bytes({name: tensor.nbytes for name, tensor in engine.target.parameters.items()}, engine.target_config, rows)


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


def difference(engine, prompt_ids, plain, other):
    """None when equal, else where they part, and the gap of the target's top two logits there; narrow types round earlier."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    first, second = engine.score(prompt_ids + plain[:at]).logits[-1].topk(2).values.tolist()
    tie = TIE if engine.dtype == torch.float32 else 2 * torch.finfo(engine.dtype).eps * abs(first)
    return {"at": at, "plain": plain[at:at + 1], "other": other[at:at + 1], "gap": first - second, "tie": first - second < tie}


def spread(values):
    return {name: round(quantile(values, q), 3) for name, q in (("median", 0.5), ("p10", 0.1), ("p90", 0.9))}


def ceiling(engine, acceptance, say):
    """The byte model: bytes that a token and a round must read. Their ratio would be the speed-up were both modes bound by memory."""
    rate, rows, steps = copy_bandwidth(engine.device), engine.shape.nodes + 1, engine.draft_steps
    one, many, draft = target_bytes(engine, 1), target_bytes(engine, rows), steps * draft_bytes(engine)
    bound = acceptance.length * one / (many + draft) if acceptance.rounds else None
    say(f"byte model: a token reads {one / 1e6:.1f} MB of weights; a copy runs at {rate / 1e9:.1f} GB/s: {1e3 * one / rate:.2f} ms")
    say(f"byte model: a round reads {(many + draft) / 1e6:.1f} MB: {rows} rows {many / 1e6:.1f}, {steps} draft levels {draft / 1e6:.1f}")
    if bound:
        say(f"byte model: were both bound by memory, the speed-up would be {bound:.2f} = acceptance length {acceptance.length:.2f} * "
            f"{one / (many + draft):.3f}")
    return {"bytes_token": one, "bytes_round": many + draft, "copy_bytes_per_s": rate, "speedup_ceiling": bound}


def measure(engine, prompts, max_tokens, repeats, note, say):
    """Ids first, then the ceiling, then the clock. Returns the result as a dict; `say` gets the report, `note` the progress."""
    plain, params, steps = engine.plain(), SamplingParams(max_tokens=max_tokens), engine.draft_steps
    if not steps:
        raise MinispecError("bench compares plain with speculative decoding: give a draft and --draft-steps of at least 1")
    outputs, differences = [], []
    for index, prompt in enumerate(prompts):
        note(f"ids: prompt {index + 1} of {len(prompts)}, plain and speculative")
        outputs.append(out := engine.generate(prompt, params))
        found = difference(engine, out.prompt_ids, plain.generate(prompt, params).ids, out.ids)
        differences += [{"prompt": index, **found}] if found else []
    acceptance = Acceptance.of(outputs, steps)
    result = {"draft_steps": steps, "topk": engine.shape.topk, "nodes": engine.shape.nodes, "prompts": len(prompts),
              "max_tokens": max_tokens, "repeats": repeats, **acceptance.as_dict(), **ceiling(engine, acceptance, say),
              "distinct_bigrams": sum(distinct_bigrams(out.ids) for out in outputs) / len(outputs), "differences": differences,
              "equal": all(d["tie"] for d in differences), "environment": environment(engine.device)}
    for d in differences:
        kind = "a tie" if d["tie"] else "not a tie"
        say(f"prompt {d['prompt'] + 1}: ids differ from token {d['at']} on; the top two logits there are {d['gap']:.1e} apart: {kind}")
    if not result["equal"]:
        say("plain and speculative ids differ: no speed-up")
        return result

    runs = []
    for index, prompt in enumerate(prompts):
        note(f"clock: prompt {index + 1} of {len(prompts)}")
        runs += [(timed(plain, prompt, params), timed(engine, prompt, params)) for _ in range(repeats)]
    longer = [run for run in runs if run[0][0] > 1 and run[1][0] > 1]
    if not longer:
        raise MinispecError("bench: every prompt ended at its first token; nothing to compare, give other prompts")
    figures = {
        "plain_ms_per_token": [1e3 * rest / (count - 1) for (count, _, rest), _ in longer],
        "speculative_ms_per_token": [1e3 * rest / (count - 1) for _, (count, _, rest) in longer],
        "first_token_ms": [1e3 * first for _, (_, first, _) in runs],
        "speedup": [a[2] / (a[0] - 1) / (b[2] / (b[0] - 1)) for a, b in longer],
        "speedup_with_prefill": [(a[1] + a[2]) / a[0] / ((b[1] + b[2]) / b[0]) for a, b in longer],
    }
    for name, values in figures.items():
        result[name] = spread(values)
        say("{:<25} median {median:8.3f}   p10..p90 {p10:.3f}..{p90:.3f}".format(name, **result[name]))
    for line in acceptance.lines():
        say(line)
    if result["distinct_bigrams"] < 0.5:
        say(f"warning: {result['distinct_bigrams']:.0%} of adjacent token pairs are distinct; repetition flatters acceptance")
    return result

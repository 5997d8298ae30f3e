"""The default pair against transformers' generate on the same device and weights, dequantised; cold start and peak memory.

    python -m bench.peers --json bench/results/cpu-default.json
    python -m bench.peers --device cuda --json bench/results/h200-default.json

The 12 prompts of tests/data/reference.json, all in one process, the same threads, greedy, caches on, fp32 on CPU and bf16 on CUDA; ids
are compared before a clock is read. Of transformers' ways to run experts the fastest counts. On CUDA also: how much of a round the GPU
idles, and the cost of `exact`. Needs the test extra.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "10000")             # as the command does; read when torch starts
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from minispec import Engine, SamplingParams  # noqa: E402
from minispec.bench import DEFAULT, difference, environment, measure, spread, timed  # noqa: E402


EXPERTS = "batched_mm", "grouped_mm", "eager"


def dequantised(directory):
    """The target's tensors in fp32; a packed INT4 weight is (nibble - 8) * scale of its group of 32."""
    tensors = load_file(directory / "model.safetensors")
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            scale = tensors[name.replace("_packed", "_scale")].float()
            nibbles = (tensor[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
            values = (nibbles.flatten(1).float() - 8).unflatten(1, (scale.shape[1], -1)) * scale[..., None]
            out[name.removesuffix("_packed")] = values.flatten(1)
        elif not name.endswith((".weight_scale", ".weight_shape")):
            out[name] = tensor.float()
    return out


def transformers_model(directory, device, dtype):
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        save_file(dequantised(directory), Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((directory / "config.json").read_text())
        del config["quantization_config"]
        (Path(scratch) / "config.json").write_text(json.dumps(config | {"torch_dtype": str(dtype).removeprefix("torch.")}))
        return AutoModelForCausalLM.from_pretrained(scratch, dtype=dtype).eval().to(device)


def fastest_experts(model, prompt_ids, max_tokens, note):
    """Set the experts implementation that takes the least time for one prompt; ms a token of each that runs."""
    found = {}
    for name in EXPERTS:
        try:
            model.set_experts_implementation(name)
            runs = [transformers_timed(model, prompt_ids, max_tokens) for _ in range(3)][1:]
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            note(f"transformers: experts {name}: {type(error).__name__}: {str(error)[:100]}")
            continue
        found[name] = min(1e3 * seconds / (len(ids) - 1) for ids, seconds in runs)
        note(f"transformers: experts {name}: {found[name]:.2f} ms a token")
    if found:
        model.set_experts_implementation(min(found, key=found.get))
    return found


class Clock:
    """A streamer that notes when each token came; transformers puts the prompt first."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(perf_counter())

    def end(self):
        pass


def transformers_timed(model, prompt_ids, max_tokens):
    """(ids, seconds after the first token)."""
    clock, ids = Clock(), torch.tensor([prompt_ids], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, use_cache=True,
                             pad_token_id=0, streamer=clock)
    return out[0, len(prompt_ids):].tolist(), clock.times[-1] - clock.times[1]


def idle(engine, prompt, rounds=64):
    """Wall microseconds a round over `rounds` of them; then, of a profile, launches and GPU-busy microseconds a round; the share of the wall's
    time without a kernel. The profile's own wall is longer: it slows down the host."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    stream = engine.stream(prompt, SamplingParams(max_tokens=900, ignore_eos=True))
    for _ in range(8):
        next(stream)
    began = perf_counter()
    for _ in range(rounds):
        next(stream)
    wall = 1e6 * (perf_counter() - began) / rounds
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(rounds // 2):
            next(stream)
        torch.cuda.synchronize()
    stream.close()
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    seen = sum(event.name == "_plant" for event in events)          # kernels/tree.py: one a round
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy, reached = busy + max(0.0, end - max(start, reached)), max(reached, end)
    return {"rounds": rounds, "launches_per_round": len(spans) / seen, "wall_us": wall, "busy_us": busy / seen, "idle": 1 - busy / seen / wall}


def cold_start(threads, device):
    """Seconds from starting `minispec generate` to its first byte and to its end, and its peak memory in bytes."""
    command = [sys.executable, "-m", "minispec", "generate", "--device", device, "--prompt", "def fibonacci(n):"]
    began = perf_counter()
    threads = os.environ | {"OMP_NUM_THREADS": str(threads)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=threads)
    child.stdout.read(1)
    first = perf_counter() - began
    child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {child.returncode}")
    return {"first_token_s": first, "end_s": perf_counter() - began, "peak_bytes": usage.ru_maxrss * 1024}


def against_transformers(prompts, args, note):
    """Ids first, then transformers and plain decoding in turns, prompt by prompt."""
    dtype, params = torch.bfloat16 if args.device == "cuda" else torch.float32, SamplingParams(max_tokens=args.max_tokens)
    model = transformers_model(DEFAULT / "target", args.device, dtype)
    peer = {"differences": [], "transformers_ms_per_token": [], "plain_ms_per_token": [], "ratio": []}
    with Engine(draft="none", device=args.device, max_batch=1) as plain:
        experts = fastest_experts(model, plain.generate(prompts[0], params).prompt_ids, args.max_tokens, note)
        for index, prompt in enumerate(prompts):
            out = plain.generate(prompt, params)
            found = difference(plain, out.prompt_ids, transformers_timed(model, out.prompt_ids, args.max_tokens)[0], out.ids)
            peer["differences"] += [{"prompt": index, **found}] if found else []
            for _ in range(args.repeats):
                ids, seconds = transformers_timed(model, out.prompt_ids, args.max_tokens)
                count, _, own = timed(plain, prompt, params)
                peer["transformers_ms_per_token"].append(1e3 * seconds / (len(ids) - 1))
                peer["plain_ms_per_token"].append(1e3 * own / (count - 1))
                peer["ratio"].append(peer["transformers_ms_per_token"][-1] / peer["plain_ms_per_token"][-1])
            note(f"transformers: prompt {index + 1} of {len(prompts)}")
        gpu = {"plain": idle(plain, prompts[0])} if args.device == "cuda" else {}
    return {name: spread(values) if name != "differences" else values for name, values in peer.items()} | {"experts": experts}, gpu


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-steps", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--topk", type=int, nargs="+", default=[4])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    say = lambda line: print(line, flush=True)                                      # noqa: E731
    note = lambda line: print(line, file=sys.stderr, flush=True)                    # noqa: E731
    colds = [cold_start(args.threads, args.device) for _ in range(args.repeats)]
    cold = {name: spread([run[name] for run in colds]) for name in colds[0]}
    say(f"cold start: first byte after {cold['first_token_s']['median']:.2f} s, peak {cold['peak_bytes']['median'] / 1e9:.2f} GB")

    prompts = [case["prompt_ids"] for case in json.loads((Path(__file__).parents[1] / "tests/data/reference.json").read_text())]
    peer, gpu = against_transformers(prompts, args, note)
    if not all(d["tie"] for d in peer["differences"]):
        say(f"ids differ from transformers' by more than a tie: no ratio; {peer['differences']}")
    else:
        theirs, ours, ratio = (peer[name]["median"] for name in ("transformers_ms_per_token", "plain_ms_per_token", "ratio"))
        ties = len(peer["differences"])
        say(f"transformers {theirs:.2f} ms a token, minispec plain {ours:.3f}: {ratio:.2f} times; ids equal, {ties} ties")

    runs = []
    for steps, topk in product(args.draft_steps, args.topk):
        say(f"-- draft_steps {steps}, topk {topk}")
        with Engine(draft_steps=steps, topk=topk, nodes=steps, device=args.device, max_batch=1) as engine:
            runs.append(measure(engine, prompts, args.max_tokens, args.repeats, note, say))
            if gpu:
                gpu[f"draft_steps {steps}, topk {topk}"] = idle(engine, prompts[0])
    if gpu:
        say("-- exact")
        with Engine(draft_steps=6, nodes=6, device=args.device, max_batch=1, exact=True) as engine:
            gpu["exact"] = measure(engine, prompts, args.max_tokens, args.repeats, note, say)
    best = max((run for run in runs if run["equal"]), key=lambda run: run["speedup"]["median"])
    say(f"best: draft_steps {best['draft_steps']}, topk {best['topk']}, {best['speedup']['median']:.2f} times plain")
    import transformers

    result = {"command": " ".join(["python -m bench.peers", *sys.argv[1:]]), "cold_start": cold, "transformers": peer, "gpu": gpu,
              "runs": runs, "best": [best["draft_steps"], best["topk"]], "transformers_version": transformers.__version__,
              "environment": environment(args.device), "cores": os.cpu_count()}
    text = json.dumps(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    say(text)


if __name__ == "__main__":
    main()

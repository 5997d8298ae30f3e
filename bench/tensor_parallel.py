"""A round of Kimi-K2.5's shape on one GPU and on two: 1 dense and 11 MoE layers of INT4 experts, about 114 GB, random weights.

    python -m bench.tensor_parallel --ranks 1 2 --json bench/results/h200x2.json
    python -m bench.tensor_parallel --smoke --ranks 1 2         small, on the CPU: does it run

The checkpoint is headers alone (sparse files); each rank fills its parameters with numbers drawn by name, so that ranks agree. A round is
one replayed graph and the host's look at it: plain (1 row), draft_steps 3 with 3 nodes (4 rows), 6 with 7 (8 rows), 8k tokens of context.
Communication: the same round with every collective left out, and the all-reduce alone, by nccl and by torch's symmetric memory.
"""
import argparse
import json
import multiprocessing
import socket
import struct
import sys
import tempfile
from copy import copy
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace

import torch
import torch.distributed as dist

from minispec import SamplingParams, runner as runner_module
from minispec.bench import environment
from minispec.config import TargetConfig
from minispec.graphs import Graphs, record
from minispec.ranks import Ranks
from minispec.request import Request
from minispec.runner import Runner
from minispec.speculate import Shape
from minispec.weights.draft import open_draft
from minispec.weights.names import target_table

SHAPES = {1: Shape(0), 4: Shape(3, 4, 3), 8: Shape(6, 4, 7)}
LINKS = "whole experts", "inside experts"
KIMI = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=163840, hidden_size=7168, num_hidden_layers=12,
    num_attention_heads=64, num_key_value_heads=64, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8, n_group=1,
    topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827, scoring_func="sigmoid", topk_method="noaux_tc",
    first_k_dense_replace=1, moe_layer_freq=1, rms_norm_eps=1e-5, rope_theta=50000.0, rope_scaling=None, max_position_embeddings=16384,
    hidden_act="silu", attention_bias=False, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, num_nextn_predict_layers=0,
    quantization_config=dict(
        quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None,
        config_groups=dict(group_0=dict(targets=["Linear"], input_activations=None, output_activations=None, weights=dict(
            num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, dynamic=False, actorder=None))),
        ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]))
SMALL = dict(vocab_size=640, hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
             qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=8,
             num_experts_per_tok=2)


def write(folder, tensors, config):
    """A checkpoint of headers: tensors is name -> (safetensors dtype, bytes of an element, shape[, content])."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    at, header, contents = 0, {}, []
    for name, (dtype, width, shape, *content) in tensors.items():
        size = width * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": list(map(int, shape)), "data_offsets": [at, at + size]}
        contents += [(at, content[0])] if content else []
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for place, content in contents:
            file.seek(8 + len(text) + place)
            file.write(content)
        file.truncate(8 + len(text) + at)


def write_pair(folder, config):
    """The target, and a draft of Llama's layout with 64 heads of 128 and 32,000 of the ids."""
    folder.joinpath("target").parent.mkdir(exist_ok=True)
    tensors = {}
    (folder / "names").mkdir()
    (folder / "names" / "config.json").write_text(json.dumps(config))
    for entry in target_table(TargetConfig.read(folder / "names")).entries:
        if ".experts." in entry.source:
            rows, columns = entry.shape
            tensors[entry.source + "_packed"] = "I32", 4, (rows, columns // 8)
            tensors[entry.source + "_scale"] = "BF16", 2, (rows, columns // 32)
        else:
            tensors[entry.source] = ("F32", 4, entry.shape) if "bias" in entry.source else ("BF16", 2, entry.shape)
    write(folder / "target", tensors, config)
    h, vocab = config["hidden_size"], config["vocab_size"]
    ids, heads, inner, n = vocab // 5, *(config[name] for name in ("num_attention_heads", "intermediate_size", "num_hidden_layers"))
    width = 128 if h > 1024 else 16
    offsets = torch.arange(ids) * 4                     # id + offset = 5 id
    at = "midlayer."
    shapes = {"fc": (h, 3 * h), "norm": (h,), at + "input_layernorm": (h,), at + "hidden_norm": (h,), at + "post_attention_layernorm": (h,),
              **{f"{at}self_attn.{x}_proj": (heads * width, 2 * h) for x in "qkv"}, at + "self_attn.o_proj": (h, heads * width),
              at + "mlp.gate_proj": (inner, h), at + "mlp.up_proj": (inner, h), at + "mlp.down_proj": (h, inner), "lm_head": (ids, h)}
    draft = {name + ".weight": ("BF16", 2, shape) for name, shape in shapes.items()}
    write(folder / "draft", draft | {"d2t": ("I64", 8, (ids,), offsets.numpy().tobytes())}, {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h, "num_hidden_layers": 1, "vocab_size": vocab,
        "draft_vocab_size": ids, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width, "intermediate_size": inner,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": config["max_position_embeddings"], "hidden_act": "silu",
        "tie_word_embeddings": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, n // 2, n - 2]}})


def draw(plan, parameters, progress=None):
    """In the place of weights.load.fill: numbers of a likely size, a seed per name."""
    for name, tensor in parameters.items():
        torch.manual_seed(sum(name.encode()) + 1)
        for part in tensor if tensor.dim() > 2 else [tensor]:
            if tensor.dtype == torch.int16:
                part.random_(-2**15, 2**15)
            elif name.endswith("_scale"):
                part.uniform_(0.5, 1.5).mul_(0.2 / (32 * tensor.shape[-1] * tensor.shape[-3]) ** 0.5)
            elif tensor.dim() == 1 and not name.endswith("bias"):
                part.fill_(1)
            else:
                part.normal_(std=0.1 if name.endswith("bias") else tensor.shape[-1] ** -0.5)
    return plan.report


class Silent(Ranks):
    """The same slices, and no collective: what a round costs without them."""

    def sum(self, x):
        return x

    def gather(self, x, dim=-1):
        return torch.cat([x] * self.size, dim)

    def agree(self, *tensors):
        return tensors


def rounds(runner, device, count):
    """Median seconds of a round of one request, its graph's replay and the read of its result."""
    context = runner.max_length // 2
    request = Request(0, [1] * context, SamplingParams(max_tokens=runner.max_length - context - 1, ignore_eos=True), (), runner.max_length)
    request.slot, request.pages, request.length, request.ids = 0, runner.pages.take(runner.pages.needed(runner.max_length)), context, [5]
    request.draft_length = context - 1
    runner.hidden.first[0] = context - 1
    times = []
    for _ in range(count):
        began = perf_counter()
        (found, *_), _ = runner.round([request])
        times.append(perf_counter() - began)
        request.take(found[1:1 + found[0]], None)
    runner.pages.give(request.pages)
    return median(times[count // 4:])


def alone(ranks, device, shape, calls=24):
    """Microseconds of one all-reduce of bf16 [rows, hidden], `calls` of them in a graph: by nccl, and in one shot through symmetric memory."""
    def timed(run):
        replay = record(lambda: [run() for _ in range(calls)], device, None)
        ranks.exchange(0)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times = []
        for _ in range(30):
            marks[0].record()
            replay()
            marks[1].record()
            torch.cuda.synchronize()
            times.append(1e3 * marks[0].elapsed_time(marks[1]) / calls)
        return median(times)
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    found = {"nccl_us": timed(lambda: ranks.group.allreduce([x]).wait())}
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(shape, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(buffer, dist.group.WORLD.group_name)
        found["one_shot_us"] = timed(lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", dist.group.WORLD.group_name))
    except (RuntimeError, AttributeError, ImportError) as error:
        found["one_shot_us"], found["one_shot_error"] = None, str(error).partition("\n")[0][:200]
    return found


def rank(number, size, port, folder, link, cuda, count, queue):
    device = torch.device(f"cuda:{number}" if cuda else "cpu")
    store = dist.TCPStore("127.0.0.1", port, size, number == 0)
    team = SimpleNamespace(rank=number, size=size, store=store, tick=lambda: None, abort=None)
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=dist.PrefixStore("world/", store), rank=number, world_size=size, device_id=device)
    ranks = Ranks.connect(team if size > 1 else None, device, expert_parallel=link == LINKS[0] and size > 1)
    runner_module.load.fill = draw
    runner_module.load_draft = draw
    config = TargetConfig.read(Path(folder) / "target")
    dtype, length = (torch.bfloat16, 16384) if cuda else (torch.float32, 256)
    result, whole = {}, None
    for rows, shape in SHAPES.items():
        if whole is None:
            began = perf_counter()
            whole = Runner(Path(folder) / "target", config, open_draft(Path(folder) / "draft", config), SHAPES[8], device, dtype, ranks,
                           capture=(1, config.num_hidden_layers // 2, config.num_hidden_layers - 2), max_batch=1, max_length=length, chunk=256,
                           page_size=16, exact=False, cuda_graphs=False, progress=None)
            if not number:
                print(f"{size} ranks, {link}: ready after {perf_counter() - began:.0f} s, "
                      f"{torch.cuda.max_memory_allocated() / 1e9 if cuda else 0:.1f} GB a rank", flush=True)
        runner = copy(whole)
        runner.shape, runner.speculator = shape, copy(whole.speculator)
        runner.speculator.shape = shape
        if not shape.steps:
            runner.draft = runner.speculator.draft = None
            runner.speculator.capture = ()
        entry = {}
        for name, used in (("round_us", ranks), ("without_collectives_us", Silent(number, size, expert_parallel=ranks.expert_parallel))):
            if size == 1 and used is not ranks:
                continue
            runner.speculator.target.ranks = runner.ranks = used
            if runner.speculator.draft:
                runner.speculator.draft.ranks = used
            runner.graphs = Graphs(runner) if cuda else None
            with torch.inference_mode():
                entry[name] = round(1e6 * rounds(runner, device, count), 1)
        if size > 1:
            entry["communication"] = round(1 - entry["without_collectives_us"] / entry["round_us"], 3)
            with torch.inference_mode():
                entry |= alone(ranks, device, (rows, config.hidden_size)) if cuda else {}
        result[rows] = entry
        if not number:
            print(f"  {rows} rows: {entry}", flush=True)
    if not number:
        queue.put({"ranks": size, "experts": link if size > 1 else None, "gb_a_rank": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
                   "rows": result})
    ranks.exchange(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spawn, results = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as scratch:
        write_pair(Path(scratch), KIMI | SMALL if args.smoke else KIMI)
        for size in args.ranks:
            for link in LINKS if size > 1 else LINKS[:1]:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                queue = spawn.SimpleQueue()
                children = [spawn.Process(target=rank, args=(number, size, port, scratch, link, not args.smoke, args.rounds, queue))
                            for number in range(size)]
                for child in children:
                    child.start()
                for child in children:
                    child.join()
                if any(child.exitcode for child in children):
                    sys.exit(f"a rank of {size} ended with {[child.exitcode for child in children]}")
                results.append(queue.get())
                result = {"command": " ".join(["python -m bench.tensor_parallel", *sys.argv[1:]]), "runs": results,
                          "environment": environment(torch.device("cpu" if args.smoke else "cuda"))}
                if args.json:
                    args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Ranks on gloo: what 2 and 4 of them say equals what one says, in every storage format and shape; what they refuse; what each holds."""
import json
import shutil
from functools import partial
from random import Random

import pytest
import torch

from minispec import Engine, MinispecError
from minispec.config import TargetConfig
from minispec.kernels.moe import dequantize
from minispec.layers import allocate
from minispec.ranks import Ranks
from minispec.weights.draft import open_draft
from minispec.weights.load import fill, open_target
from minispec.weights.packed import keep_packed
from minispec.weights.shard import shard, shard_pair

from . import oracle, spmd, tiny, tiny_draft
from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET

PAIRS = {       # what targets store, and drafts of every attention: GQA with fewer KV heads than ranks, MLA, borrowed heads, mapped ids
    "fp32": (dict(vocab_size=510), dict(dialect="safeailab", vocab=381)),
    "int4": (dict(storage="int4", moe_intermediate_size=128, vocab_size=510, n_routed_experts=6, wrapper=True),
             dict(dialect="torchspec", attention="mla", flags=("fc_norm", "norm_output"))),
    "fp8": (dict(storage="fp8", moe_intermediate_size=512, n_shared_experts=2), dict(dialect="nvidia", attention="mla", vocab=384, order="frequency")),
    "v2": (dict(storage="bf16", v2=True, q_lora_rank=None), dict(dialect="specforge", own_head=False, flags=("fc_norm",))),
}
CHAIN, TREE = dict(draft_steps=4, topk=1), dict(draft_steps=3, topk=3, nodes=8)
RUNS = {        # name: (pair, options of every engine, options of ranks); 1, 2 and 3 requests a step in each
    "fp32 chain": ("fp32", CHAIN, {}), "fp32 latent tree": ("fp32", TREE, dict(shard_latent=True)),
    "int4 tree": ("int4", TREE, {}), "int4 experts chain": ("int4", CHAIN, dict(expert_parallel=True, shard_latent=True)),
    "fp8 chain": ("fp8", CHAIN, {}), "fp8 experts tree": ("fp8", TREE, dict(expert_parallel=True)),
    "v2 latent tree": ("v2", TREE, dict(shard_latent=True)), "v2 experts chain": ("v2", CHAIN, dict(expert_parallel=True)),
    "fp32 one row": ("fp32", dict(draft_steps=0), {}), "fp32 two rows": ("fp32", dict(draft_steps=1, topk=2, nodes=1), {}),
    "fp32 three rows": ("fp32", dict(draft_steps=2, topk=1), {}), "default": ("default", dict(max_length=64), {}),
    "fp32 auto": ("fp32", dict(draft_steps=3, topk=3, nodes="auto"), {}),
}
# 4 ranks on 2 cores take 4 times as long as 2 of them
CHOSEN = {*((2, name) for name in RUNS), *((4, name) for name in ("fp32 latent tree", "int4 experts chain", "fp8 chain", "v2 latent tree"))}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    found, root = {"default": (DEFAULT_TARGET, DEFAULT_DRAFT)}, tmp_path_factory.mktemp("pairs")
    for name, (target, draft) in PAIRS.items():
        path = tiny.write_target(root / name, num_hidden_layers=4, shards=3, **target)
        found[name] = path, tiny_draft.write_draft(root / f"{name} draft", path, capture=[1, 2, 3], **draft)
        tiny_draft.fit(*found[name][::-1], steps=50, batch=12, pool=192)
    return found


def changed(path, folder, **config):
    """A copy whose config.json says something else."""
    shutil.copytree(path, folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


def by_rank(function, ones, team, **arguments):
    """`function` with rank 1's own value of some arguments."""
    return function(team=team, **arguments | (ones if team.rank == 1 else {}))


def build(target, team):
    return spmd.refused(lambda: Engine(target, "none", tensor_parallel=team.size, team=team))


def other_latents(engine):
    engine.runner.speculator.target_cache.data[0, engine.scheduler.running[0].pages[0] * 16 + 2, 0, 3] += 1e-3


def other_ids(engine):
    engine.runner.decided += 1


@pytest.fixture(scope="module")
def ranks(pairs, tmp_path_factory):
    """ranks(n) -> {job: [what each rank found]}, run once; rest: also the runs that are for slow days only."""
    root, known = tmp_path_factory.mktemp("ranks"), {}
    other = changed(pairs["fp32"][0], root / "eps", rms_norm_eps=1e-3)
    norm = tiny.write_target(root / "norm", num_hidden_layers=4, **PAIRS["fp32"][0] | {"seed": 1})
    large = tiny.write_target(root / "large", hidden_size=256, moe_intermediate_size=512, num_hidden_layers=3, n_routed_experts=32)

    def of(size, rest=False):
        if (size, rest) not in known:
            jobs = [(name, spmd.told, dict(target=pairs[pair][0], draft=pairs[pair][1], **shape, **options))
                    for name, (pair, shape, options) in RUNS.items() if (size, name) in CHOSEN or rest and pair != "default"]
            jobs = [("memory", spmd.load, {"target": large}), ("heads", spmd.heads, {}), ("agree", spmd.agreed, {}), *jobs]
            fp32 = dict(target=pairs["fp32"][0], draft=pairs["fp32"][1])
            if size == 2:
                jobs += [("config", partial(by_rank, build, {"target": other}), dict(target=pairs["fp32"][0])),
                         ("norm", partial(by_rank, build, {"target": norm}), dict(target=pairs["fp32"][0])),
                         ("latents", spmd.drift, fp32 | {"fault": other_latents}), ("ids", spmd.drift, fp32 | {"fault": other_ids}),
                         ("astray", spmd.astray, fp32)]
            known[size, rest] = spmd.run(size, root, jobs)
        return known[size, rest]
    return of


@pytest.fixture(scope="module")
def alone(pairs):
    """alone(pair, shape) -> what one rank says, and an engine to score with."""
    known, engines = {}, {}

    def of(pair, shape):
        key = pair, json.dumps(shape)
        if pair not in engines:
            engines[pair] = Engine(pairs[pair][0], "none")
        if key not in known:
            known[key] = spmd.told(*pairs[pair], **shape)
        return known[key], engines[pair]
    yield of
    for engine in engines.values():
        engine.close()


def compare(one, first, others, engine, timed=False):
    """One rank's answers with those of several ranks, which are the same bits on each. engine: of the target, to score with. timed: how much
    is drafted depends on the clock, and is rank 0's to say."""
    for other in others:
        assert [vars(out) for out in other["free"] + other["held"]] == [vars(out) for out in first["free"] + first["held"]]
        for what in ("hidden", "logits", "states"):
            assert torch.equal(other[what], first[what]), what
    for what in ("logits", "states"):
        torch.testing.assert_close(first[what], one[what], rtol=1e-4, atol=1e-3)
    for mine, theirs, params in zip(one["free"] + one["held"], first["free"] + first["held"], spmd.FREE + spmd.HELD):
        if oracle.assert_same(mine, theirs, engine, params):
            assert timed or mine.accepted == theirs.accepted


@pytest.mark.parametrize("name, size", [pytest.param(name, size, marks=[] if (size, name) in CHOSEN else pytest.mark.slow)
                                        for name in RUNS for size in (2, 4) if (name, size) != ("default", 4)])
def test_ranks_say_what_one_says(name, size, ranks, alone):
    pair, shape, _ = RUNS[name]
    (one, engine), (first, *others) = alone(pair, shape), ranks(size, (size, name) not in CHOSEN)[name]
    compare(one, first, others, engine, shape.get("nodes") == "auto")
    if shape.get("draft_steps", 6):
        oracle.assert_mixed(first["free"], min(most for most in (shape.get("draft_steps", 6), shape.get("nodes", 6)) if most != "auto"))


@pytest.mark.parametrize("size", [2, 4])
def test_the_winner_in_each_shard(size, ranks):
    """10 ids over 4 ranks are 3, 3, 3 and 1: the last one's neighbours are padding."""
    for rank in ranks(size)["heads"]:
        for (winner, *found), (_, *expected) in rank:
            assert found[0][0, 0] == winner and found[3].shape == (2, 1, 4)
            for mine, theirs in zip(found, expected):
                assert (mine is None) == (theirs is None)
                if mine is not None and mine.is_floating_point():
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
                elif mine is not None:
                    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("job, says", [("config", "before loading: target config of rank 1"), ("norm", "after loading: layers.0."),
                                       ("latents", "round 6: latents of rank 1"), ("ids", "round 6: what was decided of rank 1")])
def test_ranks_that_differ_are_named(job, says, ranks):
    assert all(says in line and "rank 1" in line for line in ranks(2)[job]), ranks(2)[job]


def test_two_all_reduces_a_layer(pairs):
    """After attention and after the MLP, whatever that is; the embedding's own sum is left out where one rank has it all."""
    class Counted(Ranks):
        sums = 0

        def sum(self, x):
            Counted.sums += 1
            return x
    for pair in ("fp32", "v2"):
        with Engine(pairs[pair][0], "none") as engine:
            engine.target.ranks, Counted.sums = Counted(), 0
            engine.score([3, 1, 4])
            assert Counted.sums == 2 * engine.target_config.num_hidden_layers


def test_one_decision(ranks, alone):
    first, second = ranks(2)["astray"]
    assert first == second == alone("fp32", CHAIN)[0]["free"][0].ids


def test_what_ranks_agree_on_may_have_any_strides(ranks):
    for rank in ranks(2)["agree"]:
        assert all(map(torch.equal, rank, spmd.agreed(Ranks())))


@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_a_rank(size, ranks):
    """While it loads a rank takes its own share of memory, not the model's."""
    whole = sum(parameters for parameters, _ in ranks(size)["memory"])
    for parameters, growth in ranks(size)["memory"]:
        assert parameters < 1.2 * whole / size
        assert 0.7 * parameters < growth < parameters + whole / 8, f"{growth / 1e6:.0f} MB for {parameters / 1e6:.0f} MB of {whole / 1e6:.0f}"


FORMATS = {"fp32": {}, "int4": dict(storage="int4", moe_intermediate_size=128), "fp8": dict(storage="fp8", moe_intermediate_size=512),
           "odd fp8": dict(storage="fp8", moe_intermediate_size=512, intermediate_size=600, hidden_size=200, qk_nope_head_dim=40, v_head_dim=36),
           "v2": dict(storage="bf16", v2=True, q_lora_rank=None)}


def held(path, ranks, pack=False):
    """(parameters of one rank, bytes read from the files for them)."""
    config = TargetConfig.read(path)
    plan = shard(open_target(path, config), config, ranks)
    plan = keep_packed(plan) if pack else plan
    parameters = allocate(plan.shapes, torch.float32, torch.device("cpu"), plan.dtypes)
    fill(plan, parameters)
    return parameters, plan.checkpoint.bytes_read


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_slices_tile_the_model(name, size, latent, checkpoints):
    """What ranks hold, put together by the definition of each split, is what one rank holds; what they read is what the files hold."""
    path = checkpoints.target(num_hidden_layers=3, vocab_size=510, shards=2, **FORMATS[name])
    whole, read = held(path, Ranks())
    parts, counts = zip(*(held(path, Ranks(rank, size, shard_latent=latent)) for rank in range(size)))
    config = TargetConfig.read(path)
    key = config.kv_lora_rank + config.qk_rope_head_dim
    for param, full in whole.items():
        kind, pieces = param.rpartition(".")[2], [part[param] for part in parts]
        if kind in ("o", "down", "w2"):
            found = torch.cat(pieces, -1)
        elif kind in ("gate_up", "w13"):
            found = torch.cat([half for j in (0, 1) for half in (piece.chunk(2, -2)[j] for piece in pieces)], -2)
        elif kind == "qkv_a" and not config.q_lora_rank:
            queries, rest = (len(full) - key) // size, [piece[(len(full) - key) // size:] for piece in pieces]
            found = torch.cat([piece[:queries] for piece in pieces] + (rest if latent else rest[:1]))
        elif kind in ("q_b", "kv_b", "embed", "head") or kind == "qkv_a" and latent:
            found = torch.cat(pieces)
        else:
            found = pieces[0]
            assert all(torch.equal(piece, found) for piece in pieces)
        assert torch.equal(found, full), param
    config = TargetConfig.read(path)
    replicated = shard(open_target(path, config), config, Ranks(0, size, shard_latent=latent)).replicated
    alike = sum(whole[param].nbytes for param in replicated)
    if not config.q_lora_rank and not latent:           # kv_a beside queries that are split
        alike += config.num_hidden_layers * key * config.hidden_size * 4
    alike *= 1 if name == "fp32" else 0.5
    if name in ("fp32", "v2"):          # stored plain: shares are exact but for what all hold, the router's bias in fp32
        assert sum(counts) == pytest.approx(read + (size - 1) * alike, rel=1e-3)
    assert max(counts) < read / size + alike * 1.05 + read * 0.02


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_slices_of_packed_experts(name, experts, checkpoints):
    """As CUDA keeps them: 4 ranks' packed experts mean the same numbers as the whole."""
    path = checkpoints.target(num_hidden_layers=2, n_routed_experts=6, **FORMATS[name])
    whole = held(path, Ranks(), True)[0]
    parts = [held(path, Ranks(rank, 4, expert_parallel=experts), True)[0] for rank in range(4)]

    def values(parameters, param):
        w13 = param.endswith("w13")
        inputs = 64 if w13 else parameters["layers.1.w13"].shape[-2] // 2
        return dequantize((parameters[param], parameters[param + "_scale"]), torch.float32, inputs, 2 if w13 else 1)
    for param in ("layers.1.w13", "layers.1.w2"):
        pieces = [values(part, param) for part in parts]
        found = (torch.cat(pieces) if experts else torch.cat(pieces, -1) if param.endswith("w2") else
                 torch.cat([piece.chunk(2, 1)[j] for j in (0, 1) for piece in pieces], 1))
        assert torch.equal(found, values(whole, param)) and found.any()
        assert [len(piece) for piece in pieces] == ([1, 2, 1, 2] if experts else [6] * 4)


def refusal(target, draft, size, **options):
    config = TargetConfig.read(target)
    with pytest.raises(MinispecError) as error:
        shard_pair(open_target(target, config), config, draft and open_draft(draft, config), Ranks(0, size, **options))
    return str(error.value)


def test_splits_that_are_impossible(checkpoints):
    said = refusal(DEFAULT_TARGET, DEFAULT_DRAFT, 4)
    assert said == ("tensor_parallel=4: num_attention_heads 6 and moe_intermediate_size 192 (6 groups of 32) and the draft's num_attention_heads 6 "
                    "cannot be split over 4 ranks; 1, 2 work")
    assert "groups" not in refusal(DEFAULT_TARGET, None, 4, expert_parallel=True)
    said = refusal(checkpoints.target(storage="fp8", moe_intermediate_size=256, num_hidden_layers=2), None, 4)
    assert "moe_intermediate_size 256 (2 groups of 128)" in said and "1, 2 work" in said
    said = refusal(checkpoints.target(n_routed_experts=2, num_experts_per_tok=1, n_group=1, num_hidden_layers=2), None, 4, expert_parallel=True)
    assert "n_routed_experts 2" in said and "1, 2 work" in said
    said = refusal(checkpoints.target(moe_intermediate_size=34, num_hidden_layers=2), None, 4, expert_parallel=True)
    assert "moe_intermediate_size 34" in said and "1, 2" in said, "of the shared expert: a dense layer before it has the same names"
    target = checkpoints.target(num_hidden_layers=4)
    said = refusal(target, checkpoints.draft(target, capture=[1, 2, 3], num_attention_heads=6, num_key_value_heads=3), 2)
    assert "the draft's num_attention_heads" not in said and "the draft's num_key_value_heads 3" in said and "; 1 works" in said


def test_options_without_ranks():
    for option in ("expert_parallel", "shard_latent"):
        with pytest.raises(MinispecError, match=f"{option}=True says how ranks share the model"):
            Engine(**{option: True})


def drawn(seed, folder):
    """A random pair that 4 ranks divide, with the options of its run and of its ranks."""
    random = Random(seed)
    pick, storage = random.choice, random.choice(["fp32", "bf16", "int4", "fp8"])
    inner = {"int4": 128, "fp8": 512}.get(storage, pick([32, 100]))
    config = dict(storage=storage, vocab_size=pick([511, 512, 597]), num_attention_heads=pick([4, 8]), q_lora_rank=pick([None, 24, 37]),
                  qk_nope_head_dim=pick([16, 24]), v_head_dim=pick([8, 16]), kv_lora_rank=pick([16, 33]), intermediate_size=pick([160, 64]),
                  moe_intermediate_size=inner, n_routed_experts=pick([6, 8]), n_shared_experts=pick([0, 1, 2]), num_experts_per_tok=pick([1, 2, 3]),
                  n_group=1, first_k_dense_replace=pick([0, 1, 2]), v2=pick([True, False]), tie_word_embeddings=pick([True, False]))
    target = tiny.write_target(folder / f"target{seed}", seed=seed, num_hidden_layers=4, shards=pick([1, 3]), **config)
    mla, whole = pick([True, False]), pick([True, False])
    heads = {} if mla else dict(num_key_value_heads=pick([1, 2, 4]), qk_norm=pick([True, False]))
    options = dict(attention="mla" if mla else "llama", vocab=None if whole else pick([301, 384]), own_head=not whole or pick([True, False]),
                   own_embed=pick([True, False]), dialect="torchspec" if mla else "specforge", intermediate_size=pick([96, 64]), **heads)
    draft = tiny_draft.write_draft(folder / f"draft{seed}", target, capture=[1, 2, 3], **options)
    tiny_draft.fit(draft, target, steps=40, batch=12, pool=192)
    shape = pick([CHAIN, TREE, dict(draft_steps=2, topk=2, nodes=3)])
    return target, draft, shape, dict(expert_parallel=pick([True, False]), shard_latent=pick([True, False]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_random_pairs(size, tmp_path):
    made, mixed = {f"pair {seed}": drawn(seed, tmp_path) for seed in range(size * 100, size * 100 + 8)}, []
    found = spmd.run(size, tmp_path, [(name, spmd.told, dict(target=target, draft=draft, **shape, **options))
                                      for name, (target, draft, shape, options) in made.items()])
    for name, (target, draft, shape, _) in made.items():
        one, (first, *others) = spmd.told(target, draft, **shape), found[name]
        with Engine(target, "none") as engine:
            compare(one, first, others, engine)
        mixed += first["free"]
    oracle.assert_mixed(mixed, 2)

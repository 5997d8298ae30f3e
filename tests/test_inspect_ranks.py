"""What inspect predicts for ranks, against figures worked out by hand from published shapes, and against engines that run."""
import json

import pytest
import torch

from minispec import Engine
from minispec.config import TargetConfig
from minispec.inspection import describe, describe_ranks, render
from minispec.ranks import Ranks
from minispec.weights.checkpoint import Checkpoint, Info
from minispec.weights.load import open_target

from . import tiny
from .test_cli import run  # noqa: F401

KIMI = dict(
    model_type="kimi_k25", text_config=dict(
        model_type="kimi_k2", vocab_size=163840, hidden_size=7168, num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432,
        moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.827, scoring_func="sigmoid", topk_method="noaux_tc", first_k_dense_replace=1, moe_layer_freq=1, rms_norm_eps=1e-5,
        rope_theta=50000.0, rope_scaling=None, max_position_embeddings=262144, hidden_act="silu", attention_bias=False,
        tie_word_embeddings=False, bos_token_id=163584, eos_token_id=163585, quantization_config=tiny.INT4))
AT = "language_model.model."


def headers(c):
    """The tensors of Kimi-K2.5's checkpoint, from its config: name -> Info."""
    h, heads, found = c["hidden_size"], c["num_attention_heads"], {}

    def add(name, *shape, dtype="BF16"):
        found[name] = Info("model.safetensors", dtype, shape)
    add(AT + "embed_tokens.weight", c["vocab_size"], h)
    add("language_model.lm_head.weight", c["vocab_size"], h)
    add(AT + "norm.weight", h)
    for i in range(c["num_hidden_layers"]):
        at = f"{AT}layers.{i}."
        for name, *shape in (
                ("input_layernorm", h), ("post_attention_layernorm", h), ("self_attn.q_a_proj", 1536, h), ("self_attn.q_a_layernorm", 1536),
                ("self_attn.q_b_proj", heads * 192, 1536), ("self_attn.kv_a_proj_with_mqa", 576, h), ("self_attn.kv_a_layernorm", 512),
                ("self_attn.kv_b_proj", heads * 256, 512), ("self_attn.o_proj", h, heads * 128)):
            add(f"{at}{name}.weight", *shape)
        inner = 18432 if i == 0 else 2048
        for part in ("gate", "up", "down"):
            shape = (h, inner) if part == "down" else (inner, h)
            add(f"{at}mlp.{'shared_experts.' if i else ''}{part}_proj.weight", *shape)
            for e in range(c["n_routed_experts"] if i else 0):
                name = f"{at}mlp.experts.{e}.{part}_proj.weight"
                add(name + "_packed", shape[0], shape[1] // 8, dtype="I32")
                add(name + "_scale", shape[0], shape[1] // 32)
        if i:
            add(at + "mlp.gate.weight", c["n_routed_experts"], h)
            add(at + "mlp.gate.e_score_correction_bias", c["n_routed_experts"], dtype="F32")
    return found


def test_kimi(tmp_path, monkeypatch):
    """On 4 devices of 141 GB it does not fit, on 8 it does: 76.2 GB a rank and 70,272 bytes of KV a token; bytes a round by hand."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    tensors = headers(KIMI["text_config"])
    monkeypatch.setattr(Checkpoint, "open", classmethod(lambda cls, folder, **_: cls(folder, dict(tensors))))
    config = TargetConfig.read(str(tmp_path))
    plan = open_target(str(tmp_path), config)
    four, eight, whole = (describe_ranks(plan, config, None, [Ranks(rank, n, expert_parallel=experts) for rank in range(n)], 141 * 10**9)
                          for n, experts in ((4, False), (8, False), (8, True)))
    assert four["fits"].startswith("no: 150.19 GB") and four["context"] == 0
    assert eight["fits"].startswith("yes: 76.18 GB")
    assert {round(count / 1e9, 1) for count in eight["weights_bytes"].values()} == {76.2}
    assert {round(count / 1e9, 1) for count in whole["weights_bytes"].values()} == {76.2}
    assert eight["kv_bytes_per_token"] == {"target": 70272} and eight["context"] == 262144
    rounds = {rows: round(count / 1e9, 2) for rows, count in eight["target_bytes_a_round_by_rows"].items()}
    assert [rounds[rows] for rows in ("1", "2", "4", "7", "16")] == pytest.approx([6.03, 7.48, 10.30, 14.32, 24.95], abs=0.011) and len(rounds) == 16


def test_the_prediction_is_what_a_rank_holds(checkpoints):
    """On one device in bfloat16, where nothing is packed: parameters to the byte but for the router, which is fp32."""
    target = checkpoints.target(storage="bf16", n_routed_experts=8)
    draft = checkpoints.draft(target, vocab=384)
    found = describe(str(draft), target=str(target), memory=10**9)["ranks"]
    with Engine(target, draft, dtype="bfloat16", max_length=64) as engine:
        held = {name: x for model in (engine.target, engine.draft) for name, x in model.parameters.items()}
        assert found["weights_bytes"] == {"rank 0": sum(x.numel() * 2 for model in (engine.target, engine.draft) for x in model.parameters.values())}
        cache = engine.runner.speculator
        token = cache.target_cache.data[:, 0].nbytes + cache.draft_cache[0].nbytes
        assert sum(found["kv_bytes_per_token"].values()) == token and held
        assert found["draft_bytes_a_level"] == sum(x.nbytes for name, x in engine.draft.parameters.items() if name != "embed")
        assert engine.dtype == torch.bfloat16


def test_it_is_printed(run):  # noqa: F811
    done = run("inspect", "--tensor-parallel", 2, "--memory", "100MB", "--json")
    ranks = json.loads(done.out)["ranks"]
    assert done.status == 0 and ranks["fits"].startswith("yes") and list(ranks["weights_bytes"]) == ["rank 0", "rank 1"]
    assert "weights: rank 0 21.7 MB, rank 1 21.7 MB" in render({"ranks": ranks})
    done = run("inspect", "--tensor-parallel", 2, "--memory", "20MB")
    assert done.status == 0 and "fits: no: 21.7 MB of weights a rank" in done.out
    assert "fits: no" in run("inspect", "--memory", "0").out


@pytest.mark.parametrize("arguments, says", [
    (("--tensor-parallel", 4), "1, 2 work"), (("--tensor-parallel", 0), "1 to 1024"), (("--expert-parallel",), "give --tensor-parallel"),
    (("--memory", "many"), "not a size"), (("--memory", "1..5GB"), "not a size")])
def test_what_is_refused(arguments, says, run):  # noqa: F811
    done = run("inspect", *arguments)
    assert done.status == 2 and says in done.err.splitlines()[-1] and done.out == ""

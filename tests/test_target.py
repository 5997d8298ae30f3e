"""Logits and captured states against transformers, over a table of random small targets."""
import pytest
import torch

from minispec import Engine

from . import naive, oracle, tiny
from .conftest import assert_close

YARN_BARE = dict(type="yarn", factor=2.0, original_max_position_embeddings=16)
SMALL = dict(num_hidden_layers=4, n_routed_experts=4)
TABLE = {
    "k1": {},
    "plain_q": dict(q_lora_rank=None),
    "one_group": dict(n_group=1, **SMALL),
    "three_groups": dict(n_routed_experts=12, n_group=3, topk_group=2, num_experts_per_tok=3, num_hidden_layers=4),
    "yarn": dict(rope_scaling=tiny.YARN, **SMALL),
    "yarn_step": dict(rope_scaling={**tiny.YARN, "beta_fast": 1, "factor": 32.0}, rope_theta=50000.0, **SMALL),
    "yarn_mscale": dict(rope_scaling={**tiny.YARN, "mscale": 0.707, "mscale_all_dim": 0.5}, **SMALL),
    "yarn_bare": dict(rope_scaling=YARN_BARE, **SMALL),
    "rope_parameters": dict(rope_parameters={**YARN_BARE, "rope_type": "yarn", "rope_theta": 5000.0}, rope_theta=None, **SMALL),
    "dense_first": dict(first_k_dense_replace=3, **SMALL),
    "all_dense": dict(first_k_dense_replace=4, num_hidden_layers=4),
    "no_dense": dict(first_k_dense_replace=0, **SMALL),
    "two_shared": dict(n_shared_experts=2, **SMALL),
    "not_normalised": dict(norm_topk_prob=False, routed_scaling_factor=2.5, **SMALL),
    "odd_widths": dict(num_attention_heads=3, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=7, kv_lora_rank=5,
                       hidden_size=36, **SMALL),
    "eps": dict(rms_norm_eps=1e-3, **SMALL),
    "tied": dict(tie_word_embeddings=True, **SMALL),
    "v2_greedy": dict(v2=True, q_lora_rank=None, **SMALL),
    "v2_limited": dict(v2=True, topk_method="group_limited_greedy", n_group=2, topk_group=1, routed_scaling_factor=4.0, **SMALL),
    "v2_yarn": dict(v2=True, rope_scaling={**tiny.YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, **SMALL),
    "bf16": dict(storage="bf16", shards=3, **SMALL),
    "fp16": dict(storage="fp16", **SMALL),
    "fp8": dict(storage="fp8", shards=2, hidden_size=160, **SMALL),
    "int4": dict(storage="int4", shards=3, **SMALL),
    "kimi_k25": dict(storage="int4", wrapper=True, shards=2, n_group=1, rope_scaling={**tiny.YARN, "factor": 64.0},
                     rms_norm_eps=1e-5, routed_scaling_factor=2.827, **SMALL),
    "mtp": dict(mtp=True, storage="fp8", **SMALL),
}


@pytest.mark.parametrize("name", TABLE)
def test_logits_and_states_equal_transformers(name, tmp_path):
    options = TABLE[name]
    directory = tiny.write_target(tmp_path / "target", seed=len(name), **options)
    n = options.get("num_hidden_layers", 8)
    ids = torch.randint(512, (70,)).tolist()        # past YaRN's original 16
    with Engine(directory, "none", capture=tuple(range(n + 1)), chunk=32) as engine:
        scored = engine.score(ids)
    assert scored.logits.shape == (70, 512) and scored.logits.dtype == torch.float32
    truth, states = naive.Target(directory).forward(ids)
    assert_close("logits against the definition", truth, scored.logits, 1e-5)
    assert_close("states against the definition", torch.cat(states, -1), scored.states, 1e-5)
    model = oracle.transformers_model(directory, tmp_path / "hf")
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    assert (out.logits[0] - scored.logits).abs().max() < 1e-4
    hidden = torch.cat(out.hidden_states[:-1], -1)[0]       # transformers norms the last one
    assert (hidden - scored.states[:, :hidden.shape[1]]).abs().max() < 1e-4


def test_moe_layer_freq(tmp_path):
    """transformers knows no moe_layer_freq, so the definition is the only oracle."""
    directory = tiny.write_target(tmp_path, moe_layer_freq=2, **SMALL)
    ids = list(range(3, 40))
    with Engine(directory, "none") as engine:
        assert_close("logits", naive.Target(directory).forward(ids)[0], engine.score(ids).logits, 1e-5)


def test_latent_eps_is_a_switch(tmp_path, monkeypatch):
    directory = tiny.write_target(tmp_path, rms_norm_eps=1e-2, **SMALL)
    ids = list(range(3, 40))
    scores = {}
    for value in (1e-6, "config"):
        with Engine(directory, "none", latent_norm_eps=value) as engine:
            scores[value] = engine.score(ids).logits
    assert_close("as transformers", naive.Target(directory).forward(ids)[0], scores[1e-6], 1e-5)
    monkeypatch.setattr(naive, "LATENT_EPS", 1e-2)
    assert_close("as the servers", naive.Target(directory).forward(ids)[0], scores["config"], 1e-5)
    assert not torch.allclose(scores[1e-6], scores["config"], atol=1e-3)


def test_verify_routes_like_single_tokens(tmp_path):
    """B55: the experts of four tokens in one forward are those of four forwards."""
    directory = tiny.write_target(tmp_path)
    ids = torch.randint(512, (24,)).tolist()
    with Engine(directory, "none", chunk=64) as whole, Engine(directory, "none", chunk=1) as single:
        assert_close("chunks of one", whole.score(ids).logits, single.score(ids).logits, 1e-5)

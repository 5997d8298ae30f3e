"""Faults that other engines shipped in loading, by their number in the list of public reports (B..).

Each mutant of a good pair is refused with a line that names the cause, or gives equal results.
"""
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from minispec import Engine, MinispecError, SamplingParams
from minispec.device import plan

from . import naive, oracle, spy, tiny, tiny_draft
from .mutants import PROMPT, add, drop, first_logits, greedy, mutate, refused
from .tiny_draft import DIALECTS


@pytest.fixture
def whole(target, checkpoints):
    """A draft with the full vocabulary, an embedding and a head of its own."""
    return checkpoints.draft(target, dialect="speculators", own_embed=True)


def test_b01_missing_head(target, draft, whole, tmp_path):
    refused(target, mutate(draft, tmp_path / "reduced", drop("lm_head")), "lm_head", 512, 384)
    borrowed = mutate(whole, tmp_path / "full", drop("lm_head"))
    head = naive.Target(target, torch.float32).head
    explicit = mutate(whole, tmp_path / "explicit", lambda w: w.update({"lm_head.weight": head}))
    (a, out_a, report), (b, out_b, _) = first_logits(target, borrowed), first_logits(target, explicit)
    assert torch.equal(a[0], b[0]) and out_a.accepted == out_b.accepted
    assert re.search("head.*borrowed", report)


def test_b01_no_parameter_stays_unfilled(target, draft, whole):
    for one in (draft, whole):
        with Engine(target, one) as engine:
            for parameters in (engine.target.parameters, engine.draft.parameters):
                assert all(value.isfinite().all() for value in parameters.values())


def test_b02_own_embedding_and_head_are_kept(target, whole, draft):
    w = load_file(whole / "model.safetensors")
    with Engine(target, whole) as engine:
        assert torch.equal(engine.draft.p.embed, w["embed_tokens.weight"])
        assert torch.equal(engine.draft.p.head, w["lm_head.weight"])
        assert not torch.equal(engine.draft.p.embed, engine.target.embed)
        report = "\n".join(engine.report)
        assert "embed: own" in report and "head: own" in report
    with Engine(target, draft) as engine:
        assert engine.draft.p.embed is engine.target.embed
        assert re.search("embed: borrowed", "\n".join(engine.report))


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_b03_the_same_network_under_other_names(kind, target, checkpoints, tmp_path):
    options = dict(llama=DIALECTS["safeailab"], mla=DIALECTS["nvidia"])[kind]
    source = checkpoints.fitted(target, **options)
    weights, logits = tiny_draft.bare_tensors(source), []
    for prefix, outer in product(("midlayer.", "layers.0."), ("", "model.")):
        copy = tiny_draft.write_draft(tmp_path / (prefix + outer), target, prefix=prefix, outer=outer, weights=weights, **options)
        steps, out, _ = first_logits(target, copy)
        logits.append(torch.cat(steps))
        oracle.assert_mixed(out, 4)
    assert all(torch.equal(one, logits[0]) for one in logits)


def test_b03_unknown_and_missing_names(target, draft, tmp_path):
    def rename(w):
        w["midlayer.self_attn.query.weight"] = w.pop("midlayer.self_attn.q_proj.weight")
    refused(target, mutate(draft, tmp_path / "a", rename), "q_proj")
    refused(target, mutate(draft, tmp_path / "b", add("midlayer.gizmo.weight", 3)), "midlayer.gizmo.weight")
    refused(target, mutate(draft, tmp_path / "c", drop("hidden_norm")), "hidden_norm")
    refused(target, mutate(draft, tmp_path / "d", add("norm.weight", 63)), "norm.weight", 63, 64)


def test_b04_other_width_needs_its_embedding(target, checkpoints, tmp_path):
    narrow = checkpoints.draft(target, dialect="specforge", hidden_size=48, head_dim=16)
    with Engine(target, narrow) as engine:
        assert engine.draft.p.embed.shape == (512, 48)
    refused(target, mutate(narrow, tmp_path / "x", drop("embed_tokens")), "embed_tokens", 48, 64)


def test_b05_wrapper_with_decoys(target, draft, tmp_path):
    """The outer config's vocab_size and hidden_size are not the text model's."""
    wrapped = tiny.write_target(tmp_path / "wrapped", wrapper=True)
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(wrapped, draft)
    assert all(map(torch.equal, a, b)) and out_a.ids == out_b.ids and out_a.accepted == out_b.accepted
    oracle.assert_mixed(out_a, 4)


def test_b06_each_module_its_own_quantisation(draft, target, tmp_path, checkpoints):
    quantised = checkpoints.target(storage="fp8")
    with Engine(quantised, draft, draft_steps=4, topk=1) as engine, Engine(quantised, "none") as off:
        out = engine.generate(PROMPT, greedy(24))
        oracle.assert_same(off.generate(PROMPT, greedy(24)), out, off, greedy(24))
        oracle.assert_mixed(out, 4)
    lost = mutate(quantised, tmp_path / "lost", drop("layers.3.self_attn.o_proj.weight_scale_inv"))
    refused(lost, draft, "layers.3.self_attn.o_proj.weight_scale_inv")
    refused(target, mutate(draft, tmp_path / "left", add("fc.weight_scale_inv", 1, 2)), "fc.weight_scale_inv")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    refused(mutate(target, tmp_path / "t", add(name, 2, 1)), draft, name)


def test_b07_weights_stay_as_loaded(target, draft):
    def marks(engine):
        return [value.double().sum().item() for model in (engine.target, engine.draft) for value in model.parameters.values()]
    with Engine(target, draft) as engine:
        before = marks(engine)
        engine.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
        Engine(target, "none").close()
        assert marks(engine) == before


def test_b09_flags_and_their_tensors(target, checkpoints, tmp_path):
    normed = checkpoints.draft(target, dialect="specforge", flags=("fc_norm", "norm_output"))
    refused(target, mutate(normed, tmp_path / "a", config=lambda c: c.pop("fc_norm")), "fc_norm")
    refused(target, mutate(normed, tmp_path / "b", drop("fc_norm.1")), "fc_norm.1")
    both = mutate(normed, tmp_path / "c", add("input_norm.weight", 192), lambda c: c.update(norm_before_fc=True))
    refused(target, both, "fc_norm", "norm_before_fc")
    plain = checkpoints.draft(target, dialect="specforge")
    refused(target, mutate(plain, tmp_path / "d", config=lambda c: c.update(norm_before_fc=True)), "norm_before_fc", "input_norm")
    refused(target, mutate(plain, tmp_path / "e", add("input_norm.weight", 192)), "norm_before_fc", "input_norm")


@pytest.mark.parametrize("ids", [[1, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_b10_more_ids_than_fc_takes(ids, target, checkpoints, tmp_path):
    draft = checkpoints.draft(target, dialect="specforge")
    more = mutate(draft, tmp_path / "x", config=lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=ids))
    refused(target, more, len(ids), 192)


def test_b12_sizes(target, draft):
    with Engine(target, draft, page_size=16) as engine:
        data = engine.runner.speculator.draft_cache
        heads, width = spy.kv_shape(engine)
        assert data.shape == (engine.pages.count * 16, heads, width)
        assert engine.draft.p.embed.shape[0] == 512 and engine.draft.p.head.shape[0] == 384


def test_memory_messages_state_the_headroom():
    """What is needed is more than what may be used, in the digits that are printed."""
    for free, weights, length, figures in ((170_000_000, 148_600_000, 900, ["156.0", "170.0", "153.0"]),
                                           (166_000_000, 148_600_000, None, ["149.6", "166.0", "149.4"])):
        with pytest.raises(MinispecError) as error:
            plan(free, weights, 8000, 1, length, 1024, 122 if length is None else 22)
        assert re.findall(r"([\d.]+) MB", str(error.value)) == figures and "90% of" in str(error.value)


@pytest.mark.parametrize("edit, words", [
    (lambda c: c.update(target_hidden_size=128), ("target_hidden_size", 128, 64)),
    (lambda c: c.update(vocab_size=500), ("vocab_size", 500, 512)),
    (lambda c: c.update(draft_vocab_size=600), ("draft_vocab_size", 600)),
    (lambda c: c.update(num_hidden_layers=2), ("num_hidden_layers", 2)),
    (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), ("use_aux_hidden_state",)),
    (lambda c: c.update(tie_word_embeddings=True), ("tie_word_embeddings",)),
    (lambda c: c.update(rope_scaling={"type": "longrope", "factor": 2.0}), ("rope", "longrope")),
    (lambda c: c.update(hidden_act="gelu"), ("hidden_act", "gelu")),
    (lambda c: c.update(attention_bias=True), ("attention_bias",)),
])
def test_pairs_that_do_not_fit(edit, words, target, draft, tmp_path):
    refused(target, mutate(draft, tmp_path / "x", config=edit), *words)


def test_b45_speculators_config_is_a_difference_to_class_defaults(target, checkpoints, tmp_path):
    """Fields left out of transformer_layer_config mean the default of its transformers class."""
    draft = checkpoints.draft(target, dialect="speculators", qk_norm=True, own_embed=True, head_dim=128, rms_norm_eps=1e-6)
    fields = ("head_dim", "rms_norm_eps", "rope_theta")
    shorter = mutate(draft, tmp_path / "x", config=lambda c: [c["transformer_layer_config"].pop(name) for name in fields])
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, shorter)
    assert all(map(torch.equal, a, b)) and out_a.accepted == out_b.accepted

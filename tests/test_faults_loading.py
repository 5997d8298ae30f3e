"""Faults that other engines shipped in loading, mapping and capture, by their number in the list of public reports (B..).

Each mutant of a good pair is refused with a line that names the cause, or gives equal results.
"""
import json
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec import Engine, MinispecError, SamplingParams

from . import naive, oracle, spy, tiny, tiny_draft
from .conftest import assert_close
from .tiny_draft import DIALECTS

PROMPT = [7, 301, 45, 12, 99]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def mutate(source, copy, tensors=None, config=None):
    """A copy of a one-file checkpoint with `tensors(dict)` and `config(dict)` applied, each editing in place."""
    copy.mkdir()
    w, c = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    if tensors:
        tensors(w)
    if config:
        config(c)
    save_file({k: v.contiguous() for k, v in w.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(c))
    return copy


def refused(target, draft, *words, **options):
    """Engine(target, draft) ends in one line that has every one of `words`."""
    with pytest.raises(MinispecError) as error:
        Engine(target, draft, **options)
    line = str(error.value)
    assert "\n" not in line, line
    missing = [word for word in words if str(word) not in line]
    assert not missing, f"{missing} not in: {line}"


def first_logits(target, draft, **options):
    """The draft's first proposal for a prompt, its outputs, and the load report."""
    with Engine(target, draft, draft_steps=4, topk=1, **options) as engine:
        with spy.draft_calls(engine) as calls:
            out = engine.generate(PROMPT, GREEDY)
        return [spy.head_logits(engine, call.normed) for call in calls if call.normed is not None], out, "\n".join(engine.report)


def drop(*names):
    def edit(w):
        for name in [k for k in w if any(part in k for part in names)]:
            del w[name]
    return edit


@pytest.fixture
def target(checkpoints):
    return checkpoints.target()


@pytest.fixture
def draft(target, checkpoints):
    return checkpoints.fitted(target, **DIALECTS["safeailab"])


@pytest.fixture
def whole(target, checkpoints):
    """A draft with the full vocabulary, an embedding and a head of its own."""
    return checkpoints.draft(target, dialect="speculators", own_embed=True)


def test_b01_missing_head(target, draft, whole, tmp_path):
    refused(target, mutate(draft, tmp_path / "reduced", drop("lm_head")), "lm_head", 512, 384)
    borrowed = mutate(whole, tmp_path / "full", drop("lm_head"))
    explicit = mutate(whole, tmp_path / "explicit", lambda w: w.update({"lm_head.weight": naive.Target(target, torch.float32).head}))
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
        assert torch.equal(engine.draft.p.embed, w["embed_tokens.weight"]) and torch.equal(engine.draft.p.head, w["lm_head.weight"])
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
    refused(target, mutate(draft, tmp_path / "b", lambda w: w.update({"midlayer.gizmo.weight": torch.ones(3)})), "midlayer.gizmo.weight")
    refused(target, mutate(draft, tmp_path / "c", drop("hidden_norm")), "hidden_norm")
    refused(target, mutate(draft, tmp_path / "d", lambda w: w.update({"norm.weight": torch.ones(63)})), "norm.weight", 63, 64)


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
        out = engine.generate(PROMPT, GREEDY)
        oracle.assert_same(off.generate(PROMPT, GREEDY), out, off, GREEDY)
        oracle.assert_mixed(out, 4)
    lost = mutate(quantised, tmp_path / "lost", drop("layers.3.self_attn.o_proj.weight_scale_inv"))
    refused(lost, draft, "layers.3.self_attn.o_proj.weight_scale_inv")
    refused(target, mutate(draft, tmp_path / "left", lambda w: w.update({"fc.weight_scale_inv": torch.ones(1, 2)})), "fc.weight_scale_inv")
    refused(mutate(target, tmp_path / "t", lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 1)})), draft,
            "up_proj.weight_scale_inv")


def test_b07_weights_stay_as_loaded(target, draft):
    def marks(engine):
        return {name: value.double().sum().item() for p in (engine.target.parameters, engine.draft.parameters) for name, value in p.items()}
    with Engine(target, draft) as engine:
        before = marks(engine)
        engine.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
        Engine(target, "none").close()
        assert marks(engine) == before


def test_b09_flags_and_their_tensors(target, checkpoints, tmp_path):
    normed = checkpoints.draft(target, dialect="specforge", flags=("fc_norm", "norm_output"))
    refused(target, mutate(normed, tmp_path / "a", config=lambda c: c.pop("fc_norm")), "fc_norm")
    refused(target, mutate(normed, tmp_path / "b", drop("fc_norm.1")), "fc_norm.1")
    refused(target, mutate(normed, tmp_path / "c", lambda w: w.update({"input_norm.weight": torch.ones(192)}),
                           lambda c: c.update(norm_before_fc=True)), "fc_norm", "norm_before_fc")
    plain = checkpoints.draft(target, dialect="specforge")
    refused(target, mutate(plain, tmp_path / "d", config=lambda c: c.update(norm_before_fc=True)), "norm_before_fc", "input_norm")
    refused(target, mutate(plain, tmp_path / "e", lambda w: w.update({"input_norm.weight": torch.ones(192)})), "norm_before_fc", "input_norm")


@pytest.mark.parametrize("ids", [[1, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_b10_more_ids_than_fc_takes(ids, target, checkpoints, tmp_path):
    draft = checkpoints.draft(target, dialect="specforge")
    refused(target, mutate(draft, tmp_path / "x", config=lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=ids)), len(ids), 192)


def test_b12_sizes(target, draft):
    with Engine(target, draft, page_size=16) as engine:
        data = engine.speculator.draft_cache
        heads, width = spy.kv_shape(engine)
        assert data.shape == (engine.pages.count * 16, heads, width)
        assert engine.draft.p.embed.shape[0] == 512 and engine.draft.p.head.shape[0] == 384


def test_b13_no_map(target, draft, tmp_path):
    only_t2d = mutate(draft, tmp_path / "a", lambda w: w.pop("d2t"))
    refused(target, only_t2d, "d2t", "from-t2d")
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, only_t2d, d2t="from-t2d")
    assert all(map(torch.equal, a, b)) and out_a.accepted == out_b.accepted
    oracle.assert_mixed(out_a, 4)
    refused(target, mutate(draft, tmp_path / "b", drop("d2t", "t2d")), "d2t")
    refused(target, mutate(draft, tmp_path / "c", lambda w: (w.pop("t2d"), w["d2t"].zero_())), "d2t")

    def prefix(w):
        w["d2t"].zero_()
        w["t2d"] = torch.arange(512) < 384
    with Engine(target, mutate(draft, tmp_path / "d", prefix)) as engine:
        assert re.search("(?i)warning.*first 384", "\n".join(engine.report))


def test_b14_offset_or_absolute(target, draft, tmp_path):
    absolute = mutate(draft, tmp_path / "a", lambda w: w["d2t"].add_(torch.arange(384)))
    refused(target, absolute, "d2t", "--d2t absolute")
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, absolute, d2t="absolute")
    assert all(map(torch.equal, a, b)) and out_a.accepted == out_b.accepted
    oracle.assert_mixed(out_a, 4)
    refused(target, draft, "d2t", d2t="absolute")
    refused(target, mutate(draft, tmp_path / "b", lambda w: w["d2t"].__setitem__(3, w["d2t"][4] + 1)), "d2t")
    refused(target, mutate(draft, tmp_path / "c", lambda w: w["d2t"].__setitem__(-1, 500)), "d2t")
    refused(target, mutate(draft, tmp_path / "d", lambda w: w.update(d2t=w["d2t"].half())), "d2t")
    refused(target, mutate(draft, tmp_path / "e", lambda w: w.update(d2t=w["d2t"][:-1])), "d2t", 383, 384)
    refused(target, mutate(draft, tmp_path / "f", lambda w: w.update(t2d=w["t2d"].roll(1))), "t2d")


def test_b15_order_of_the_map_is_free_but_belongs_to_the_head(target, draft, tmp_path):
    """Rows of head and map permuted together: the same drafts. The map alone permuted: far fewer accepted."""
    order = torch.randperm(384)

    def both(w):
        ids = (w["d2t"] + torch.arange(384))[order]
        w["d2t"], w["lm_head.weight"] = ids - torch.arange(384), w["lm_head.weight"][order]

    def map_alone(w):
        w["d2t"] = (w["d2t"] + torch.arange(384))[order] - torch.arange(384)
    _, right, _ = first_logits(target, draft)
    _, same, _ = first_logits(target, mutate(draft, tmp_path / "a", both))
    _, wrong, _ = first_logits(target, mutate(draft, tmp_path / "b", map_alone))
    assert same.ids == right.ids == wrong.ids and same.accepted == right.accepted
    assert sum(wrong.accepted) < sum(right.accepted) / 3


def tagged(tmp_path, **config):
    """Block l adds something to channel l of the residual stream and nowhere else."""
    def edit(w):
        w["model.embed_tokens.weight"][:, :8] = 0
        for name, value in w.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                keep = torch.arange(len(value)) == int(name.split(".")[2])
                w[name] = value * keep[:, None] * 3
    source = tiny.write_target(tmp_path / "plain", **config)
    return mutate(source, tmp_path / "tagged", edit)


@pytest.mark.parametrize("spelling", [dict(capture=(2, 4, 7)), dict(capture=(1, 3, 6), capture_convention="output")])
def test_b18_two_conventions_one_capture(spelling, tmp_path):
    target = tagged(tmp_path)
    draft = tiny_draft.write_draft(tmp_path / "draft", target)
    with Engine(target, draft, **spelling) as engine:
        assert engine.draft_config.capture == (2, 4, 7)
        states = engine.score(PROMPT).states.unflatten(-1, (3, 64))
        for part, layer in zip(states.unbind(1), (2, 4, 7)):
            assert [channel for channel in range(8) if part[:, channel].abs().max() > 0] == list(range(layer))


def test_b18_every_dialects_spelling(target, checkpoints):
    """The same three streams in the spelling of every dialect, also where the first output id is not 1."""
    for dialect, capture in product(tiny_draft.PREFIX, ((2, 4, 5), (3, 4, 8), (1, 2, 3))):
        with Engine(target, checkpoints.draft(target, dialect=dialect, capture=capture)) as engine:
            assert engine.draft_config.capture == capture, dialect
            assert "capture" in engine.draft_config.capture_reason and engine.draft_config.capture_reason in "\n".join(engine.report)


@pytest.mark.parametrize("shift", [-1, 1])
def test_b18_off_by_one_is_another_draft(shift, target, draft):
    """Neighbouring streams are alike, so acceptance alone would not show it: the proposals differ, and are those of the definition."""
    wrong = [i + shift for i in (2, 4, 5)]
    (a, _, _), (b, _, report) = first_logits(target, draft), first_logits(target, draft, capture=wrong)
    assert (a[0] - b[0]).abs().max() > 1e-2 and str(wrong) in report
    assert_close("first proposal", first_by_definition(target, draft, capture=wrong), b[0], 1e-5)


def first_by_definition(target, draft, **options):
    model = naive.Target(target)
    definition = naive.Draft(draft, model, **options)
    logits, states = model.forward(PROMPT)
    rows, n = torch.tensor([*PROMPT[1:], logits[-1].argmax().item()]), len(PROMPT)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    return definition.forward(rows, definition.fuse(definition.aux(states)), torch.arange(n), mask)[0][-1:]


def test_b19_ids_of_the_draft_are_honoured(target, checkpoints, tmp_path):
    draft = checkpoints.draft(target, dialect="speculators", capture=(1, 5, 6))
    with Engine(target, draft) as engine:
        assert engine.draft_config.capture == (1, 5, 6)
    with Engine(target, mutate(draft, tmp_path / "x", config=lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))) as engine:
        assert engine.draft_config.capture == (2, 4, 5)
        assert re.search(r"(?i)warning.*\[2, 4, 5\]", "\n".join(engine.report))


@pytest.mark.parametrize("layers", [4, 5])
def test_b22_default_ids_collide_in_a_shallow_target(layers, tmp_path):
    target = tiny.write_target(tmp_path / "t", num_hidden_layers=layers)
    draft = tiny_draft.write_draft(tmp_path / "d", target, "safeailab", capture=(1, 2, 3))
    refused(target, mutate(draft, tmp_path / "x", config=lambda c: c.pop("eagle_config")), "collide")
    Engine(target, draft).close()


@pytest.mark.parametrize("capture, word", [((4, 2, 5), "ascending"), ((2, 2, 5), "collide"), ((2, 4, 9), "0..8"), ((2, 4), "192")])
def test_capture_that_does_not_fit(capture, word, target, draft):
    refused(target, draft, word, capture=capture)


def test_b26_order_of_the_halves(target, draft, tmp_path):
    """Embedding first, hidden second, for each of q, k, v; and fc takes its chunks low to high."""
    def swap(w):
        for name in list(w):
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                w[name] = w[name].roll(64, 1)
    for name, edit in (("halves", swap), ("chunks", lambda w: w.update({"fc.weight": w["fc.weight"].roll(64, 1)}))):
        mutant = mutate(draft, tmp_path / name, edit)
        (a, _, _), (b, _, _) = first_logits(target, draft), first_logits(target, mutant)
        assert (a[0] - b[0]).abs().max() > 1e-2
        assert_close("the mutant, by the definition", first_by_definition(target, mutant), b[0], 1e-5)


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
    shorter = mutate(draft, tmp_path / "x", config=lambda c: [c["transformer_layer_config"].pop(k) for k in ("head_dim", "rms_norm_eps", "rope_theta")])
    (a, out_a, _), (b, out_b, _) = first_logits(target, draft), first_logits(target, shorter)
    assert all(map(torch.equal, a, b)) and out_a.accepted == out_b.accepted

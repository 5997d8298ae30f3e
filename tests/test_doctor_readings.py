"""Single faults that every loader accepts: the reading that beats the declared one names them. On the default pair, or a fitted small one."""
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm
from safetensors.torch import load_file, save_file

from minispec import doctor, doctor_rounds
from minispec.config import TargetConfig
from minispec.doctor import examine, hear, own_subject
from minispec.doctor_probe import Reading, Text
from minispec.doctor_scan import Score
from minispec.doctor_states import compare, read_states, statistics
from minispec.errors import MinispecError
from minispec.weights.draft import open_draft

from . import naive, tiny, tiny_draft
from .conftest import DEFAULT_DRAFT, DEFAULT_TARGET, assert_close
from .doctor_kit import few, kept, listen, shared, whole  # noqa: F401
from .mutants import mutate


def names_of(heard, draft, **dialect):
    diagnosis = examine(heard, str(draft), dialect, engine=False)
    return {finding.name: finding for finding in diagnosis.findings if finding.severity != "note"}, diagnosis


def layers(*ids):
    return lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=list(ids))


def halves(w):
    for name in list(w):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            w[name] = w[name].roll(384, 1)


def map_alone(w):
    order = torch.randperm(3072, generator=torch.Generator().manual_seed(0))
    ids = w["d2t"] + torch.arange(3072)
    w["d2t"] = ids[order] - torch.arange(3072)


def stale_head(w):
    w["lm_head.weight"] = torch.randn(3072, 384, generator=torch.Generator().manual_seed(0)).mul(0.05).to(w["lm_head.weight"].dtype)


def stale_embedding(w):
    w["embed_tokens.weight"] = torch.randn(4096, 384, generator=torch.Generator().manual_seed(0)).mul(0.05).to(w["lm_head.weight"].dtype)


# hazard -> edit of the default draft's tensors, of its config, the finding, a word of its cure
MUTANTS = {
    "2 map in another order than the head": (map_alone, None, "d2t-order", "d2t"),
    "7 an embedding that is not the one of training": (stale_embedding, None, "embedding-stale", "embed_tokens"),
    "7 a head that is not the one of training": (stale_head, None, "head-stale", "lm_head"),
    "10 norm_before_residual": (None, lambda c: c.update(norm_before_residual=True), "norm-before-residual", "--no-norm-before-residual"),
    "14 hidden before embedding": (halves, None, "halves-swapped", "q_proj"),
    "15 parts of fc in another order": (lambda w: w.update({"fc.weight": w["fc.weight"].roll(384, 1)}), None, "capture-parts", "7,2,4"),
    "16 one layer early": (None, layers(1, 3, 6), "capture-layer", "--capture 2,4,7"),
    "16 one layer late": (None, layers(3, 5, 8), "capture-layer", "--capture 2,4,7"),
    "17 the default in place of the list": (None, lambda c: c.pop("eagle_config"), "capture-layer", "--capture 2,4,7"),
    "38 theta": (None, lambda c: c.update(rope_theta=100.0), "rope-theta", "rope theta"),
    "41 a scaling that training did not have": (None, lambda c: c.update(rope_scaling=dict(type="yarn", factor=32.0,
                                                original_max_position_embeddings=16)), "rope-scaling", "theta 10000"),
    "43 twice the heads, half as wide": (None, lambda c: c.update(num_attention_heads=12, num_key_value_heads=4, head_dim=32), "head-split", "head_dim by 2"),
}


# what is measured in full elsewhere, or costs most: the five stories, the files' mutants and the rest of these run every time
SLOW = ("2 map", "7", "15", "16", "17", "41", "43")


@pytest.mark.parametrize("mutant", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SLOW)) for name in MUTANTS])
def test_a_mutant_of_the_default_draft(mutant, request, tmp_path):
    tensors, config, name, cure = MUTANTS[mutant]
    heard = request.getfixturevalue("whole" if mutant[:2] in ("16", "17", "41") else "few")
    names, diagnosis = names_of(heard, mutate(DEFAULT_DRAFT, tmp_path / "x", tensors, config))
    assert names.keys() == {name} and cure in names[name].cure
    assert names[name].evidence["declared"] < names[name].evidence["better"]


@pytest.mark.slow
def test_1_an_absolute_map_that_passes_as_offsets(few, tmp_path):
    """Low ids alone and no t2d: both readings fit, the loader warns, and agreement decides."""
    def low(w):
        ids = w["d2t"] + torch.arange(3072)
        kept = (ids < 2400).nonzero().flatten()[::2]
        w["lm_head.weight"], w["d2t"] = w["lm_head.weight"][kept], ids[kept]
        del w["t2d"]
    draft = mutate(DEFAULT_DRAFT, tmp_path / "x", low)
    size = len(load_file(draft / "model.safetensors")["d2t"])
    (draft / "config.json").write_text((draft / "config.json").read_text().replace('"draft_vocab_size": 3072', f'"draft_vocab_size": {size}'))
    names, _ = names_of(few, draft)
    assert names.keys() == {"d2t-absolute"} and "--d2t absolute" in names["d2t-absolute"].cure
    names, _ = names_of(few, draft, d2t="absolute")
    assert not names


def test_a_text_longer_than_training(few, tmp_path):
    draft = mutate(DEFAULT_DRAFT, tmp_path / "x", config=lambda c: c.update(max_position_embeddings=16))
    _, diagnosis = names_of(few, draft)
    assert [finding.name for finding in diagnosis.findings] == ["context-untrained"] and "at most 16" in diagnosis.findings[0].expected


def test_39_the_style_of_rope(few):
    """No config of a Llama head says it: the probe is given pairs (2j, 2j + 1)."""
    subject, declared, config = default(few)
    turned = replace(declared, rope=replace(declared.rope, style="interleaved"))
    assert probed(subject, turned, config).keys() == {"rope-style"}


def probed(subject, declared, config):
    with torch.inference_mode():
        findings, *_ = doctor.probe(subject, declared, config, {}, print)
    return {finding.name: finding for finding in findings if finding.severity != "note"}


def default(heard):
    config = TargetConfig.read(str(DEFAULT_TARGET))
    plan = open_draft(str(DEFAULT_DRAFT), config)
    return own_subject(heard, plan)[0], Reading.of(plan.config), config


@pytest.mark.slow
def test_18_states_without_the_residual(few):
    """A target whose streams sum to what the draft knows: the draft reads what a layer added, not the stream."""
    subject, declared, config = default(few)
    summed = replace(subject, text=replace(subject.text, states=subject.text.states.cumsum(0)))
    names = probed(summed, declared, config)
    assert names.keys() == {"capture-form"} and "delta" in names["capture-form"].cause


def test_21_states_beside_their_own_token(few):
    """States saved one place late: what the draft learned to read with token p + 1 now lies beside token p."""
    subject, declared, config = default(few)
    late = replace(subject, text=replace(subject.text, states=subject.text.states.roll(1, 1)))
    names = probed(late, declared, config)
    assert names.keys() == {"token-shift"} and "token p + 0" in names["token-shift"].cause


@pytest.mark.slow
def test_49_a_rotated_target(few):
    """Streams in another basis, as some quantisers leave them: under no reading does the draft profit from them."""
    subject, declared, config = default(few)
    turn = torch.linalg.qr(torch.randn(384, 384, generator=torch.Generator().manual_seed(0)))[0]
    assert "states-unused" in probed(replace(subject, text=replace(subject.text, states=subject.text.states @ turn)), declared, config)


@pytest.mark.slow
def test_a_weak_draft_is_said_to_be_weak(few, tmp_path):
    """Noise over the whole layer: no reading helps, states still do. A note, and the pair is sound."""
    def noise(w):
        generator = torch.Generator().manual_seed(0)
        for name in ("fc.weight", "midlayer.mlp.down_proj.weight"):
            w[name] = (w[name].float() + 0.8 * w[name].float().std() * torch.randn(w[name].shape, generator=generator)).bfloat16()
    diagnosis = examine(few, str(mutate(DEFAULT_DRAFT, tmp_path / "x", noise)), engine=False)
    assert diagnosis.sound and [finding.name for finding in diagnosis.findings] == ["weak-draft"], diagnosis.text()


@pytest.mark.slow
def test_57_fusion_skipped_in_training(few):
    """A target whose fourth stream is what the draft's layer wants to read, and whose others are noise: fc is in the way."""
    subject, declared, config = default(few)
    noise = torch.randn(subject.text.states.shape, generator=torch.Generator().manual_seed(0))
    noise[4] = subject.fused(declared)
    names = probed(replace(subject, text=replace(subject.text, states=noise)), declared, config)
    assert names.keys() == {"fusion-skipped"} and "bypass 4" in names["fusion-skipped"].expected


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small target, what it writes, and where to put drafts."""
    root = tmp_path_factory.mktemp("small")
    target = tiny.write_target(root / "target")
    return target, listen(target, [[7 + i, 301, 45, 12 + i, 99] for i in range(0, 40, 4)], 40), root


def trend(hit, oov=0.0):
    """What `trend` makes of six prompts of 40 tokens with these hits [6, 40]."""
    place, sequence = torch.arange(40).repeat(6), torch.arange(6).repeat_interleave(40)
    text = Text(place, place, sequence, place >= 0, torch.zeros(1, 240, 1))
    return [finding.name for finding in doctor_rounds.trend(Score(hit.flatten(), torch.zeros(240)), text, torch.arange(240), oov)]


def test_50_prompts_unlike_the_rest():
    """Hazard 50, and what bounds or wears down acceptance: named where it is so, and not where hits scatter at random."""
    scattered = torch.rand(6, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    assert trend(scattered) == []
    one = scattered.clone()
    one[4] &= torch.arange(40) % 8 == 0
    assert trend(one) == ["prompts-differ"]
    assert trend(scattered & (torch.arange(40) < 22)) == ["context-decay"]
    assert trend(scattered, 0.3) == ["vocabulary-ceiling"]


def check_seeds(seeds, tmp_path):
    for seed in seeds:
        target = tiny.write_target(tmp_path / f"t{seed}", seed=seed)
        heard = listen(target, [[7 + i, 301, 45, 12 + i, 99] for i in range(0, 32, 4)], 32)
        attention = "mla" if seed % 3 == 2 else "llama"
        draft = tiny_draft.write_draft(tmp_path / f"d{seed}", target, seed=seed, attention=attention, vocab=384 if seed % 2 else None)
        tiny_draft.fit(draft, target, seed=seed)
        diagnosis = examine(heard, str(draft))
        assert diagnosis.sound, (seed, [list(finding.lines()) for finding in diagnosis.findings])
        assert diagnosis.facts["engine_by_depth"]["engine"] == diagnosis.facts["engine_by_depth"]["probe"]


def test_no_finding_on_a_small_pair(tmp_path):
    check_seeds([2], tmp_path)


@pytest.mark.slow
def test_no_finding_on_twenty_small_pairs(tmp_path):
    check_seeds(range(20), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", tiny_draft.DIALECTS)
def test_no_finding_on_a_fitted_dialect(dialect, target, checkpoints, small):
    diagnosis = examine(small[1], str(checkpoints.fitted(target, **tiny_draft.DIALECTS[dialect])))
    assert diagnosis.sound, [list(finding.lines()) for finding in diagnosis.findings]


@pytest.mark.parametrize("dialect", tiny_draft.DIALECTS)
def test_the_probe_computes_the_definition(dialect, target, checkpoints, small):
    """Depth 1 to 3 against the second implementation in fp64, which knows nothing of minispec."""
    draft = checkpoints.draft(target, **tiny_draft.DIALECTS[dialect])
    heard, plan = small[1], open_draft(str(draft), TargetConfig.read(str(target)))
    subject = own_subject(heard, plan)[0]
    model = naive.Target(target)
    definition = naive.Draft(draft, model)
    ids = torch.tensor(heard.outputs[1].prompt_ids + heard.outputs[1].ids)
    n, rows = len(ids) - 4, (subject.text.sequence == 1).nonzero().flatten()
    g = definition.fuse(definition.aux(model.forward(ids)[1])[:n])
    tokens, row = ids[1:n + 1], torch.arange(n)
    depth = torch.zeros(n, dtype=torch.long)
    for step, logits in enumerate(subject.steps(Reading.of(plan.config), rows, 3)):
        mask = (depth == 0) & (row <= row[:, None]) | (depth > 0) & (depth <= depth[:, None]) & (row == row[:, None])
        out, following = definition.forward(tokens, g, row + depth, mask)
        assert_close(f"depth {step + 1}", out[-n:], logits[:n], 1e-4)
        tokens, g = torch.cat([tokens, ids[2 + step:n + 2 + step]]), torch.cat([g, following[-n:]])
        row, depth = torch.cat([row, torch.arange(n)]), torch.cat([depth, torch.full((n,), step + 1)])


# ---- states saved in training

@pytest.fixture(scope="module")
def states(small):
    """ids and the streams entering layers 2, 4, 5 and leaving the last, of the small target, from the second implementation."""
    ids = torch.tensor(small[1].outputs[0].prompt_ids + small[1].outputs[0].ids)
    streams = [x.float() for x in naive.Target(small[0]).forward(ids)[1]]
    return ids, streams


def saved(path, ids, parts, last, form):
    if form == "speculators list":
        torch.save(dict(input_ids=ids, loss_mask=torch.ones_like(ids), hidden_states=[*parts, last]), path)
    elif form == "speculators":
        save_file(dict(token_ids=ids, hidden_states=torch.stack([*parts, last], 1)), path)
    else:
        torch.save(dict(input_ids=ids, loss_mask=torch.ones_like(ids), hidden_state=last[None], aux_hidden_state=torch.cat(parts, -1)[None]), path)
    return path


def compared(small, path):
    heard = hear(str(small[0]), [[5, 6]], str(path), 8, latent_norm_eps=1e-6, device="cpu", dtype="float32")
    subject = own_subject(heard, open_draft(str(small[2] / "plain"), heard.config))[0]
    parts, last, text = heard.saved
    findings, sources = compare(replace(subject, text=text), parts, last, (2, 4, 5))
    return {finding.name: finding for finding in findings}, sources


@pytest.fixture
def plain(small):
    if not (small[2] / "plain").exists():
        tiny_draft.write_draft(small[2] / "plain", small[0])


@pytest.mark.parametrize("form, end", [("speculators list", "pt"), ("speculators", "safetensors"), ("specforge", "ckpt")])
def test_saved_states_in_every_form(form, end, small, states, plain, tmp_path):
    ids, x = states
    findings, sources = compared(small, saved(tmp_path / f"s.{end}", ids, [x[2].bfloat16().float(), x[4], x[5]], x[8], form))
    assert not findings and [(s["layer"], s["form"], s["shift"]) for s in sources] == [(i, "residual", 0) for i in (2, 4, 5)]


NORM = "model.layers.4.input_layernorm.weight"
SAVED = {
    "16 other layers": (lambda x: [x[1], x[3], x[4]], 8, "states-layer", "--capture 1,3,4"),
    "15 another order": (lambda x: [x[5], x[2], x[4]], 8, "states-order", "5, 2, 4"),
    "18 without the residual": (lambda x: [x[2], x[4] - x[3], x[5]], 8, "states-normed", "residual"),
    "21 shifted by a token": (lambda x: [x[2].roll(1, 0), x[4], x[5]], 8, "states-shifted", "own token"),
    "scaled": (lambda x: [x[2], x[4] * 2, x[5]], 8, "states-scaled", "unscaled"),
    "49 rotated": (lambda x: [part @ torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0] for part in (x[2], x[4], x[5])],
                   8, "states-unknown", "this very target"),
    "58 the last state one layer early": (lambda x: [x[2], x[4], x[5]], 7, "states-last", "after the last layer"),
}


@pytest.mark.parametrize("mutant", SAVED)
def test_a_mutant_of_the_saved_states(mutant, small, states, plain, tmp_path):
    parts, last, name, cure = SAVED[mutant]
    ids, x = states
    findings, _ = compared(small, saved(tmp_path / "s.pt", ids, parts(x), x[last], "specforge"))
    assert findings.keys() == {name} and cure in findings[name].cure


def test_saved_states_after_the_norm(small, states, plain, tmp_path):
    ids, x = states
    weight = load_file(small[0] / "model.safetensors")[NORM]
    findings, _ = compared(small, saved(tmp_path / "s.pt", ids, [x[2], rms_norm(x[4], (64,), weight, 1e-6), x[5]], x[8], "specforge"))
    assert findings.keys() == {"states-normed"}


def test_states_that_cannot_be_read(small, tmp_path):
    for name, content in (("a.pt", b"junk"), ("b.safetensors", b"junk"), ("c.pt", None)):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(MinispecError, match="training-states|" + name):
            read_states(str(tmp_path / name), small[1].config)


class Runs:
    """A pickle that writes a file when it is read by an unpickler that calls what it is told to."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


STATES = {"a list": ([1, 2], "holds list"), "no states": (dict(input_ids=torch.arange(9)), "holds ['input_ids']"),
          "another width": (dict(input_ids=torch.arange(9), hidden_states=torch.ones(9, 7)), "width 64"),
          "of another length": (dict(input_ids=torch.arange(9), hidden_states=torch.ones(8, 4, 64)), "width 64"),
          "ids of another target": (dict(input_ids=torch.arange(9) + 510, hidden_states=torch.ones(9, 4, 64)), "from 0 to 511"),
          "too few": (dict(input_ids=torch.arange(2), hidden_states=torch.ones(2, 4, 64)), "8 or more"),
          "zeros": (dict(input_ids=torch.arange(9), hidden_states=torch.zeros(9, 4, 64)), "all zero"),
          "NaN": (dict(input_ids=torch.arange(9), hidden_states=torch.ones(9, 4, 64) * float("nan")), "NaN")}


@pytest.mark.parametrize("form", STATES)
def test_saved_states_of_a_wrong_form(form, small, tmp_path):
    content, word = STATES[form]
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(MinispecError) as error:
        read_states(str(tmp_path / "x.pt"), small[1].config)
    assert str(error.value).startswith("--training-states ") and word in str(error.value)


def test_a_pickle_with_code_in_it_is_not_executed(small, tmp_path):
    torch.save(dict(input_ids=torch.arange(9), hidden_states=Runs(tmp_path / "ran")), tmp_path / "x.pt")
    with pytest.raises(MinispecError, match="not executed"):
        read_states(str(tmp_path / "x.pt"), small[1].config)
    assert not (tmp_path / "ran").exists()


def test_saved_states_longer_than_the_context(small, tmp_path):
    size = small[1].config.max_position_embeddings
    torch.save(dict(input_ids=torch.arange(size + 9) % 512, hidden_states=torch.ones(size + 9, 4, 64)), tmp_path / "x.pt")
    ids, parts, last = read_states(str(tmp_path / "x.pt"), small[1].config)
    assert [len(x) for x in (ids, *parts, last)] == [size] * 5


def test_statistics_of_the_captured_parts(small, plain):
    subject = own_subject(small[1], open_draft(str(small[2] / "plain"), small[1].config))[0]
    for (name, facts), layer in zip(statistics(subject, (2, 4, 5)).items(), (2, 4, 5)):
        x = subject.text.states[layer].double()
        assert name == f"layer {layer}" and facts["first_five"] == pytest.approx(x[0, :5].tolist())
        assert (facts["norm"], facts["spread"]) == pytest.approx((x.square().sum(-1).sqrt().mean().item(), x.std().item()), rel=1e-4)

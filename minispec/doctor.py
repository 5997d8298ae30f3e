"""`minispec doctor`: why is my acceptance low? The load audit, a teacher-forced probe of every reading, the engine against it, and what follows."""
import json
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from minispec.bench import read_jsonl
from minispec.config import LATENT_EPS, TargetConfig
from minispec.doctor_files import CAPTURE_FAULTS, audit, parameters
from minispec.doctor_finding import SEVERITIES, Finding
from minispec.doctor_probe import Reading, Subject, Text
from minispec.doctor_rounds import by_depth, depths, engine_findings, recycling, rounds, text_findings, trend
from minispec.doctor_scan import CONFIG, distinct, differences, score, search
from minispec.doctor_states import compare, read_states, statistics
from minispec.engine import Engine
from minispec.errors import MinispecError
from minispec.fields import Fields, printable
from minispec.layers import allocate
from minispec.params import SamplingParams
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.draft import load_draft, open_draft
from minispec.weights.load import DEFAULT

# field of a Reading -> name of the finding, its cause, the cure
READINGS = {
    "capture": ("capture-layer", "trained on the states of other layers than its files name (a shift of one: inputs taken for outputs)",
                'set eagle_aux_hidden_state_layer_ids to {better} with capture_convention "input", or give --capture {flag}'),
    "order": ("capture-parts", "fc's parts are in another order than the files name the layers", "reorder the columns of fc.weight to layers {flag}"),
    "form": ("capture-form", "trained on captured states that were {better}, not on the residual stream", "train on the residual stream entering a layer"),
    "bypass": ("fusion-bypassed", "trained with fc skipped: one state of the draft's width, of layer {better}, went to the layer as it was",
               "train with fusion (by the origin of a row, not by its width); no flag can serve this draft"),
    "norm_before_residual": ("norm-before-residual", "the flag is missing or wrong in the config", "set norm_before_residual to {better}, or give {flag}"),
    "swapped": ("halves-swapped", "trained on [hidden, embedding]", "swap the two halves of the columns of q_proj, k_proj and v_proj"),
    "shift": ("token-shift", "trained with state p beside token p + {better}", "train with the token after each state"),
    "split": ("head-split", "num_attention_heads and head_dim of another split of the same width", "multiply head_dim by {better}, divide the heads"),
    "rope": ("rope", "trained with other rotary positions than the config says", "set the rope fields of config.json to: {flag}"),
    "vocab": ("d2t-order", "the head's rows are not in the order of d2t (t2d.nonzero(), or a map made anew under a trained head)",
              "store d2t for the rows as they are: {flag}"),
    "embed": ("embedding-stale", "embed_tokens in the file is not what the draft was trained with", "remove embed_tokens from the file"),
    "head": ("head-stale", "lm_head in the file does not belong to the rest", "save lm_head again; the target's rows do better"),
}


@dataclass(frozen=True)
class Diagnosis:
    """findings, worst first; facts: what was measured, as plain values. sound: no error and no warning."""
    findings: list
    facts: dict

    @property
    def sound(self):
        return all(finding.severity == "note" for finding in self.findings)

    def json(self):
        return json.dumps({"sound": self.sound, "findings": [asdict(finding) for finding in self.findings], "facts": self.facts})

    def text(self):
        lines = [line for finding in self.findings for line in (*finding.lines(), "")]
        lines += [f"{name.replace('_', ' ')}: {value}" for name, value in self.facts.items() if not isinstance(value, list) or name == "depth"]
        verdict = "sound" if self.sound else f"{sum(f.severity != 'note' for f in self.findings)} findings"
        return "\n".join(map(printable, [*lines, verdict]))


@dataclass(frozen=True)
class Heard:
    """What a target says on its own: its Text with the margin of its two best logits at every row, plain outputs, the parameters that a draft may
    borrow and every layer's norm; saved: (ids, parts, last) of a trainer's file and the Text of those ids, or None."""
    folder: str
    config: TargetConfig
    own: dict
    outputs: list
    text: Text
    margins: list
    tolerance: float
    options: dict
    saved: tuple | None


def diagnose(target=None, draft=None, prompts=None, training_states=None, max_tokens=96, note=lambda line: None, latent_norm_eps=LATENT_EPS,
             device="auto", dtype="auto", **dialect):
    """Every check on a pair -> Diagnosis. target, draft: folders (neither: the default pair); prompts: texts or ids; training_states: a file.

    The rest as in Engine. MinispecError for files that cannot be read at all, and for options that mean nothing.
    """
    if (target is None) != (draft is None) or draft == "none":
        raise MinispecError("doctor looks at a pair: give --target DIR and --draft DIR, or neither for the default pair")
    target, draft = str(target or DEFAULT / "target"), str(draft or DEFAULT / "draft")
    for folder, pickled in ((target, False), (draft, True)):
        Fields.read(folder), Checkpoint.open(folder, pickled=pickled)
    try:
        heard = hear(target, prompts or read_jsonl(), training_states, max_tokens, note, latent_norm_eps=latent_norm_eps, device=device, dtype=dtype)
    except MinispecError as error:
        if str(error).startswith("--training-states"):
            raise
        return Diagnosis([Finding("target-refused", "error", str(error), "a target that the engine runs", "its files, or a prompt",
                                  str(error).rpartition("; ")[2])], {})
    return examine(heard, draft, dialect, note)


def hear(target, prompts, training_states=None, max_tokens=96, note=lambda line: None, **options):
    """Let a target write, and capture every layer."""
    config = TargetConfig.read(target, options["latent_norm_eps"])
    layers = tuple(range(config.num_hidden_layers + 1))
    saved = training_states and read_states(training_states, config.hidden_size)
    note(f"the target writes {max_tokens} tokens after each of {len(prompts)} prompts")
    with Engine(target, "none", capture=layers, **options) as engine:
        outputs = engine.generate(list(prompts), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        text, margins = read_text(engine, [(out.prompt_ids, out.ids) for out in outputs], len(layers))
        saved = saved and (*saved, read_text(engine, [([], saved[0].tolist())], len(layers))[0])
        tolerance = 1e-3 if engine.dtype == torch.float32 else 0.25
    own = parameters(target, config, ["embed", "head", "norm", *(f"layers.{i}.attn_norm" for i in layers[:-1])])
    return Heard(target, config, own, outputs, text, margins, tolerance, options, saved)


def examine(heard, draft, dialect=None, note=lambda line: None, engine=True):
    """All checks of a draft's folder. dialect: capture, capture_convention, d2t and norm flags, as in Engine; engine: run it too."""
    given, config, text = dialect or {}, heard.config, heard.text
    eps = {"latent_norm_eps": heard.options["latent_norm_eps"]}
    reading = {name: given[name] for name in ("capture", "capture_convention", "d2t") if name in given}
    reading |= {"overrides": {name: value for name, value in given.items() if name not in reading}, **eps}
    with TemporaryDirectory() as scratch:
        note("reading the draft's files")
        findings, folder = audit(draft, config, heard.folder, scratch, reading)
        if folder is None:
            return finish(findings, {"not_probed": "the draft cannot be opened, even mended"})
        plan = open_draft(str(folder), config, **reading)
        subject, lines = own_subject(heard, plan)
        facts = {"read_as": lines, "rope_of_the_target": str(config.rope), "rope_of_the_draft": str(plan.config.rope),
                 "trained_context": plan.config.max_position_embeddings, "longest_text": int(text.position.max()) + 1}
        with torch.inference_mode():
            guessed = [i for i, finding in enumerate(findings) if finding.name in CAPTURE_FAULTS]
            more, found, layers = probe(subject, Reading(plan.config), config, facts, note, frozenset({"capture"} if guessed else ()))
            findings += more
            for i in guessed:
                findings[i] = replace(findings[i], cure=f"{findings[i].cure}; agreement is best with --capture {','.join(map(str, layers))}")
            if heard.saved:
                note("comparing the states saved in training")
                _, parts, last, saved_text = heard.saved
                more, facts["saved_parts"] = compare(replace(subject, text=saved_text), parts, last, plan.config.capture)
                findings += more
        if engine:
            note("the engine drafts on the same prompts")
            findings += run(heard, folder, given, found, facts)
    return finish(findings, facts)


def own_subject(heard, plan):
    """(the Subject of a DraftPlan on the text heard, the lines of its load report)."""
    p, config, own = allocate(plan.shapes, torch.float32, heard.text.ids.device), heard.config, heard.own
    lines = load_draft(plan, p).lines
    norms = torch.stack([own[f"layers.{i}.attn_norm"] for i in range(config.num_hidden_layers)] + [own["norm"]])
    return Subject(p, plan.d2t, own["embed"], own["head"], norms, heard.text, config.rms_norm_eps), lines


def run(heard, folder, dialect, found, facts):
    """Findings from the engine itself, with a chain of draft tokens, against `found`, the Depths of the reading that it runs."""
    with Engine(heard.folder, str(folder), topk=1, **dialect, **heard.options) as engine:
        prompts, params = [out.prompt_ids for out in heard.outputs], SamplingParams(max_tokens=len(heard.outputs[0].ids), ignore_eos=True)
        outputs = engine.generate(prompts, params)
        plain, costs = engine.plain(), []
        for prompt in prompts[:4]:
            times = [perf_counter()]
            for one in (plain, engine):
                out = one.generate(prompt, params)
                times.append(perf_counter())
            costs.append((times[2] - times[1]) / max(len(out.accepted), 1) / (times[1] - times[0]) * len(out.ids))
    truth, even = [out.ids for out in heard.outputs], sorted(costs)[len(costs) // 2]
    counted = rounds(outputs, truth, found, heard.text, heard.tolerance)
    findings = [*text_findings(outputs, truth, heard.margins, heard.tolerance), *engine_findings(counted, 0 if heard.tolerance < 0.01 else 0.05)]
    facts |= measured(outputs, counted) | {"break_even_length": even}
    if facts["acceptance_length"] < even:
        findings.append(Finding("slower-than-plain", "note", f"acceptance length {facts['acceptance_length']:.2f}", f"more than {even:.2f}, where this "
                                "target breaks even on this machine", "a round costs that many plain tokens", "fewer --draft-steps, a better draft, "
                                "or --draft none"))
    return findings


def finish(findings, facts):
    return Diagnosis(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)), facts)


def read_text(engine, pairs, layers):
    """(Text of [(prompt ids, ids)], the margin of the target's two best logits at every row of each): one forward a sequence."""
    ids, scores = [[*prompt, *ids] for prompt, ids in pairs], []
    for one in ids:
        scores.append(engine.score(one))
    states = torch.cat([s.states.unflatten(-1, (layers, -1)).transpose(0, 1).float().cpu() for s in scores], 1)
    place = torch.cat([torch.arange(len(one)) for one in ids])
    first = torch.tensor([len(prompt) for prompt, _ in pairs])
    sequence = torch.arange(len(ids)).repeat_interleave(torch.tensor([len(one) for one in ids]))
    margins = [(two := s.logits.topk(2).values.cpu())[:, 0] - two[:, 1] for s in scores]
    return Text(torch.tensor(sum(ids, [])), place, sequence, place >= first[sequence], states), margins


def probe(subject, declared, target, facts, note, open_fields=frozenset()):
    """(findings, Depths of the declared reading, the layers of the best): the scan of readings, the depth probe, and what agreement depends on."""
    rows, findings = distinct(subject.text), []
    note(f"comparing readings of the draft on {len(rows)} distinct places of that text")
    best, known = search(subject, declared, target.rope, rows, open_fields)
    for name, value in differences(declared, best).items():
        if name in open_fields:
            continue
        better = getattr(best.config if name in CONFIG else best, name)
        findings.append(reading_finding(name, value, better, known[declared], known[best]))
    name, opposite = ("post", "pre") if declared.config.norm_output else ("pre", "post")
    found, other = depths(subject, declared, name), depths(subject, best, opposite)
    findings += recycling(found if best == declared else depths(subject, best, name), other, name, rows)
    shuffled, true = score(subject, replace(best, form="shuffled"), rows), subject.text.after(2)[0]
    if not known[best].beats(shuffled):
        findings.append(Finding("states-unused", "error" if known[best].agreement < 0.15 else "note", f"agreement {known[best].agreement:.3f}", f"more than {shuffled.agreement:.3f}, with the "
                                "states of other places", "under no reading does the draft profit from this target's states: made for another "
                                "target, or not trained", "use the draft of this very target (version, fine-tune); --training-states FILE compares"))
    elif known[declared].agreement < 0.3 and not findings:
        findings.append(Finding("weak-draft", "note", f"agreement {known[declared].agreement:.3f}, {shuffled.agreement:.3f} with the states of other "
                                "places", "0.6 to 0.85 on text like the training text", "no other reading does better: a weak draft, or unlike text",
                                "train longer, on text that the target wrote"))
    oov = 0.0 if subject.ids is None else (~torch.isin(true[rows], subject.ids)).float().mean().item()
    findings += trend(found, known[best], subject.text, rows, oov)
    facts |= {"agreement": known[declared].agreement, "agreement_with_other_states": shuffled.agreement, "readings_compared": len(known),
              "depth": {f"recycling_{name}_norm": found.agreement, f"recycling_{opposite}_norm": other.agreement}, "cannot_propose": oov,
              "captured_states": statistics(subject, declared.config.capture)}
    return findings, found, best.config.capture


def reading_finding(name, value, better, declared, best):
    """The finding for one field in which the best reading differs from the declared one."""
    place = name
    if name == "capture":
        place = "order" if sorted(value) == sorted(better) or list(better) != sorted(better) else name
    flag = {"capture": lambda: ",".join(map(str, better)), "order": lambda: ",".join(map(str, better)), "rope": lambda: str(better),
            "norm_before_residual": lambda: f"--{'' if better else 'no-'}norm-before-residual",
            "vocab": lambda: "ascending ids" if better == "order" else "each row's id is that of the target row nearest to it"}.get(place, str)()
    slug, cause, cure = READINGS[place]
    if name == "rope":
        slug = "rope-style" if value.style != better.style else "rope-scaling" if value.kind != better.kind else "rope-theta"
    shown = list(better) if isinstance(better, tuple) else str(better).lower() if isinstance(better, bool) else better
    return Finding(slug, "error", f"agreement {declared.agreement:.3f} as declared ({name} {list(value) if isinstance(value, tuple) else value})",
                   f"{best.agreement:.3f} ({name} {shown})", cause.format(better=shown, flag=flag), cure.format(better=shown, flag=flag),
                   {"declared": declared.agreement, "better": best.agreement})


def measured(outputs, counted):
    """Acceptance in the engine: length, by depth beside the probe's, by round index, by context, by prompt."""
    def mean(group):
        groups = {}
        for r in counted:
            groups.setdefault(group(r), []).append(r.accepted)
        return {key: round(sum(values) / len(values), 2) for key, values in sorted(groups.items())}
    number, emitted = (sum(map(count, outputs)) for count in (lambda out: len(out.accepted), lambda out: len(out.ids) - 1))
    return {"acceptance_length": emitted / max(number, 1),
            "engine_by_depth": {"engine": by_depth([r.accepted for r in counted]), "probe": by_depth([r.expected for r in counted])},
            "accepted_by_round": mean(lambda r: r.index // 8 * 8), "accepted_by_context": mean(lambda r: r.context // 64 * 64),
            "accepted_by_prompt": mean(lambda r: r.prompt)}

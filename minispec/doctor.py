"""`minispec doctor`: why is my acceptance low? The load audit, a teacher-forced probe of every reading, the engine against it, and what follows."""
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from minispec.bench.readings import read_prompts
from minispec.config import LATENT_EPS, TargetConfig
from minispec.doctor_files import CAPTURE_FAULTS, audit
from minispec.doctor_finding import Diagnosis, finding
from minispec.doctor_probe import Reading, Subject, Text
from minispec.doctor_rounds import by_depth, depths, engine_findings, recycling, rounds, text_findings, trend
from minispec.doctor_scan import ENOUGH, differences, distinct, score, search
from minispec.doctor_states import compare, read_states, statistics
from minispec.engine import Engine
from minispec.errors import MinispecError
from minispec.fields import Fields
from minispec.layers import allocate
from minispec.params import SamplingParams
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.draft import load_draft, open_draft
from minispec.weights.load import DEFAULT, fill, open_target
# field of a Reading that differs -> finding; "rope" by what of it differs
SLUGS = {"capture": "capture-layer", "form": "capture-form", "bypass": "fusion-skipped", "norm_before_residual": "norm-before-residual",
         "swapped": "halves-swapped", "shift": "token-shift", "split": "head-split", "vocab": "d2t-order", "embed": "embedding-stale",
         "head": "head-stale"}


@dataclass(frozen=True)
class Heard:
    """What a target says on its own: its Text with the margin of its two best logits at every row, plain outputs, the parameters that a draft may
    borrow and every layer's norm; saved: (parts, last) of a trainer's file and the Text of its ids, or None."""
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
        open_target(target, TargetConfig.read(target, latent_norm_eps)).checkpoint.close()
    except MinispecError as error:
        return Diagnosis.of([finding("target-refused", str(error), cure=str(error).rpartition("; ")[2])], {})
    prompts = prompts or [one.prompt for one in read_prompts(per_kind=2)]
    heard = hear(target, prompts, training_states, max_tokens, note, latent_norm_eps=latent_norm_eps, device=device, dtype=dtype)
    return examine(heard, draft, dialect, note)


def hear(target, prompts, training_states=None, max_tokens=96, note=lambda line: None, **options):
    """Let a target write, and capture every layer."""
    config = TargetConfig.read(target, options["latent_norm_eps"])
    layers = tuple(range(config.num_hidden_layers + 1))
    saved = training_states and read_states(training_states, config)
    note(f"the target writes {max_tokens} tokens after each of {len(prompts)} prompts")
    with Engine(target, "none", capture=layers, **options) as engine:
        outputs = engine.generate(list(prompts), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        text, margins = read_text(engine, [(out.prompt_ids, out.ids) for out in outputs], len(layers))
        saved_text = saved and read_text(engine, [([], saved[0].tolist())], len(layers))[0]
        tolerance, device = 1e-3 if engine.dtype == torch.float32 else 0.25, engine.device
    wanted = ["embed", "head", "norm", *(f"layers.{i}.attn_norm" for i in layers[:-1])]
    own = {name: tensor.to(device) for name, tensor in parameters(target, config, wanted).items()}      # where the target has just made room
    text, saved_text = (one and Text(*(tensor.to(device) for tensor in vars(one).values())) for one in (text, saved_text))
    return Heard(target, config, own, outputs, text, margins, tolerance, options, saved and (*saved[1:], saved_text))


def examine(heard, draft, dialect=None, note=lambda line: None, engine=True):
    """All checks of a draft's folder. dialect: capture, capture_convention, d2t and norm flags, as in Engine; engine: run it too."""
    given, config, text = dialect or {}, heard.config, heard.text
    reading = {name: given[name] for name in ("capture", "capture_convention", "d2t") if name in given}
    reading |= {"overrides": {name: given[name] for name in given.keys() - reading}, "latent_norm_eps": heard.options["latent_norm_eps"]}
    with TemporaryDirectory() as scratch:
        findings, folder = audit(draft, config, scratch, reading)
        if folder is None or any(one.name == "layer-untrained" or one.evidence.get("share", 0) > 0.5 for one in findings):
            return Diagnosis.of(findings, {"not_probed": "a draft that does not open, or was never trained, says nothing under any reading"})
        plan = open_draft(str(folder), config, **reading)
        subject, lines = own_subject(heard, plan)
        lines = [line.replace(str(folder), draft) for line in lines]            # not the mended copy's place
        outputs = [layer - 1 for layer in plan.config.capture]
        trained, longest = plan.config.max_position_embeddings, int(text.position.max()) + 1
        facts = {"read_as": lines, "captured": f"inputs of layers {list(plan.config.capture)} = outputs of layers {outputs}",
                 "rope_of_the_target": str(config.rope), "rope_of_the_draft": str(plan.config.rope), "trained_context": trained,
                 "longest_text": longest}
        findings += [finding("context-untrained", f"{longest} tokens of text", trained=trained)] if longest > trained else []
        with torch.inference_mode():
            guessed = [i for i, one in enumerate(findings) if one.name in CAPTURE_FAULTS]
            more, found, layers = probe(subject, Reading.of(plan.config), config, facts, note, frozenset({"capture"} if guessed else ()))
            findings += more
            for i in guessed:
                findings[i] = replace(findings[i], cure=f"{findings[i].cure}; agreement is best with --capture {','.join(map(str, layers))}")
            if heard.saved:
                more, facts["saved_parts"] = compare(replace(subject, text=heard.saved[2]), *heard.saved[:2], plan.config.capture)
                findings += more
        note("the engine drafts on the same prompts")
        findings += run(heard, folder, given, found, facts) if engine else []
    return Diagnosis.of(findings, facts)


def parameters(folder, target, wanted):
    """name -> fp32 tensor on the CPU of a few of a target's parameters (weights.names)."""
    plan = open_target(folder, target)
    shapes = {name: plan.shapes[name] for name in wanted}
    found = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill(replace(plan, shapes=shapes, pieces=[piece for piece in plan.pieces if piece[0].param in found]), found)
    return found


def own_subject(heard, plan):
    """(the Subject of a DraftPlan on the text heard, the lines of its load report)."""
    p, config, own = allocate(plan.shapes, torch.float32, heard.text.ids.device), heard.config, heard.own
    lines = load_draft(plan, p).lines
    norms = torch.stack([own[f"layers.{i}.attn_norm"] for i in range(config.num_hidden_layers)] + [own["norm"]])
    return Subject(p, plan.d2t, own["embed"], own["head"], norms, heard.text, config.rms_norm_eps), lines


def run(heard, folder, dialect, found, facts):
    """Findings from the engine itself, with a chain of draft tokens, against `found`, the Depths of the reading that it runs."""
    prompts, params = [out.prompt_ids for out in heard.outputs], SamplingParams(max_tokens=len(heard.outputs[0].ids), ignore_eos=True)
    with Engine(heard.folder, str(folder), topk=1, nodes=6, **dialect, **heard.options) as engine:
        outputs, plain, times = engine.generate(prompts, params), engine.plain(), []
        for prompt in prompts[:4]:
            for one in (plain, engine):
                began, out = perf_counter(), one.generate(prompt, params)
                times.append((perf_counter() - began) / max(len(out.accepted) if one is engine else len(out.ids), 1))
    truth, even = [out.ids for out in heard.outputs], sorted(b / a for a, b in zip(times[::2], times[1::2]))[len(times) // 4]
    counted = rounds(outputs, truth, found, heard.text, heard.tolerance)
    facts |= measured(outputs, counted) | {"break_even_length": even}
    length = facts["acceptance_length"]
    slow = [finding("slower-than-plain", f"acceptance length {length:.2f}", even=f"{even:.2f}")] if length < even else []
    return [*text_findings(outputs, truth, heard.margins, heard.tolerance), *engine_findings(counted, 0 if heard.tolerance < 0.01 else 0.05), *slow]


def read_text(engine, pairs, layers):
    """(Text of [(prompt ids, ids)], the margin of the target's two best logits at every row of each): one forward a sequence."""
    ids = [[*prompt, *ids] for prompt, ids in pairs]
    scores = [engine.score(one) for one in ids]
    states = torch.cat([s.states.unflatten(-1, (layers, -1)).transpose(0, 1).float().cpu() for s in scores], 1)
    place = torch.cat([torch.arange(len(one)) for one in ids])
    first = torch.tensor([len(prompt) for prompt, _ in pairs])
    sequence = torch.arange(len(ids)).repeat_interleave(torch.tensor([len(one) for one in ids]))
    margins = [(two := s.logits.topk(2).values.cpu())[:, 0] - two[:, 1] for s in scores]
    return Text(torch.tensor(sum(ids, [])), place, sequence, place >= first[sequence], states), margins


def probe(subject, declared, target, facts, note, open_fields=frozenset()):
    """(findings, Depths of the declared reading, the layers of the best): the scan of readings, the depth probe, and what agreement depends on."""
    rows = distinct(subject.text)
    note(f"comparing readings of the draft on {len(rows)} distinct places of that text")
    best, scored = search(subject, declared, target.rope, rows, open_fields)
    stated, first = scored(declared), scored(best)
    findings = [reading_finding(name, value, getattr(best, name), stated, first)
                for name, value in differences(declared, best).items() if name not in open_fields]
    name, opposite = ("post", "pre") if declared.config.norm_output else ("pre", "post")
    found, given, other = (depths(subject, *which) for which in ((declared, name), (best, name), (best, opposite)))
    findings += recycling(given, other, name, rows)
    if len(rows) < ENOUGH:
        findings.append(finding("little-text", f"{len(rows)} distinct places", enough=ENOUGH))
    shuffled, true = score(subject, replace(best, form="shuffled"), rows), subject.text.after(2)[0]
    weak = "states-unused" if not first.beats(shuffled) else "" if findings or first.agreement > 0.3 else "weak-draft"
    if weak and len(rows) >= ENOUGH:
        severity = "error" if weak == "states-unused" and first.agreement < 0.15 else "note"
        findings.append(finding(weak, f"agreement {first.agreement:.3f}", shuffled=f"{shuffled.agreement:.3f}", severity=severity))
    oov = 0.0 if subject.ids is None else (~torch.isin(true[rows], subject.ids)).float().mean().item()
    findings += trend(first, subject.text, rows, oov)
    facts |= {"agreement": stated.agreement, "agreement_with_other_states": shuffled.agreement,
              "readings_compared": scored.cache_info().currsize,
              "depth": {f"recycling_{name}_norm": given.agreement, f"recycling_{opposite}_norm": other.agreement}, "cannot_propose": oov,
              "captured_states": statistics(subject, declared.capture)}
    return findings, found, best.capture


def reading_finding(name, value, better, declared, best):
    """The finding for one field in which the best reading differs from the declared one."""
    slug = {"absolute": "d2t-absolute", "offset": "d2t-broken"}.get(better) or SLUGS.get(name)
    slug = slug or "rope-" + ("style" if value.style != better.style else "scaling" if value.kind != better.kind else "theta")
    if name == "capture" and (sorted(better) == sorted(value) or list(better) != sorted(set(better))):
        slug = "capture-parts"
    flag = {"capture": ",".join(map(str, better)) if name == "capture" else "", "norm_before_residual": "" if better else "no-",
            "vocab": "ascending ids" if better == "order" else "each row's id is that of the target's row nearest to it"}.get(name, "")
    old, new = (list(v) if isinstance(v, tuple) else str(v).lower() if isinstance(v, bool) else v for v in (value, better))
    return finding(slug, f"agreement {declared.agreement:.3f} as declared ({name} {old})",
                   {"declared": declared.agreement, "better": best.agreement}, better=f"{best.agreement:.3f} ({name} {new})", value=new, flag=flag,
                   way="give --d2t absolute" if better == "absolute" else "drop --d2t absolute, or store d2t + arange")


def measured(outputs, counted):
    """Acceptance in the engine: length, by depth beside the probe's, by round index, by context, by prompt."""
    def mean(group):
        return {key: round(fmean(r.accepted for r in part), 2) for key, part in groupby(sorted(counted, key=group), group)}
    number, emitted = (sum(map(count, outputs)) for count in (lambda out: len(out.accepted), lambda out: len(out.ids) - 1))
    return {"acceptance_length": emitted / max(number, 1),
            "engine_by_depth": {"engine": by_depth([r.accepted for r in counted]), "probe": by_depth([r.expected for r in counted])},
            "accepted_by_round": mean(lambda r: r.index // 8 * 8), "accepted_by_context": mean(lambda r: r.context // 64 * 64),
            "accepted_by_prompt": mean(lambda r: r.prompt)}

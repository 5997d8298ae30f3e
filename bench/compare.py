"""The order of a comparison: the ceiling, the ids, a look into the rounds, the clock."""
from dataclasses import asdict
from itertools import product
from time import perf_counter

from minispec.bench import report
from minispec.bench.readings import (Prompt, by_kind, copy_bandwidth, difference, draft_bytes, environment, interval, mix, spread, target_bytes,
                                     timed)
from minispec.bench.trace import Trace
from minispec.errors import MinispecError
from minispec.params import SamplingParams
from minispec.speculate import Shape
from minispec.stats import Acceptance, distinct_bigrams, quantile

LOOP = 0.5              # an output with a smaller share of distinct adjacent pairs repeats itself
STEPS, TOPK = (1, 2, 3, 4, 6, 8), (1, 4)


class Setting:
    """A shape of the draft tree, the engine that drafts it, and what was read of it."""

    def __init__(self, engine):
        shape = engine.shape
        nodes = "auto" if shape.adaptive else shape.nodes
        self.engine, self.name = engine, {"draft_steps": shape.steps, "topk": shape.topk, "nodes": nodes}
        self.outputs, self.differences, self.runs, self.equal = [], [], [], True

    def check(self, plain, params):
        """Ids against those of plain decoding; also the run that warms up what the clock shall not see: an adaptive tree learns first."""
        for reference in plain * self.engine.shape.adaptive:
            self.engine.generate(reference.prompt_ids, params)
            yield
        for index, reference in enumerate(plain):
            self.outputs.append(out := self.engine.generate(reference.prompt_ids, params))
            if found := difference(self.engine, reference.prompt_ids, reference.ids, out.ids, params):
                self.differences.append({"prompt": index, **found})
            self.equal = all(one["tie"] for one in self.differences)
            yield


def shapes(steps=None, topk=None, nodes=None):
    """Shapes of a sweep, for Engine.reshaped: what was asked for and can be; by default as many nodes as levels, twice as many and, where
    an engine can choose them, "auto". MinispecError when none can be."""
    found, refused = {}, None
    for levels, children in product(steps or STEPS, topk or TOPK):
        for count in nodes or (levels, 2 * levels, "auto"):
            try:
                shape = Shape(levels, children, count)
            except MinispecError as error:
                refused = error
                continue
            if nodes or children == 1 or shape.nodes != 1:         # one node is a chain, whatever else was tried
                found[shape] = (levels, children, count)
    if not found:
        raise MinispecError(f"--sweep: no setting can be: {refused}")
    return list(found.values())


def measure(engine, prompts, max_tokens, repeats, note, say):
    """`compare` for a list of prompts without kinds; note(line) gets the progress."""
    return compare(engine, [Prompt(prompt) for prompt in prompts], SamplingParams(max_tokens=max_tokens), repeats, say,
                   lambda done, total, what: note(f"{done} of {total} {what}"))


def compare(engine, prompts, params, repeats, say, progress, sweep=(), batches=()):
    """Plain against speculative decoding with the engine's tree and those in `sweep`, triples for Engine.reshaped; batches: sizes.

    prompts: Prompts. say(line) gets the report, progress(done, total, what) the progress. Returns the result as a dict.
    """
    if not engine.draft_steps:
        raise MinispecError("bench compares plain with speculative decoding: give a draft and --draft-steps of at least 1")
    if batches and max(batches) > engine.max_batch:
        raise MinispecError(f"--batch {max(batches)}: this engine takes {engine.max_batch} requests at once; give --max-batch of at least that")
    engine.stream([one.prompt for one in prompts], params)         # checks every prompt, runs none
    kinds, plain = [one.kind for one in prompts], engine.plain()
    settings = [Setting(engine)]
    for asked in sweep:
        other = Setting(engine.reshaped(*asked))
        settings += [other] * (other.name not in [one.name for one in settings])
    rate, one_row = copy_bandwidth(engine.device), target_bytes(engine, 1)
    result = {**settings[0].name, "prompts": len(prompts), "max_tokens": params.max_tokens, "repeats": repeats, "sampling": asdict(params),
              "environment": environment(engine.device), "dtype": str(engine.dtype).removeprefix("torch."), "bytes_token": one_row,
              "copy_bytes_per_s": rate, "ranks": engine.ranks.size}
    report.opening(result, kinds, say)

    passes = 1 + sum(1 + setting.engine.shape.adaptive for setting in settings)
    checks = counted(len(prompts) * passes, "runs that compare ids", progress)
    reference = [step(checks, plain.generate(one.prompt, params)) for one in prompts]
    for setting in settings:
        for _ in setting.check(reference, params):
            next(checks)
    result |= {"differences": settings[0].differences, "equal": all(setting.equal for setting in settings)}
    report.ids(settings, kinds, say)
    result |= acceptance(settings[0].outputs, engine.draft_steps)
    result["loops"] = [i for i, out in enumerate(settings[0].outputs) if distinct_bigrams(out.ids) < LOOP]
    rounds = traced(engine, prompts, params, progress)
    result |= inside(rounds, range(len(prompts)))
    result |= bound(engine, result)
    result["kinds"] = {kind: describe(settings[0], rounds, [i for i, of in enumerate(kinds) if of == kind]) for kind in dict.fromkeys(kinds)}
    report.ceiling(engine, result, say)
    if settings[0].equal:
        clock(plain, settings, prompts, params, repeats, progress)
        result |= speeds(settings, kinds, result["kinds"])
    report.tables(result, say)
    report.loops(result, prompts, say)
    if sweep:
        result["sweep"] = swept(settings, kinds)
        report.sweep(result["sweep"], say)
    if batches:
        result["batch"] = [together(plain, engine, reference, kinds, params, size, repeats, progress) for size in batches]
        result["equal"] &= all(one["equal"] for one in result["batch"])
        report.batches(result["batch"], kinds, say)
    return result


def counted(total, what, progress):
    for done in range(1, total + 1):
        progress(done, total, what)
        yield done


def step(count, value):
    next(count)
    return value


def acceptance(outputs, draft_steps):
    shares = [distinct_bigrams(out.ids) for out in outputs]
    return {**Acceptance.of(outputs, draft_steps).as_dict(), "interval": interval(outputs), "distinct_bigrams": sum(shares) / len(shares)}


def traced(engine, prompts, params, progress):
    """Traced rounds of each prompt; None where several GPUs share a round."""
    if engine.team and engine.device.type == "cuda":
        return None
    with Trace(engine) as trace:
        trace.rounds(prompts[0].prompt, params)         # what is captured or compiled now
        count = counted(len(prompts), "prompts looked into", progress)
        return [step(count, trace.rounds(one.prompt, params)) for one in prompts]


def inside(rounds, chosen):
    """Medians over rounds of milliseconds in all, drafting, verifying and the rest; on average distinct experts a layer, levels drafted."""
    every = [one for i in chosen for one in rounds[i]] if rounds else []
    if not every:
        return {"round_ms": None, "experts": None, "levels": None}
    parts = {"total": [r.total for r in every], "draft": [r.draft for r in every], "verify": [r.verify for r in every],
             "rest": [r.total - r.draft - r.verify for r in every]}
    experts = [r.experts for r in every if r.experts is not None]
    return {"round_ms": {name: round(1e3 * quantile(values, 0.5), 4) for name, values in parts.items()},
            "experts": round(sum(experts) / len(experts), 3) if experts else None,
            "levels": round(sum(r.levels for r in every) / len(every), 3)}


def bound(engine, result):
    """What a round must read, and the speed-up if that were all that takes time; nothing of trees of any size where no round was traced."""
    if engine.shape.adaptive and result["levels"] is None:
        return {"bytes_verify": None, "bytes_round": None, "speedup_ceiling": None}
    verify = target_bytes(engine, engine.shape.nodes + 1, result["experts"])
    size = verify + (engine.draft_steps if result["levels"] is None else result["levels"]) * draft_bytes(engine)
    length = result["acceptance_length"]
    return {"bytes_verify": verify, "bytes_round": size, "speedup_ceiling": length and length * result["bytes_token"] / size}


def describe(setting, rounds, chosen):
    outputs = [setting.outputs[i] for i in chosen]
    return {"prompts": len(chosen), **acceptance(outputs, setting.engine.draft_steps), **inside(rounds, chosen)}


def clock(plain, settings, prompts, params, repeats, progress):
    """Prompt by prompt, plain and every setting right after each other; who begins moves on with each repeat."""
    engines = [plain, *(setting.engine for setting in settings if setting.equal)]
    count = counted(len(prompts) * repeats * len(engines), "timed runs", progress)
    for repeat in range(repeats):
        rows = [[] for _ in engines]
        for one in prompts:
            first = repeat % len(engines)
            for which in [*range(first, len(engines)), *range(first)]:
                rows[which].append(step(count, timed(engines[which], one.prompt, params)))
        for setting, row in zip([setting for setting in settings if setting.equal], rows[1:]):
            setting.runs.append(list(zip(rows[0], row)))


def table(setting, value):
    """value(plain run, speculative run) of each repeat and prompt; None where a run ended at its first token."""
    return [[value(a, b) if a[0] > 1 and b[0] > 1 else None for a, b in row] for row in setting.runs]


def speedup(a, b):
    """Of the tokens after the first: the prefill is the same work in both."""
    return a[2] / (a[0] - 1) / (b[2] / (b[0] - 1))


VALUES = {
    "plain_tokens_per_s": lambda a, b: (a[0] - 1) / a[2],
    "speculative_tokens_per_s": lambda a, b: (b[0] - 1) / b[2],
    "speedup": speedup,
    "speedup_with_prefill": lambda a, b: (a[1] + a[2]) / a[0] / ((b[1] + b[2]) / b[0]),
}


def speeds(settings, kinds, described):
    """The figures of all kinds; those of each go into `described`. Each is a mean over prompts (readings.by_kind), spread over repeats."""
    result = {}
    for name, value in VALUES.items():
        found = by_kind(table(settings[0], value), kinds)
        if not found:
            raise MinispecError("bench: every prompt ended at its first token; nothing to compare; give other prompts, or --max-tokens of at least 2")
        result[name] = spread(mix(found))
        for kind, values in found.items():
            described[kind][name] = spread(values)
    for name in ("plain", "speculative"):
        speed = result[f"{name}_tokens_per_s"]
        result[f"{name}_ms_per_token"] = {q: round(1e3 / speed[of], 4) for q, of in (("median", "median"), ("p10", "p90"), ("p90", "p10"))}
    result["first_token_ms"] = spread([1e3 * b[1] for row in settings[0].runs for _, b in row])
    ratios = table(settings[0], speedup)
    each = {i: quantile(values, 0.5) for i in range(len(kinds)) if (values := [row[i] for row in ratios if row[i] is not None])}
    result["least"] = {"prompt": (least := min(each, key=each.get)), "speedup": round(each[least], 3)}
    return result


def swept(settings, kinds):
    """Each setting's speed-up a kind and over the mix; the best by the first, third, ... repeat, and what the others say of it."""
    entries, halves = [], []
    for setting in settings:
        found = by_kind(table(setting, speedup), kinds) if setting.runs else {}
        found = {"all": mix(found), **found} if found else {}
        entries.append({**setting.name, **Acceptance.of(setting.outputs, setting.engine.draft_steps).as_dict(), "equal": setting.equal,
                        "speedup": {kind: spread(values) for kind, values in found.items()}})
        halves.append({kind: [quantile(values[half::2], 0.5) for half in (0, 1)] for kind, values in found.items()})
    best = {}
    for kind in max(halves, key=len):
        which = max((i for i, half in enumerate(halves) if half), key=lambda i: halves[i][kind][0])
        chosen, reported = (round(value, 3) for value in halves[which][kind])
        best[kind] = {**settings[which].name, "setting": which, "chosen_at": chosen, "speedup": reported}
    return {"settings": entries, "best": best}


def together(plain, engine, reference, kinds, params, size, repeats, progress):
    """`size` requests at once, kinds mixed: tokens a second of all, prefill included. Ids against those of each prompt alone."""
    order = sorted(range(len(kinds)), key=lambda i: (kinds[:i].count(kinds[i]), i))
    groups = [order[at:at + size] for at in range(0, len(order) - size + 1, size)] or [(order * size)[:size]]
    count = counted(len(groups) * 2 * (1 + repeats), f"runs of {size} requests", progress)
    differences, ratios, rates = [], [], {plain: [], engine: []}
    for group in groups:
        for one in (plain, engine):
            for i, out in zip(group, step(count, one.generate([reference[i].prompt_ids for i in group], params))):
                found = difference(engine, out.prompt_ids, reference[i].ids, out.ids, params)
                differences += [{"prompt": i, "speculative": one is engine, **found}] if found else []
    equal = all(one["tie"] for one in differences)
    for repeat in range(repeats if equal else 0):
        row = []
        for group in groups:
            speed = {}
            for one in ((plain, engine), (engine, plain))[repeat % 2]:
                began = perf_counter()
                outputs = one.generate([reference[i].prompt_ids for i in group], params)
                speed[one] = step(count, sum(len(out.ids) for out in outputs) / (perf_counter() - began))
                rates[one].append(speed[one])
            row.append(speed[engine] / speed[plain])
        ratios.append(quantile(row, 0.5))
    found = {} if not equal else {"plain_tokens_per_s": spread(rates[plain]), "speculative_tokens_per_s": spread(rates[engine]),
                                  "speedup": spread(ratios)}
    return {"batch": size, "groups": len(groups), "equal": equal, "differences": differences, **found}

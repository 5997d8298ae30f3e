"""The report of a comparison, line by line: say(line)."""
from minispec.device import size
from minispec.stats import DEFINITION


def label(one):
    """A setting, or anything that names one: draft_steps/topk/nodes."""
    return f"{one['draft_steps']}/{one['topk']}/{one['nodes']}"


def place(kinds, index):
    """What a user finds a prompt by: its number in the file, and its kind."""
    return f"prompt {index + 1}" + f" ({kinds[index]})" * bool(kinds[index])


def grid(rows, say):
    """Rows of cells, the first column to the left, the others to the right, each as wide as its widest."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip())


def number(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def many(count, what):
    return f"{count} {what}{'s' * (count != 1)}"


def range_of(found):
    return f"{found['p10']:.2f}..{found['p90']:.2f}"


def opening(result, kinds, say):
    machine, sampling = result["environment"], result["sampling"]
    where = machine["device"] if machine["device"] != "cpu" else f"{machine['cpu']}, {many(machine['threads'], 'thread')}"
    chosen = f"temperature {sampling['temperature']:g}, seed {sampling['seed']}" if sampling["temperature"] else "greedy"
    named = len(set(kinds) - {""})
    say(f"{many(len(kinds), 'prompt')}{f' of ' + many(named, 'kind') if named else ''}, at most {result['max_tokens']} tokens each, {chosen}; "
        f"{many(result['repeats'], 'repeat')}; {where}, {result['dtype']}; "
        f"draft_steps {result['draft_steps']}, topk {result['topk']}, nodes {result['nodes']}")
    read, rate, each = result["bytes_token"], result["copy_bytes_per_s"], " on each rank" * (result["ranks"] > 1)
    say(f"ceiling, plain: a token reads {size(read)} of weights{each}, a copy moves {rate / 1e9:.1f} GB/s here: {1e3 * read / rate:.3g} ms, "
        f"{rate / read:.0f} tokens/s (weights that stay in a cache can pass it)")


def differences(found, kinds, say, who=""):
    """The first of each sort: what is not a tie comes first."""
    for tie in (False, True):
        if parted := [one for one in found if one["tie"] is tie]:
            one, more = parted[0], f"; so do {len(parted) - 1} more" * (len(parted) > 1)
            say(f"{who}{place(kinds, one['prompt'])}: ids differ from token {one['at']} on ({one['plain']} plain, {one['other']} speculative), "
                f"the two best are {one['gap']:.1e} apart there: {'a tie' if tie else 'not a tie'}{more}")


def ids(settings, kinds, say):
    for setting in settings:
        differences(setting.differences, kinds, say, f"{label(setting.name)}: " * (len(settings) > 1))
    wrong = [label(setting.name) for setting in settings if not setting.equal]
    if wrong:
        say(f"ids: plain and speculative differ by more than a tie: no speed-up{' of ' + ', '.join(wrong) if len(settings) > 1 else ''}")
    else:
        ties = sum(len(setting.differences) for setting in settings)
        say(f"ids: plain and speculative are equal on {many(len(kinds), 'prompt')}"
            + f" in each of {len(settings)} settings" * (len(settings) > 1) + f", up to {many(ties, 'tie')}" * bool(ties))


def ceiling(engine, result, say):
    if result["speedup_ceiling"] is None:
        return
    one, verify, whole, rate = (result[name] for name in ("bytes_token", "bytes_verify", "bytes_round", "copy_bytes_per_s"))
    experts = "as many experts as uniform routing takes" if result["experts"] is None else f"{result['experts']:.1f} experts a layer"
    say(f"ceiling, speculative: a round reads {size(whole)} ({size(verify)} to verify, with {experts}; {size(whole - verify)} to draft"
        + f" {result['levels']:.1f} levels" * (result["levels"] is not None) + ") "
        f"for {result['acceptance_length']:.2f} tokens: {result['acceptance_length'] * rate / whole:.0f} tokens/s, "
        f"{result['speedup_ceiling']:.2f} times plain if only memory took time")


def tables(result, say):
    kinds = {kind or "no kind": one for kind, one in result["kinds"].items()}
    every = {**kinds, "all": result} if len(kinds) > 1 else {"all": result}
    if "speedup" in result:
        say("")
        rows = [["tokens/s", "plain", "speculative", "speed-up", "p10..p90", "", "ms a round", "draft", "verify", "rest"]]
        for kind, one in every.items():
            times = one["round_ms"] or {}
            rows.append([kind, *(f"{one[name]['median']:.0f}" for name in ("plain_tokens_per_s", "speculative_tokens_per_s")),
                         f"{one['speedup']['median']:.2f}", range_of(one["speedup"]), "",
                         *(number(times.get(name)) for name in ("total", "draft", "verify", "rest"))])
        grid(rows, say)
        least = result["least"]
        say(f"harmonic mean over prompts, median and spread over repeats; tokens after the first; all: equally many tokens of each kind; least: "
            f"{least['speedup']:.2f}, prompt {least['prompt'] + 1}; first token after {result['first_token_ms']['median']:.1f} ms")
    say("")
    depths = len(result["by_depth"])
    rows = [["acceptance", "length", "95%", *(f"depth {d}" if d == 1 else str(d) for d in range(1, depths + 1)), "experts a layer"]]
    for kind, one in every.items():
        sure = f"{one['interval'][0]:.2f}..{one['interval'][1]:.2f}" if one["interval"] else "-"
        rows.append([kind, number(one["acceptance_length"]), sure, *(number(rate, 3) for rate in one["by_depth"]), number(one["experts"], 1)])
    grid(rows, say)
    say(f"length: {DEFINITION}; 95%: bootstrap over prompts; depth: of the rounds in which every depth before was accepted, the share in which "
        "this one was" + ", drafted or not: auto drafts less where more does not pay" * (result["nodes"] == "auto")
        + "; experts: distinct ones that the verified rows took")


def loops(result, prompts, say):
    """A warning that names the outputs that repeat themselves, by kind."""
    if not result["loops"]:
        return
    say("")
    say(f"warning: {len(result['loops'])} of {len(prompts)} outputs are repetition loops (under half of their adjacent pairs of tokens are "
        "distinct), which flatters acceptance:")
    for kind in dict.fromkeys(prompts[i].kind for i in result["loops"]):
        say(f"  {kind or 'prompts'}: " + ", ".join(str(i + 1) for i in result["loops"] if prompts[i].kind == kind))


def sweep(found, say):
    kinds = list(found["best"])
    if not kinds:
        return
    say("")
    rows = [["steps/topk/nodes", "length", *kinds]]
    for i, one in enumerate(found["settings"]):
        cells = [f"{one['speedup'][kind]['median']:.2f}{'*' if found['best'][kind]['setting'] == i else ' '}" if one["speedup"] else "-"
                 for kind in kinds]
        rows.append([label(one), number(one["acceptance_length"]), *cells])
    grid(rows, say)
    say("speed-up by setting; * the best by the first, third, ... repeat; on the others, which had no say:")
    for kind, best in found["best"].items():
        say(f"  {kind or 'no kind'}: {label(best)}, {best['speedup']:.2f} times plain ({best['chosen_at']:.2f} where it was chosen)")


def batches(found, kinds, say):
    say("")
    rows = [["requests at once", "plain", "speculative", "speed-up", "p10..p90"]]
    for one in found:
        differences([d for d in one["differences"] if not d["tie"]], kinds, say, f"{one['batch']} at once: ")
        rows.append([str(one["batch"]), *(f"{one[name]['median']:.0f}" for name in ("plain_tokens_per_s", "speculative_tokens_per_s")),
                     f"{one['speedup']['median']:.2f}", range_of(one["speedup"])] if one["equal"] else
                    [str(one["batch"]), "-", "-", "ids differ", "-"])
    grid(rows, say)
    say("tokens/s of all requests together, prefill included; kinds mixed")

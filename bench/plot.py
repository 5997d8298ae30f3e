"""The picture of a comparison; needs matplotlib."""
from pathlib import Path

from minispec.bench.report import label
from minispec.errors import MinispecError


def figure(file):
    """An empty figure, or a MinispecError, asked for before anything is measured: without matplotlib, or a format that it cannot write."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MinispecError(f"--plot needs matplotlib ({error}): pip install 'minispec[plot]', or leave --plot out") from error
    made = Figure(layout="constrained")
    known = made.canvas.get_supported_filetypes()
    if Path(file).suffix[1:].lower() not in known:
        raise MinispecError(f"--plot {file}: the name says no known format; end it in .png (or one of {', '.join(sorted(known))})")
    return made


def draw(made, file, result):
    """Acceptance by depth; speed-up by setting, by kind where nothing was swept; speed-up by requests at once where measured."""
    kinds = {kind: one for kind, one in result["kinds"].items() if len(result["kinds"]) > 1}
    bars = bars_of(result, kinds)
    panels = ["acceptance"] + ["speed"] * bool(bars) + ["batch"] * bool(result.get("batch"))
    made.set_size_inches(5.2 * len(panels), max(4.2, 1.6 + 0.26 * len(bars)))
    axes = dict(zip(panels, made.subplots(1, len(panels), squeeze=False)[0]))

    depths = range(1, len(result["by_depth"]) + 1)
    for kind, one in kinds.items():
        axes["acceptance"].plot(depths, one["by_depth"], marker="o", markersize=3, linewidth=1, label=kind or "no kind")
    axes["acceptance"].plot(depths, result["by_depth"], marker="o", color="black", linewidth=2, label="all")
    axes["acceptance"].set(title=f"acceptance by depth (draft_steps/topk/nodes {label(result)})", xlabel="depth",
                           ylabel="accepted, given every depth before was", ylim=(0, 1.02), xticks=list(depths))
    axes["acceptance"].legend(loc="lower left", fontsize=8)
    if bars:
        names, found, colours = zip(*bars)
        middle = [one["median"] for one in found]
        spread = [[max(0, one["median"] - one["p10"]) for one in found], [max(0, one["p90"] - one["median"]) for one in found]]
        axes["speed"].barh(range(len(names)), middle, xerr=spread, color=colours, error_kw={"elinewidth": 1, "capsize": 2})
        title, orange = ("setting (draft_steps/topk/nodes)", "best") if result.get("sweep") else ("kind", "all")
        axes["speed"].set(title=f"speed-up by {title}", xlabel=f"times plain; p10..p90 over repeats; orange: {orange}",
                          yticks=range(len(names)), yticklabels=names)
        axes["speed"].axvline(1, color="grey", linewidth=1, linestyle="--")
        axes["speed"].invert_yaxis()
    if result.get("batch"):
        at = [one for one in result["batch"] if one["equal"]]
        axes["batch"].errorbar([str(one["batch"]) for one in at], [one["speedup"]["median"] for one in at],
                               [[max(0, one["speedup"]["median"] - one["speedup"]["p10"]) for one in at],
                                [max(0, one["speedup"]["p90"] - one["speedup"]["median"]) for one in at]], marker="o", capsize=2)
        axes["batch"].axhline(1, color="grey", linewidth=1, linestyle="--")
        axes["batch"].set(title="speed-up by requests at once", xlabel="requests at once", ylabel="times plain")
        axes["batch"].set_ylim(bottom=0)
    for axis in axes.values():
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    made.savefig(file, dpi=150)


def bars_of(result, kinds):
    """(name, spread, colour) of each bar; the best setting over the mix, or all kinds together, in a colour of its own."""
    if "speedup" not in result:
        return []
    if "sweep" in result:
        best = result["sweep"]["best"]["all"]["setting"]
        return [(label(one), one["speedup"]["all"], "tab:orange" if i == best else "tab:blue")
                for i, one in enumerate(result["sweep"]["settings"]) if one["speedup"]]
    return [*((kind or "no kind", one["speedup"], "tab:blue") for kind, one in kinds.items()), ("all", result["speedup"], "tab:orange")]

"""minispec bench: its statistics against exact values, its looks into rounds against what the models were asked, its reports and refusals."""
import itertools
import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from minispec import Engine, Output, SamplingParams, cli, speculate
from minispec import draft as drafts
from minispec import engine as engines
from minispec import target as targets
from minispec.bench import compare, readings, report
from minispec.bench.readings import Prompt, by_kind, difference, interval, mix, read_prompts, target_bytes
from minispec.bench.trace import Trace
from minispec.errors import MinispecError
from minispec.stats import quantile

from . import oracle
from .mutants import PROMPT, greedy
from .test_cli import run  # noqa: F401

KINDS = [("cycles", [7, 301, 45]), ("cycles", [12, 5]), ("jumps", [500, 4, 88]), ("jumps", [33])]


@pytest.fixture
def engine(target, draft):
    with Engine(target, draft, draft_steps=3, topk=3, nodes=5) as made:
        yield made


@pytest.fixture
def bench(run, target, draft, tmp_path):  # noqa: F811
    """bench(*arguments) -> the command run on a tiny pair and prompts of two kinds, and its last line as `result`."""
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"kind": kind, "prompt_ids": ids}) + "\n" for kind, ids in KINDS))

    def call(*arguments):
        done = run("bench", "--target", target, "--draft", draft, "--prompts", file, "--max-tokens", 12, "--draft-steps", 3, *arguments)
        if done.status < 2:
            done.result = json.loads(done.out.splitlines()[-1])
        return done
    return call


def output(ids, accepted):
    return Output([], list(range(ids)), None, "length", accepted, None)


def test_interval_is_the_bootstrap_over_prompts():
    """All 27 equally likely draws of three prompts, against 2,000 drawn ones."""
    parts = [(9, 4), (12, 3), (5, 5)]                               # (emitted, rounds)
    outputs = [output(1 + emitted, [0] * rounds) for emitted, rounds in parts]
    exact = [sum(e for e, _ in draw) / sum(r for _, r in draw) for draw in itertools.product(parts, repeat=3)]
    low, high = interval(outputs)
    assert low == pytest.approx(min(exact), abs=1e-3) and high == pytest.approx(max(exact), abs=1e-3)       # each has 1 in 27 > 2.5%
    assert interval(outputs) == [low, high] and interval([*outputs, output(1, [])]) == [low, high]
    assert interval(outputs[:1]) is None and interval([output(5, [1, 1])] * 4) == [2, 2]


def test_speeds_combine_as_times_do_over_prompts_and_over_kinds():
    kinds = ["a", "b", "a", "a", "c"]
    table = [[1.0, 2.0, 3.0, 8.0, None], [2.0, 6.0, None, 4.0, None]]
    found = by_kind(table, kinds)
    assert found == {"a": [3 / (1 + 1 / 3 + 1 / 8), 2 / (1 / 2 + 1 / 4)], "b": [2.0, 6.0]}
    assert mix(found) == pytest.approx([2 / ((1 + 1 / 3 + 1 / 8) / 3 + 1 / 2), 2 / ((1 / 2 + 1 / 4) / 2 + 1 / 6)])


class Stub:
    """A Setting whose runs take the given seconds: plain 10, speculative by repeat and kind."""

    def __init__(self, nodes, seconds):
        self.name, self.equal, self.outputs = {"draft_steps": 3, "topk": 2, "nodes": nodes}, True, [output(5, [1, 1])]
        self.engine = SimpleNamespace(draft_steps=3)
        self.runs = [[((11, 1.0, 10.0), (11, 1.0, value)) for value in row] for row in seconds]


def test_a_sweep_chooses_on_one_half_of_the_repeats_and_reports_the_other():
    lucky = Stub(1, [[2, 5], [10, 5], [2, 5], [10, 5]])             # five times plain where it is chosen, once on the others
    steady = Stub(2, [[4, 4], [4, 4], [4, 4], [4, 4]])
    found = compare.swept([lucky, steady], ["x", "y"])
    assert found["best"]["x"] == {**lucky.name, "setting": 0, "chosen_at": 5.0, "speedup": 1.0}
    assert found["best"]["y"] == {**steady.name, "setting": 1, "chosen_at": 2.5, "speedup": 2.5}
    assert found["best"]["all"]["chosen_at"] == pytest.approx(2 / (1 / 5 + 1 / 2), abs=1e-3) and found["best"]["all"]["setting"] == 0
    assert found["best"]["all"]["speedup"] == pytest.approx(2 / (1 / 1 + 1 / 2), abs=1e-3)
    assert [one["speedup"]["x"]["median"] for one in found["settings"]] == [3.0, 2.5]
    said = []
    report.sweep(found, said.append)
    assert "3/2/1" in said[2] and said[2].count("*") == 2 and said[3].count("*") == 1
    assert any("x: 3/2/1, 1.00 times plain (5.00 where it was chosen)" in line for line in said)


def test_shapes_of_a_sweep_are_those_that_can_be():
    assert set(compare.shapes((2, 3), (1, 2), (2, 3, 9))) == {(2, 1, 2), (3, 1, 2), (3, 1, 3), (2, 2, 2), (2, 2, 3), (3, 2, 2), (3, 2, 3), (3, 2, 9)}
    default = compare.shapes()
    assert (6, 1, 6) in default and (6, 4, 6) in default and (6, 4, 12) in default and (1, 4, 1) not in default
    with pytest.raises(MinispecError, match="no setting can be"):
        compare.shapes((1,), (1,), (5,))


def test_nodes_auto_is_one_more_setting():
    assert [one for one in compare.shapes((2, 4), (3,)) if one[2] == "auto"] == [(2, 3, "auto"), (4, 3, "auto")]
    assert compare.shapes((4,), (2,), ("auto",)) == [(4, 2, "auto")]


def test_the_shipped_prompts_are_five_kinds_of_eight():
    prompts = read_prompts()
    kinds = [one.kind for one in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {kind: 8 for kind in (
        "new functions", "classes", "tests", "boilerplate", "repetitive text")}
    assert len({one.prompt for one in prompts}) == 40 and all(20 < len(one.prompt) < 1000 for one in prompts)
    assert [one.kind for one in read_prompts(per_kind=1)] == list(dict.fromkeys(kinds))
    assert readings.read_jsonl() == [one.prompt for one in prompts]


@pytest.mark.parametrize("params", [greedy(20), SamplingParams(max_tokens=20, temperature=0.8, seed=4, top_p=0.95, ignore_eos=True)],
                         ids=["greedy", "sampled"])
def test_a_difference_shows_where_and_by_how_much(engine, params):
    """The gap is the one that tests/oracle.py computes with its own noise, and a tie is what is closer than fp32 can tell."""
    out = engine.generate(PROMPT, params)
    wrong = out.ids[:9] + [(out.ids[9] + 1) % 512] + out.ids[10:]
    found = difference(engine, out.prompt_ids, out.ids, wrong, params)
    gap = oracle.choice_gap(out.prompt_ids, out.ids[:9], engine, params)
    assert found == {"at": 9, "plain": [out.ids[9]], "other": [wrong[9]], "gap": pytest.approx(gap, abs=1e-5), "tie": False} and gap > 1e-4
    assert difference(engine, out.prompt_ids, out.ids, list(out.ids), params) is None
    assert difference(engine, out.prompt_ids, out.ids, out.ids[:4], params)["at"] == 4
    with torch.inference_mode():                            # two ids that no logits can tell apart
        engine.target.head[wrong[9]] = engine.target.head[out.ids[9]]
    if not params.temperature:
        assert difference(engine, out.prompt_ids, out.ids, wrong, params)["tie"]


def test_reshaped_is_a_fresh_engine_of_that_shape(engine, target, draft):
    """Weights and caches are shared; streams of both may be read in turns, and each keeps its own captured states."""
    with Engine(target, draft, draft_steps=2, topk=4, nodes=9) as fresh:
        expected, own = fresh.generate([PROMPT, [12, 5]], greedy(24)), engine.generate([PROMPT, [12, 5]], greedy(24))
    other = engine.reshaped(2, 4, 9)
    first, second = engine.stream([PROMPT, [12, 5]], greedy(24)), other.stream([PROMPT, [12, 5]], greedy(24))
    events = [(next(first), next(second)) for _ in range(4)]
    assert other.target is engine.target and other.draft is engine.draft
    for rest, begun, outputs in ((first, [a for a, _ in events], own), (second, [b for _, b in events], expected)):
        every = [*begun, *rest]
        for i, out in enumerate(outputs):
            assert [token for event in every if event.index == i for token in event.ids] == out.ids
            assert [event.accepted for event in every if event.index == i][1:] == out.accepted
    assert expected[0].ids == own[0].ids and expected[0].accepted != own[0].accepted
    oracle.assert_mixed(expected, 2)
    engine.scheduler.check()
    with pytest.raises(MinispecError, match="topk=400"):
        engine.reshaped(1, 400)
    with Engine(target, "none") as plain, pytest.raises(MinispecError, match="no draft"):
        plain.reshaped(3)


def test_trace_counts_what_the_router_chose(engine, monkeypatch):
    """Against a record of the router's own calls; a row of plain decoding takes exactly its k experts. Nothing of it stays."""
    before, calls, route = engine.generate(PROMPT, greedy(30)), [], targets.ffn_front

    def recorded(*args, **kwargs):
        normed, ids, weights, inner = route(*args, **kwargs)
        calls.append({token for row in ids.tolist() for token in row})
        return normed, ids, weights, inner

    monkeypatch.setattr(targets, "ffn_front", recorded)
    speculator = engine.runner.speculator
    with Trace(engine) as trace:
        rounds = trace.rounds(PROMPT, greedy(30))
    layers = sum(engine.target_config.is_moe(i) for i in range(engine.target_config.num_hidden_layers))
    sizes = [len(chosen) for chosen in calls[layers:]]                                                      # the prompt was the first
    assert len(rounds) == len(before.accepted) and len(sizes) == layers * len(rounds)
    assert [one.experts for one in rounds] == [sum(sizes[i:i + layers]) / layers for i in range(0, len(sizes), layers)]
    assert all(one.draft > 0 and one.verify > 0 and one.total > one.draft + one.verify for one in rounds)
    k = engine.target_config.num_experts_per_tok
    assert max(one.experts for one in rounds) > k
    with Trace(engine.plain()) as trace:
        rounds = trace.rounds(PROMPT, greedy(8))
    assert [one.experts for one in rounds] == [k] * 7 and all(one.draft == 0 for one in rounds)
    assert engine.runner.speculator is speculator and engine.target.trace is None and engine.generate(PROMPT, greedy(30)) == before


def test_what_is_looked_into_teaches_an_adaptive_tree_nothing(engine):
    """Its rounds take longer. What was learnt before stays."""
    auto = engine.reshaped(3, 3, "auto")
    auto.generate(PROMPT, greedy(30))
    (curve,), before = auto.runner.adaptive.curves.values(), {}
    before.update((name, repr(value)) for name, value in vars(curve).items())
    with Trace(auto) as trace:
        assert len(trace.rounds(PROMPT, greedy(30))) > 4 and curve.age > int(before["age"])
    (curve,) = auto.runner.adaptive.curves.values()
    assert {name: repr(value) for name, value in vars(curve).items()} == before


@pytest.mark.parametrize("nodes", [5, "auto"])
def test_levels_of_a_round_are_those_that_the_head_was_asked_for(engine, nodes, monkeypatch):
    """Against a record of the head's own calls; the ceiling counts the draft's weights once for each."""
    calls, head, other = [], drafts.draft_logits, engine.reshaped(3, 3, nodes)
    monkeypatch.setattr(drafts, "draft_logits", lambda *args: calls.append(1) or head(*args))
    with Trace(other) as trace:
        rounds = trace.rounds(PROMPT, greedy(30))
    assert sum(one.levels for one in rounds) == len(calls) and (nodes == "auto") == any(one.levels == 0 for one in rounds)
    result = {"bytes_token": 8, "acceptance_length": 2.0, **compare.inside([rounds], [0])}
    found = compare.bound(other, result)
    assert found["bytes_round"] - found["bytes_verify"] == pytest.approx(len(calls) / len(rounds) * readings.draft_bytes(other), rel=1e-3)
    nothing = compare.bound(other, {"bytes_token": 8, "acceptance_length": 2.0, **compare.inside(None, [])})
    assert (nothing["speedup_ceiling"] is None) == (nodes == "auto")


def test_bytes_of_a_forward(engine):
    """All experts: every parameter but the embedding; k of E: less the routed tensors' share. One row takes k, many take E."""
    c, parameters = engine.target_config, engine.target.parameters
    whole = sum(x.nbytes for name, x in parameters.items() if name != "embed")
    expert = (3 * c.moe_intermediate_size * c.hidden_size) * 4 * (c.num_hidden_layers - 1)
    assert target_bytes(engine, 4, c.n_routed_experts) == whole and target_bytes(engine, 4, 3.5) == whole - (c.n_routed_experts - 3.5) * expert
    assert target_bytes(engine, 1) == whole - (c.n_routed_experts - c.num_experts_per_tok) * expert
    assert target_bytes(engine, 2) == pytest.approx(target_bytes(engine, 2, 2 + 2 * 6 / 8))       # of 8, the second row's 2 are new with 6 in 8


def plot(folder):
    return ("--plot", folder / "shown.png") if find_spec("matplotlib") else ()


def drawn(folder):
    assert not find_spec("matplotlib") or (folder / "shown.png").read_bytes().startswith(b"\x89PNG")


def test_bench_reports_kinds_and_ends_in_json(bench, tmp_path):
    done = bench("--repeats", 2, "--json", tmp_path / "result.json", *plot(tmp_path))
    lines, result = done.out.splitlines(), done.result
    assert done.status == 0 and result == json.loads((tmp_path / "result.json").read_text())
    assert lines[0].startswith("4 prompts of 2 kinds, at most 12 tokens each, greedy; 2 repeats") and lines[1].startswith("ceiling, plain: ")
    assert lines[2].startswith("ids: plain and speculative are equal on 4 prompts") and lines[3].startswith("ceiling, speculative: ")
    assert [line.split("  ")[0] for line in lines[6:9]] == ["cycles", "jumps", "all"]
    for one in (result, *result["kinds"].values()):
        assert one["interval"][0] <= one["acceptance_length"] <= one["interval"][1] and len(one["by_depth"]) == 3
        assert set(one["round_ms"]) == {"total", "draft", "verify", "rest"} and 2 <= one["experts"] <= 8
        assert one["speedup"]["p10"] <= one["speedup"]["median"] <= one["speedup"]["p90"]
    assert list(result["kinds"]) == ["cycles", "jumps"] and sum(one["rounds"] for one in result["kinds"].values()) == result["rounds"]
    assert result["equal"] and (result["draft_steps"], result["topk"], result["nodes"], result["repeats"]) == (3, 4, 3, 2)
    assert result["loops"] == [] and "warning" not in done.out
    drawn(tmp_path)


def test_bench_sweeps_and_batches(bench, target, draft, tmp_path):
    done = bench("--repeats", 2, "--sweep-draft-steps", "1,3", "--sweep-topk", "2", "--batch", "1,3", "--temperature", 0.5, *plot(tmp_path))
    result = done.result
    names = [(one["draft_steps"], one["topk"], one["nodes"]) for one in result["sweep"]["settings"]]
    assert done.status == 0 and names == [(3, 4, 3), (1, 2, 2), (1, 2, "auto"), (3, 2, 3), (3, 2, 6), (3, 2, "auto")]
    assert "equal on 4 prompts in each of 6 settings" in done.out and "temperature 0.5, seed 0" in done.out
    assert set(result["sweep"]["best"]) == {"all", "cycles", "jumps"}
    with Engine(target, draft, draft_steps=3, topk=2, nodes=6) as engine:
        outputs = [engine.generate(ids, SamplingParams(max_tokens=12, temperature=0.5)) for _, ids in KINDS]
    assert result["sweep"]["settings"][-2]["rounds"] == sum(len(out.accepted) for out in outputs)
    assert [(one["batch"], one["groups"], one["equal"]) for one in result["batch"]] == [(1, 4, True), (3, 1, True)]
    assert "requests at once" in done.out and done.out.splitlines()[-1].startswith("{")
    drawn(tmp_path)


def wrong_accept(accept):
    """accept with a choice of ids that is one too high, in rounds that verify drafts: plain decoding stays right."""
    def accepted(tree, choice, logprobs, finite):
        return accept(tree, (choice + 1) % 512 if tree.laid.tokens.shape[1] > 1 else choice, logprobs, finite)
    return accepted


def test_bench_prints_no_speedup_when_ids_differ(bench, monkeypatch):
    monkeypatch.setattr(speculate, "accept", wrong_accept(speculate.accept))
    done = bench("--sweep-draft-steps", "2", "--batch", "2", "--repeats", 2)
    assert done.status == 1 and "prompt 1 (cycles): ids differ from token 1 on" in done.out and "not a tie; so do 3 more" in done.out
    assert "no speed-up of 3/4/3" in done.out and "speedup" not in done.result and "times plain:" not in done.out
    assert not any("speed-up  " in line or "tokens/s  " in line for line in done.out.splitlines() if "requests" not in line)
    assert all(not one["speedup"] for one in done.result["sweep"]["settings"]) and "speedup" not in done.result["batch"][0]


def test_bench_goes_on_past_a_tie_and_shows_it(bench, monkeypatch):
    real = compare.difference
    monkeypatch.setattr(speculate, "accept", wrong_accept(speculate.accept))
    monkeypatch.setattr(compare, "difference", lambda *args: (found := real(*args)) and {**found, "gap": 5e-5, "tie": True})
    done = bench("--repeats", 1)
    assert done.status == 0 and "apart there: a tie; so do 3 more" in done.out and "up to 4 ties" in done.out
    assert done.result["equal"] and done.result["speedup"]["median"] > 0 and len(done.result["differences"]) == 4


def test_bench_names_the_outputs_that_loop(engine):
    """A bias that leaves one id is a loop; the warning names it by number and kind."""
    said, loop = [], SamplingParams(max_tokens=12, logit_bias={45: 1000}, ignore_eos=True)
    result = compare.compare(engine, [Prompt(ids, kind) for kind, ids in KINDS], loop, 1, said.append, lambda *_: None)
    warning = said.index(next(line for line in said if line.startswith("warning: 4 of 4 outputs are repetition loops")))
    assert said[warning + 1:warning + 3] == ["  cycles: 1, 2", "  jumps: 3, 4"] and result["loops"] == [0, 1, 2, 3]


def test_bench_without_matplotlib_is_one_line_before_anything_is_loaded(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "Engine", lambda **_: pytest.fail("loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = bench("--plot", tmp_path / "shown.png")
    assert done.status == 2 and "pip install 'minispec[plot]'" in done.err.splitlines()[-1] and not (tmp_path / "shown.png").exists()


@pytest.mark.parametrize("arguments, says", [
    (("--plot", "/nonexistent/x.png"), "/nonexistent/x.png: No such file"),
    (("--json", "/nonexistent/x.json"), "/nonexistent/x.json: No such file"),
    (("--sweep", "--repeats", "1"), "--repeats of at least 2"),
    (("--sweep-draft-steps", "0"), "'0' is not whole numbers"),
    (("--sweep-nodes", "4,many"), "'4,many' is neither"),
    (("--sweep-draft-steps", "1", "--sweep-topk", "1", "--sweep-nodes", "9"), "no setting can be"),
    (("--batch", "1,0"), "'1,0' is not"),
    (("--batch", "2,4", "--max-batch", "2"), "--max-batch of at least that"),
    (("--per-kind", "0"), "per-kind"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_bench_refuses_in_one_line(bench, arguments, says):
    done = bench(*arguments)
    assert done.status == 2 and done.out == "" and says in done.err.splitlines()[-1]
    assert sum("error" in line for line in done.err.splitlines()) == 1


def test_bench_refuses_a_plot_of_no_format(bench, tmp_path):
    pytest.importorskip("matplotlib")
    done = bench("--plot", tmp_path / "shown.xyz")
    assert done.status == 2 and "end it in .png" in done.err.splitlines()[-1] and not (tmp_path / "shown.xyz").exists()


def test_bench_refuses_bad_prompt_files(run, tmp_path):  # noqa: F811
    file = tmp_path / "prompts.jsonl"
    for text in ("", "not json\n", '{"text": "x"}\n', "[1]\n", '{"prompt": 5}', "null", "true", '{"prompt": []}', '["prompt", "x"]', '"prompt"',
                 '{"prompt_ids": {"1": 2}}', '{"prompt_ids": "abc"}', '{"prompt_ids": ["a"]}', '{"prompt_ids": [true]}', "[" * 200_000,
                 '{"prompt": "x", "kind": 3}', '{"prompt": "x", "kind": null}'):
        file.write_text(text)
        done = run("bench", "--prompts", file)
        assert done.status == 2 and str(file) in done.err.splitlines()[-1]


def test_quantiles_of_two_are_between_them():
    assert quantile([1.0, 2.0], 0.1) == pytest.approx(1.1) and readings.spread([2.0, 1.0]) == {"median": 1.5, "p10": 1.1, "p90": 1.9}


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys):
    """It leaves no terminal state behind, and a line that comes in between takes its place."""
    now = [100.0]
    monkeypatch.setattr(cli, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = cli.Progress()
    for done in (1, 2, 4):
        progress(done, 4, "runs")
        now[0] += 3
    cli.note("said")
    assert capsys.readouterr().err.replace("\r\x1b[K", "|") == (
        f"|minispec: [{'#' * 7}{'-' * 23}] 1 of 4 runs  |minispec: [{'#' * 15}{'-' * 15}] 2 of 4 runs  6 s left"
        f"|minispec: [{'#' * 30}] 4 of 4 runs  0 s left\n|minispec: said\n")

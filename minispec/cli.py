"""The command line. Only results go to stdout; what it is doing, load reports, progress and errors go to stderr.

Exit status: 0; 1 when bench finds unequal ids; 2 on bad input or when a rank ends, with one line that begins `minispec: error:`; 130 on Ctrl-C.
"""
import json
import os
import signal
import sys
from pathlib import Path
from time import perf_counter

import click

from minispec import __version__
from minispec.errors import MinispecError
from minispec.fields import printable
from minispec.launch import environment
from minispec.options import BENCH, CHOICE, DEVICE, DIALECT, ENGINE, IDS, MEMORY, MODELS, PROMPTS, RANKS, SAMPLING, stacked
from minispec.params import SamplingParams
from minispec.printer import Printer
from minispec.prompts import read_prompts
from minispec.stats import Acceptance, gather


def note(line):
    click.echo("\r\x1b[K" * terminal() + f"minispec: {printable(line)}", err=True)       # a bar may stand there


def terminal():
    return sys.stderr is not None and sys.stderr.isatty()


def given(options):
    """The options that were set on the command line: the rest keeps the default of what they are passed to."""
    return {name: value for name, value in options.items() if value is not None and value != ()}


class Progress:
    """A bar on a terminal; elsewhere a line every two seconds."""

    def __init__(self):
        self.last = self.began = perf_counter()

    def __call__(self, done, total, what):
        now = perf_counter()
        if terminal():
            self.began = now if done == 1 else self.began
            filled, left = 30 * done // total, (now - self.began) / max(done - 1, 1) * (total - done)
            rest = f"{left:.0f} s left" if done > 1 else ""
            click.echo(f"\r\x1b[Kminispec: [{'#' * filled}{'-' * (30 - filled)}] {done} of {total} {what}  {rest}", err=True, nl=done == total)
        elif now - self.last > 2:
            note(f"{done} of {total} {what}")
            self.last = now


def serve():
    """Started by torchrun as a rank above 0: mirrors rank 0 from here on."""
    if (world := environment()) and world[0]:
        from minispec.engine import Engine
        Engine()


def open_engine(**options):
    if options["draft"] == "none" and (options["draft_steps"] or options["topk"]):
        raise MinispecError("--draft-steps and --topk are about a draft, and --draft none leaves it out: drop one or the other")
    note(f"loading {options.get('target') or 'the default target'}, draft {options.get('draft') or 'of the default pair'}")
    from minispec.engine import Engine

    began = perf_counter()
    engine = Engine(**given(options), progress=Progress())
    for line in engine.report:
        note(line)
    note(f"loaded in {perf_counter() - began:.1f} s")
    return engine


WORDS = """Words: a token is an id; a node a token in a draft tree, whose root is the pending true token; a row one line of a forward; a
position a token's absolute place; a slot a place in a cache; the root's depth is 0. draft-steps: levels of the tree. topk: children
tried a node. nodes: draft tokens verified a round, the root excluded. accepted: draft tokens only. emitted: accepted + 1. Acceptance
length: emitted tokens a round; the prefill's token is not counted."""


@click.group(epilog=WORDS, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="minispec")
def commands():
    """EAGLE-3 speculative decoding for mixture-of-experts models of the DeepSeek-V3 family."""


@commands.command(epilog=WORDS)
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="Text to continue, - for standard input; may be repeated.")
@click.option("--prompt-file", "files", multiple=True, metavar="FILE", help="A file that is one prompt; may be repeated.")
@click.option("--prompt-ids", "ids", multiple=True, type=IDS, help="A prompt as token ids; may be repeated.")
@click.option("--chat", is_flag=True, help="Put each prompt through the chat template as one user message.")
@stacked(*SAMPLING, *ENGINE)
@click.option("--stats", is_flag=True, help="Acceptance and speed, on stderr.")
@click.option("--show-draft", is_flag=True, help="Mark accepted draft tokens: green on a terminal, [brackets] elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def generate(texts, files, ids, chat, stats, show_draft, as_json, **options):
    """Continue prompts; the text streams to stdout."""
    serve()
    if as_json and (stats or show_draft):
        raise click.UsageError(f"--json prints one object with the figures in it: drop {'--stats' if stats else '--show-draft'}")
    if options["logprobs"] and not as_json:
        raise click.UsageError("--logprobs has no place in the text: add --json")
    prompts = read_prompts(texts, files, ids, note)
    chosen = given({name: options.pop(name) for name in list(options) if name in SamplingParams.__dataclass_fields__})
    params = SamplingParams(**chosen | ({"logit_bias": dict(chosen["logit_bias"])} if "logit_bias" in chosen else {}))
    with open_engine(**options) as engine:
        if chat and (engine.tokenizer is None or ids):
            raise MinispecError("--chat needs a text prompt and a target with tokenizer files")
        inputs = [engine.tokenizer.chat(prompt)[0] for prompt in prompts] if chat else prompts
        if engine.tokenizer and engine.tokenizer.has_template and not chat:
            note("this target has a chat template; the prompt is continued as it is, --chat applies the template")
        began = perf_counter()
        if as_json:
            note(f"generating; --json prints when the last of {len(prompts)} prompts is done")
            outputs = engine.generate(inputs, params)
            found = [{"prompt": prompt, **vars(out)} for prompt, out in zip(prompts, outputs)]
            figures = {**Acceptance.of(outputs, engine.draft_steps).as_dict(), "seconds": perf_counter() - began}
            click.echo(json.dumps({"outputs": found, "stats": figures, "minispec": __version__}))
        else:
            stream(engine, prompts, inputs, params, show_draft, stats, began)


def stream(engine, prompts, inputs, params, show_draft, stats, began):
    coming = engine.stream(inputs, params)                      # checks every prompt, so that nothing is printed before an error
    printer, events, first = Printer(engine, prompts, show_draft), [], None
    for event in coming:
        first = first or perf_counter()
        events.append(event)
        printer.add(event)
    printer.end()
    if stats:
        outputs, seconds = gather(events), perf_counter() - first
        for line in Acceptance.of(outputs, engine.draft_steps).lines():
            note(line)
        count = sum(len(out.ids) for out in outputs)
        rate = (count - len(outputs)) / max(seconds, 1e-9)
        note(f"first token after {first - began:.3f} s; {count} tokens, {rate:.1f} tokens/s after it")


@commands.command(epilog=WORDS)
@click.argument("directory", required=False, metavar="[DIR]")
@stacked(*MODELS, *RANKS, *DIALECT)
@click.option("--memory", type=MEMORY, help="Of each rank's device, as in 141GB; default: what this machine's device has free.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def inspect(directory, as_json, **options):
    """What is in a checkpoint, target or draft; the pair that comes with minispec without DIR."""
    note(f"reading the headers of {directory or 'the default pair'}")
    from minispec.inspection import describe, render

    found = describe(directory, **given(options))
    click.echo(json.dumps(found) if as_json else render(found))


@commands.command(epilog=WORDS)
@stacked(*MODELS, *DIALECT, *DEVICE, PROMPTS)
@click.option("--training-states", metavar="FILE", help="One sample that a trainer saved (speculators, SpecForge): .safetensors, .pt or .ckpt.")
@click.option("--max-tokens", type=click.IntRange(8), help="Tokens that the target writes after each prompt, 96 by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(file, as_json, **options):
    """Why is my acceptance low? Exit status 0: sound, 1: findings, 2: files that cannot be read."""
    from minispec.bench import read_jsonl
    from minispec.doctor import diagnose

    found = diagnose(prompts=read_jsonl(file) if file else None, note=note, **given(options))
    click.echo(found.json() if as_json else found.text())
    return 0 if found.sound else 1


@commands.command(epilog=WORDS)
@stacked(*BENCH, *CHOICE, *ENGINE)
def bench(file, per_kind, repeats, threads, batch, sweep, sweep_draft_steps, sweep_topk, sweep_nodes, plot, json_file, **options):
    """Plain and speculative decoding in one process; no speed-up is printed before their ids are equal.

    The last line of stdout is the result as one JSON object.
    """
    import torch

    from minispec.bench.compare import compare, shapes
    from minispec.bench.plot import draw, figure
    from minispec.bench import readings

    serve()
    prompts, grid = readings.read_prompts(file, per_kind), (sweep_draft_steps, sweep_topk, sweep_nodes)
    sweep = shapes(*grid) if sweep or any(grid) else []
    if sweep and repeats < 2:
        raise MinispecError("--sweep chooses on one half of the repeats and reports the other: give --repeats of at least 2")
    params = SamplingParams(**given({name: options.pop(name) for name in list(options) if name in SamplingParams.__dataclass_fields__}))
    for name in filter(None, (json_file, plot)):
        writable(name)
    made = figure(plot) if plot else None
    if threads:
        torch.set_num_threads(threads)
    if batch and max(batch) > 8:
        options["max_batch"] = options["max_batch"] or max(batch)
    with open_engine(**options) as engine:
        result = compare(engine, prompts, params, repeats, click.echo, Progress(), sweep, batch or ())
    text = json.dumps(result)
    if json_file:
        Path(json_file).write_text(text + "\n", "utf-8")
    if plot:
        draw(made, plot, result)
    click.echo(text)
    return 0 if result["equal"] else 1


def writable(name):
    """OSError now, not after the run, for a file that cannot be written; one that is there keeps what it holds, none is left behind."""
    there = Path(name).exists()
    Path(name).open("a").close()
    if not there:
        Path(name).unlink()


def interrupted(number, frame):
    """Ctrl-C ends at once: an exception could be swallowed in the middle of an import."""
    note("interrupted")
    os._exit(130)


def main():
    # read when torch starts: OpenMP threads that spin for ever slow a busy machine down tens of times, and threads that sleep at once cost an
    # idle one 2.3 times (14.7 against 6.3 ms a token); this many turns bridge the gap between two operations
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    signal.signal(signal.SIGINT, interrupted)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")    # a terminal that is not UTF-8
    try:
        if (world := environment()) and world[0]:       # of several ranks the first one speaks
            sys.stdout = sys.stderr = open(os.devnull, "w")
        if sys.stdout is None:
            raise MinispecError("standard output is closed; give it a place")
        status = commands(prog_name="minispec", standalone_mode=False)
    except (click.ClickException, MinispecError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        note("error: " + " ".join(text.split()))
        status = 2
    except BrokenPipeError:         # whoever read the output has seen enough
        status = 1
        sys.stdout = open(os.devnull, "w")
    except OSError as error:        # standard output that is full or closed
        note(f"error: {error.filename or 'standard output'}: {error.strerror or error}")
        status = 2
    sys.exit(status if isinstance(status, int) else 0)

"""The options that commands share. A default lives where the value is used; an option that is not given is not passed on."""
import re
from functools import reduce

import click


class Parsed(click.ParamType):
    """An option's own form: parse(text) -> value, ValueError for a text that is not `wanted`."""

    def __init__(self, name, parse, wanted):
        self.name, self.parse, self.wanted = name, parse, wanted

    def get_metavar(self, *_, **__):        # click's own is in capitals, which are not what is read
        return self.name

    def convert(self, value, param, ctx):
        try:
            return self.parse(value)
        except (ValueError, AttributeError):
            self.fail(f"{value[:60]!r} is {self.wanted}", param, ctx)


def _bias(text):
    token, bias = text.split("=")
    return int(token), float(bias)


def _memory(text):
    number, unit = re.fullmatch(r"([\d.]+) *([KMGT]i?)?B?", text).groups()
    return int(float(number) * (1024 if "i" in (unit or "") else 1000) ** " KMGT".index((unit or " ")[0]))


def _counts(text, *words):
    counts = tuple(part if part in words else int(part) for part in text.split(","))
    if any(count not in words and count < 1 for count in counts):
        raise ValueError
    return counts


IDS = Parsed("INT,INT,...", lambda text: tuple(int(part) for part in text.split(",")), "not integers separated by commas")
MEMORY = Parsed("SIZE", _memory, "not a size, as in 141GB or 80GiB")
BIAS = Parsed("ID=VALUE", _bias, "not ID=VALUE, as in 42=-1.5")
COUNTS = Parsed("INT,INT,...", _counts, "not whole numbers of at least 1 separated by commas")
NODES = Parsed("INT|auto,...", lambda text: _counts(text, "auto"), "neither whole numbers of at least 1 nor auto, separated by commas")
SIZE = Parsed("INT|auto", lambda text: text if text == "auto" else int(text), "neither a whole number nor auto")
EPS = Parsed("NUMBER|config", lambda text: text if text == "config" else float(text), "neither a number nor config")


def stacked(*options):
    """One decorator of several, in the order in which --help shall show them."""
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


DIALECT = (
    click.option("--capture", type=IDS, help="Captured layers of the target; default: what the draft's config says."),
    click.option("--capture-convention", type=click.Choice(["input", "output"]),
                 help="What a capture id means: the state entering that layer, or leaving it."),
    click.option("--d2t", type=click.Choice(["offset", "absolute", "from-t2d"]),
                 help="How the draft's vocabulary map is stored; default offset (target id = draft id + d2t)."),
    click.option("--latent-norm-eps", type=EPS,
                 help="eps of the q_a and kv_a norms: 1e-6 (default, as transformers) or config (rms_norm_eps, as the servers)."),
    *(click.option(f"--{name.replace('_', '-')}/--no-{name.replace('_', '-')}", default=None,
                   help=f"Overrule {name} of the draft's config.")
      for name in ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")),
)
MODELS = (
    click.option("--target", metavar="DIR", help="Target checkpoint; default: the pair that comes with minispec."),
    click.option("--draft", metavar="DIR|none", help="EAGLE-3 draft checkpoint; none decodes plainly."),
)
RANKS = (
    click.option("--tensor-parallel", type=int, help="Ranks that share the model, a GPU each; default: those that torchrun started, else 1."),
    click.option("--expert-parallel", is_flag=True, default=None, help="Ranks hold whole routed experts; default: each a part of all."),
    click.option("--shard-latent", is_flag=True, default=None, help="Ranks share q_a and kv_a too: fewer bytes, one more gather a layer."),
)
DEVICE = (
    click.option("--device", help="auto (default), cpu, cuda or cuda:N."),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                 help="auto (default) is float32 on CPU and bfloat16 on CUDA."),
)
ENGINE = (
    *MODELS,
    click.option("--draft-steps", type=int, help="Levels of the draft tree (with --nodes auto: at most), 6 by default; 0 is plain decoding."),
    click.option("--topk", type=int, help="Children tried a node, 4 by default; 1 makes a chain."),
    click.option("--nodes", type=SIZE, help="Draft tokens verified a round, the root excluded; auto, the default: as many as pay."),
    *DEVICE,
    *RANKS,
    click.option("--patience", type=float, help="Seconds without progress, 20 by default, after which a run of several ranks is ended."),
    click.option("--max-length", type=int, help="Tokens a request may hold, prompt included; default: the target's context."),
    click.option("--max-batch", type=int, help="Requests that run at once."),
    click.option("--cuda-graphs/--no-cuda-graphs", default=None, help="On CUDA a round is one captured graph, the default; the ids are the same."),
    click.option("--exact", is_flag=True, default=None, help="On CUDA, logits whose bits do not depend on the other rows; slower."),
    *DIALECT,
)
CHOICE = (
    click.option("--temperature", type=float, help="0 (default) is greedy."),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 (default) keeps all."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens that together hold this much; 1 (default) keeps all."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this times the likeliest; 0 (default) keeps all."),
    click.option("--seed", type=int, help="0 by default. A seed gives the same text with any draft or none."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Do not end at the model's own stop tokens."),
)
PROMPTS = click.option("--prompts", "file", metavar="FILE", help='One JSON object a line: {"prompt": TEXT} or {"prompt_ids": [...]}, with a '
                       '"kind" or without; default: those that come with minispec, 40 of 5 kinds, of which doctor takes 10.')
BENCH = (
    PROMPTS,
    click.option("--per-kind", type=click.IntRange(1), help="Only so many prompts of each kind, the first ones."),
    click.option("--max-tokens", type=int, default=96, show_default=True),
    click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Times that each prompt runs in each mode."),
    click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads; default: what torch takes."),
    click.option("--batch", type=COUNTS, help="Also so many requests at once, as in 1,2,4,8."),
    click.option("--sweep", is_flag=True, help="Also other trees, draft-steps x topk x nodes, and which is best; long: see --per-kind."),
    click.option("--sweep-draft-steps", type=COUNTS, help="Of a sweep; default 1,2,3,4,6,8."),
    click.option("--sweep-topk", type=COUNTS, help="Of a sweep; default 1,4."),
    click.option("--sweep-nodes", type=NODES, help="Of a sweep; default: draft-steps, twice that, and auto. What no tree can hold is left out."),
    click.option("--plot", metavar="FILE.png", help="Draw acceptance by depth and speed-up by setting (extra plot)."),
    click.option("--json", "json_file", metavar="FILE", help="Write the result here as well."),
)
SAMPLING = (
    click.option("--max-tokens", type=int, help="Tokens to generate, 128 by default."),
    *CHOICE,
    click.option("--repetition-penalty", type=float, help="Over prompt and output; 1 (default) is none."),
    click.option("--presence-penalty", type=float, help="Over the output; 0 (default) is none."),
    click.option("--frequency-penalty", type=float, help="Over the output, times the count; 0 (default) is none."),
    click.option("--logit-bias", type=BIAS, multiple=True, help="Added to a logit; may be repeated."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    click.option("--stop-ids", "--stop-id", "stop_ids", type=int, multiple=True, help="End at this token; may be repeated."),
    click.option("--logprobs", is_flag=True, default=None, help="Log-probability of every emitted token (with --json)."),
)

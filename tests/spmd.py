"""Many cases in one set of processes: every rank runs the same program, over gloo, and leaves what it found in a file."""
import os
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minispec import Engine, MinispecError, SamplingParams
from minispec import draft as drafts
from minispec import runner as runners
from minispec import speculate
from minispec.choice import choose, draft_logits
from minispec.kernels.choose import Sampling
from minispec.launch import Team
from minispec.ranks import Ranks

PROMPTS = [[7, 301, 45], [12, 9], [500, 4, 4, 88, 231, 90, 17, 60, 61, 62, 63, 64, 65]]
FREE = [SamplingParams(max_tokens=11, ignore_eos=True), SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.6, seed=3, logprobs=True),
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.9, seed=2**40 + 1)]
HELD = [SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.7, seed=4, top_k=20, top_p=0.9, min_p=0.02, logprobs=True),
        SamplingParams(max_tokens=6, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1,
                       logit_bias={5: 3.0, 9: -100.0}, logprobs=True)]


class Together(Team):
    """A team whose members are told nothing, because all run the same program."""

    def tell(self, *_):
        return self

    def __exit__(self, *_):
        return None

    def meet(self, *_):
        return None

    def close(self):
        return None


def told(target, draft, prompts=PROMPTS, **options):
    """What an engine says: outputs of free and of held requests, scores, and its hidden buffer."""
    with Engine(target, draft, **options) as engine:
        free = engine.generate(prompts, FREE)
        kept = engine.hidden.states[:-1].to("cpu", copy=True)
        held, score = engine.generate(prompts[:2], HELD), engine.score(prompts[2])
        return {"free": free, "held": held, "hidden": kept, "logits": score.logits.cpu(), "states": score.states.cpu()}


def heads(ranks, width=6, vocab=10):
    """Every id of a small head as the winner in turn, each shard and the one next to the padding included -> [(found, expected)]."""
    g = torch.Generator().manual_seed(0)
    first, last = ranks.span(vocab)
    ids, pairs = torch.randperm(40, generator=g)[:vocab], []
    for winner in range(vocab):
        head, hidden = torch.randn(vocab, width, generator=g), torch.randn(2, 1, width, generator=g)
        head[winner] = hidden[0, 0] * 9
        positions = torch.tensor([[winner], [3]])
        for params in ([SamplingParams()] * 2, [SamplingParams(temperature=0.8, seed=winner, logprobs=True)] * 2,
                       [SamplingParams(logprobs=True), SamplingParams(temperature=0.7, top_k=3)]):
            sampling = Sampling.build(params, [[1], [2]], [[], []], vocab)
            for group, part in ((ranks, head[first:last]), (Ranks(), head)):
                chosen = choose(hidden, part, positions, sampling, None, None, vocab, group)
                grown = draft_logits(hidden, part, ids, 4, sampling, positions, vocab, group)
                pairs.append((winner, *chosen, *grown))
    return list(zip(pairs[::2], pairs[1::2]))


def agreed(ranks):
    """Rank 0's values of any strides, a column's single element and a transposed matrix among them."""
    mine = torch.arange(21).view(3, 7) + 100 * ranks.rank
    return [x.clone() for x in ranks.agree(mine[:1, 2], mine.T, mine[:, 3], mine[1:2] > 108)]


def refused(run):
    """The line that every rank gives."""
    try:
        run()
    except MinispecError as error:
        return str(error)


def drift(target, draft, team, fault):
    """Rank 1 goes astray after four rounds; the check is due at the sixth."""
    runners.CHECK = 6
    engine = Engine(target, draft, tensor_parallel=team.size, team=team, draft_steps=2, topk=1)
    rounds, done = engine.runner.round, []

    def round(*what):
        done.append(1)
        if len(done) == 5 and team.rank == 1:
            fault(engine)
        return rounds(*what)
    engine.runner.round = round
    return refused(lambda: engine.generate(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True)))


def astray(target, draft, team):
    """Rank 1 chooses something else, and proposes something else: rank 0's tree is verified and its decision taken."""
    places = (speculate, "choose"), (drafts, "draft_logits")
    right = [getattr(*place) for place in places]

    def astray(function, *args):
        ids, *rest = function(*args)
        return ids + team.rank, *rest
    for place, function in zip(places, right):
        setattr(*place, partial(astray, function))
    try:
        with Engine(target, draft, tensor_parallel=team.size, team=team) as engine:
            return engine.generate(PROMPTS[0], FREE[0]).ids
    finally:
        for place, function in zip(places, right):
            setattr(*place, function)


def anonymous():
    """Bytes of this process's own memory, without the files that it maps."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")) * 1024


def load(target, team):
    """(parameters' bytes, peak growth of this process's own memory while it loads)."""
    before, peak = anonymous(), [0]

    def progress(*_):
        peak[0] = max(peak[0], anonymous())
    with Engine(target, "none", tensor_parallel=team.size, team=team, max_length=16, max_batch=1, progress=progress) as engine:
        return sum(x.nbytes for x in engine.target.parameters.values()), max(peak[0], anonymous()) - before


def work(rank, size, port, folder, jobs):
    """jobs: [(name, function, arguments)]; a function of this file gets the team or ranks in the keyword it has for them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store, found = dist.TCPStore("127.0.0.1", port, size, rank == 0), {}
    for place, (name, function, arguments) in enumerate(jobs):
        team = Together(rank, size, rank, dist.PrefixStore(f"{place}/", store), 600)
        try:
            if function is told:
                found[name] = told(**arguments, tensor_parallel=size, team=team)
            elif function in (heads, agreed):
                found[name] = function(Ranks.connect(team, torch.device("cpu")))
            else:
                found[name] = function(team=team, **arguments)
        except Exception:
            found[name] = traceback.format_exc()
    torch.save(found, f"{folder}/{size}.{rank}.pt")


def run(size, folder, jobs):
    """{name: [what each rank found]} of all jobs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.start_processes(work, (size, port, str(folder), jobs), size, start_method="spawn")
    found = [torch.load(f"{folder}/{size}.{rank}.pt", weights_only=False) for rank in range(size)]
    for name, *_ in jobs:
        for rank, one in enumerate(found):
            assert not (isinstance(one[name], str) and "Traceback" in one[name]), f"{name}, rank {rank}: {one[name]}"
    return {name: [one[name] for one in found] for name, *_ in jobs}

"""What rounds of one batch size cost and bring, and what the next one is to be: how far to draft, or not at all."""
from itertools import accumulate

PLAIN = -1          # where others say how many nodes a round verified
LONG, SHORT = 64, 4         # rounds over which gains are averaged; that an average is held to be of when drafting begins again
LIMIT = 6           # plain rounds that drafting may lose before it rests
STRANGERS = 8       # requests in a row that are met with credit
UNCUT = 0.97        # the share of nodes from which on a tree is not cut
PROBE = 128         # plain rounds between two probes at most, from 8 on
REFRESH = 4         # rounds between two looks at the prices
OTHER = 64          # rounds between two that draft further than seems to pay
GROWTH = 0.66       # distinct experts of n rows, where they have been counted, are about n ** 0.66 times one row's


def toward(known, found, share):
    """A running geometric mean that no outlier drags far; the first value as it is."""
    return known * min(max(found / known, 0.5), 2) ** share if known else found


class Curve:
    """Costs and gains of one batch size. Costs are relative to `base`, seconds, which follows the machine's changes in speed: a slow
    minute makes no row count look dear. cost: of verifying n nodes; first, level: of drafting one level, and another; hits: the share of
    rounds with all levels before accepted in which this one is accepted too; wide: nodes that a level has verified; kept: the share of nodes
    that the last of the deepest trees verified; gain, spent: tokens a request and cost of a drafted round.

    arms: levels that can be asked for, ascending. whole: a tree has all levels that it was asked for, and the host cannot look inside; else
    there is one arm, the draft ends where it does not promise enough, expands no more than pays, and says what it took.
    """

    def __init__(self, requests, nodes, arms, whole):
        self.requests, self.nodes, self.arms, self.whole, self.steps = requests, nodes, arms, whole, arms[-1]
        self.cost, self.seen, self.use, self.base = {}, {}, {}, None
        self.first, self.level, self.wide, self.whole_round = 0.0, 0.0, 1.0, {}
        usual, tried = (self.steps, self.steps), [(self.steps, 1), (self.steps, 10), (0, 0)]
        # where they may be the whole of a short text, what is tried stands between trees of as many nodes as levels
        tried = [usual, *tried, (self.steps, 3), (1, 1)] if whole else sum(([usual] * 3 + [one] for one in tried), [])
        self.trials = [(depth, min(n, nodes) * requests) for depth, n in tried] * 2
        self.hits, self.tries = [0.6] * self.steps, [SHORT] * self.steps
        self.gain, self.spent, self.drafted, self.age, self.arm, self.kept = 1.0, 1.0, 0, 0, arms[-1], 0.0
        # plain rounds to come, between two probes, and when it last came back; those that wait for what a probe found
        self.rest, self.interval, self.last, self.waits = 0, 0, 4, 0
        self.strangers = 0          # requests that have come since drafting paid
        # what drafting has lost, in plain rounds, where what it wins counts only as far as it makes up for losses (Page's test); and won
        self.lost, self.won = LIMIT - 2.0, 0.0         # a draft that nobody knows may lose less

    def __call__(self):
        """The next round: levels to draft, 0 for a plain round; nodes to try, or None for as many as the prices say."""
        if self.trials:
            return self.trials[0]
        if self.rest:
            return 0, 0
        if self.interval:
            self.waits = self.waits - 1 if self.waits else 2        # so many are planned before it is seen, at most
            return (0, 0) if self.waits < 2 else (self.arms[0], None)       # a probe: has the text changed?
        if self.drafted % OTHER == 0:       # what shorter trees are worth longer ones tell too
            return self.arms[min(self.arms.index(self.arm) + 1, len(self.arms) - 1)], None
        return self.arm, None

    def saw(self, depth, nodes, counts, seconds, drafting=0.0, level=0.0):
        """A round: levels drafted, nodes verified, tokens emitted by each request that had room for more than depth, seconds; where it is
        not whole, how many of them went to the draft, and to one more level of it, if it had more than one."""
        self.age += 1
        self.base = self.base or seconds
        if self.whole and depth:
            drafting = (self.first + self.level * (depth - 1)) * self.base
        elif depth:
            self.level = toward(self.level, level / self.base, 1 / 16) if level else self.level
            self.first = toward(self.first, max(drafting / self.base - self.level * (depth - 1), self.first / 2), 1 / 16)
        seconds = max(seconds - drafting, 0.1 * self.base)
        if self.trials:
            return self._try(depth, nodes, seconds)
        cost = self._average(nodes if depth else PLAIN, seconds)
        if not depth:
            self.rest = max(self.rest - 1, 0)
            return
        self.drafted, self.waits = self.drafted + 1, 0
        share = 0.5 if self.interval else 1 / min(self.drafted, LONG)      # a probe speaks of the text as it is now
        self.wide += (nodes / (depth * self.requests) - self.wide) * share * (nodes > 0)
        spent, won = cost + drafting / self.base, 0.0
        self.spent += (spent - self.spent) * share
        if counts:
            if depth == self.steps:
                kept = min(nodes / (self.nodes * len(counts)), 1)
                self.kept = kept if kept < self.kept > UNCUT else self.kept + (kept - self.kept) / 8      # what is not cut says nothing
            gain = sum(counts) / len(counts)
            self.gain += (gain - self.gain) * share
            won = gain - spent / self.plain
            self.won, self.lost = self.won + won, min(max(self.lost - won, 0), LIMIT)
        for count in counts:
            for k in range(min(count, depth, -(-nodes // self.requests))):
                self.tries[k] = min(self.tries[k] + 1, LONG)
                share = max(1 / self.tries[k], 0.25 if k >= self.arm else 0)        # rare ones speak louder
                self.hits[k] += ((count > k + 1) - self.hits[k]) * share
        if self.interval or self.lost >= LIMIT or self.age % REFRESH == 0:
            self._decide(won)

    def newcomer(self):
        """Another request, perhaps another text: it is probed at once and, as many a text begins badly, again until 0.8 plain rounds are lost;
        0.2 where probes of STRANGERS requests have won nothing."""
        self.strangers = self.strangers + 1 if self.interval else 0
        self.rest, self.waits, self.interval = 0, 0, min(self.interval, 16)
        self.lost = min(self.lost, LIMIT - (0.8 if self.strangers < STRANGERS else 0.2))

    @property
    def uncut(self):
        """Whether next to nothing was cut off the last trees: then cutting is not worth its launches, but for one look in OTHER rounds."""
        return self.kept > UNCUT and self.drafted % OTHER > 0

    @property
    def plain(self):
        """The cost of a plain round: what verifies nothing costs no more."""
        return min(self.cost.get(PLAIN, 1e9), self.cost.get(0, 1e9))

    def _try(self, depth, nodes, seconds):
        """One of the rounds that begin a batch size. Of whole ones the last tells what levels cost, the first as much as another."""
        del self.trials[0]
        if self.whole and depth:
            self.whole_round[depth, nodes] = min(self.whole_round.get((depth, nodes), 1e9), seconds)
        else:
            self._average(nodes if depth else PLAIN, seconds)
        if not self.trials and self.whole:
            one, most = (min(n for d, n in self.whole_round if d == depth) for depth in (1, self.steps))
            more = self.whole_round[self.steps, most] - self.whole_round[1, one]
            self.first = self.level = max(more / self.base, 0) / max(self.steps - 1, 1)
            for (depth, nodes), seconds in self.whole_round.items():
                cost = seconds / self.base - self.first - self.level * (depth - 1)
                self.cost[nodes], self.seen[nodes] = min(max(cost, 0.1), self.cost.get(nodes, 1e9)), 2

    def _decide(self, won):
        """Go on with the arm that promises most, or rest when too much is lost: so a probe that won may lose as much again, and no more."""
        arm = self.best()
        if not self.interval:
            self.drafted = self.drafted if arm == self.arm else min(self.drafted, SHORT)
        self.arm = arm
        if won > 0 and self.interval:
            self.last, self.interval, self.rest, self.drafted, self.strangers = self.interval, 0, 0, SHORT, 0
        elif self.lost >= LIMIT and not self.rest:     # what came back for nothing is probed half as often as before
            self.interval = self.rest = min(2 * (self.interval or (4 if self.won > 0 else self.last)), PROBE)
            self.won = 0.0

    def best(self):
        """The arm that promises most tokens a cost; where the draft may end early, of any number of levels."""
        found, verify, reached, gain = [], self.costs(), 1.0, 1.0
        for depth, hit in enumerate(self.hits, 1):
            reached *= hit
            gain += reached
            nodes, arm = min(round(self.wide * depth * self.requests), self.nodes * self.requests), depth if self.whole else self.steps
            if arm in self.arms:
                found.append((gain / (verify[nodes] + self.first + self.level * (depth - 1)), arm))
        return max(found)[1]

    def _average(self, nodes, seconds):
        """The better of the first two rounds of a kind, then a running mean. The kind that is usual now keeps its cost and moves the base
        instead: were both free, kinds that are rare would be left behind on another scale."""
        known, count, relative = self.cost.get(nodes, 1e9), self.seen.get(nodes, 0), seconds / self.base
        self.seen[nodes], self.use = count + 1, {n: 0.97 * use for n, use in self.use.items()}
        self.use[nodes] = self.use.get(nodes, 0) + 1
        if count < 2:
            self.cost[nodes] = min(known, relative)
        elif nodes == max(self.use, key=self.use.get):
            self.base = toward(self.base, self.base * relative / known, 0.1)
        else:
            self.cost[nodes] = toward(known, relative, 1 / min(count, 32))
        return self.cost[nodes]

    def costs(self):
        """Of verifying 0 ... requests * nodes nodes: a + b * n ** 0.66, as the distinct experts of n rows grow where they have been counted, by
        least squares over the rounds seen; from there a count's own average counts the more the more often it was seen. They never fall."""
        found = [(n, n**GROWTH, self.cost[n], min(self.seen[n], 32)) for n in sorted(self.cost.keys() - {PLAIN})]
        weight = sum(w for *_, w in found) or 1
        middle, mean = sum(w * x for _, x, _, w in found) / weight, sum(w * y for *_, y, w in found) / weight
        spread = sum(w * (x - middle) ** 2 for _, x, _, w in found)
        slope = max(sum(w * (x - middle) * y for _, x, y, w in found) / spread, 0) if spread else 0.1
        table = [mean + slope * (n**GROWTH - middle) for n in range(self.requests * self.nodes + 1)]
        for n, _, y, w in found:
            table[n] += (y - table[n]) * w / (w + 16)
        return list(accumulate(table, max))

    def prices(self, requests):
        """Tokens that a round of 0 ... requests * nodes verified nodes must bring, its cost times the present tokens a cost, and a level's."""
        rate = requests * max(self.gain / self.spent, 1 / self.plain)
        return [rate * cost for cost in self.costs()], rate * self.level

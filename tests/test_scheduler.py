"""Pages and the scheduler: nothing leaks, nothing starves, first come is first served."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from minispec.errors import MinispecError
from minispec.pages import Pages
from minispec.scheduler import Scheduler

from .test_request import request


def test_pages_misuse():
    pages = Pages(5, 4)
    assert (pages.total, pages.free, pages.needed(0), pages.needed(1), pages.needed(4), pages.needed(5)) == (4, 4, 0, 1, 1, 2)
    mine = pages.take(3)
    with pytest.raises(RuntimeError, match="2 asked for, 1 of 4 free"):
        pages.take(2)
    for wrong in ([0], [5], [-1], [mine[0], mine[0]], pages.take(1) + [0]):
        with pytest.raises(RuntimeError):
            pages.give(wrong)
    with pytest.raises(RuntimeError, match="lost"):
        pages.check([mine])
    pages.give(mine)
    with pytest.raises(RuntimeError, match="nobody owns it"):
        pages.give(mine[:1])
    with pytest.raises(RuntimeError, match="owned twice"):
        pages.check([mine])
    for count, size in ((1, 4), (4, 0)):
        with pytest.raises(ValueError):
            Pages(count, size)


@given(some.integers(2, 40), some.integers(1, 16), some.lists(some.tuples(some.booleans(), some.integers(0, 12)), max_size=60))
def test_pages_never_leak(count, size, steps):
    pages, owned = Pages(count, size), []
    for takes, number in steps:
        if takes and number <= pages.free:
            owned.append(pages.take(number))
        elif owned:
            pages.give(owned.pop(number % len(owned)))
        pages.check(owned)
        assert 0 not in [page for part in owned for page in part]
    for part in owned:
        pages.give(part)
    assert pages.free == pages.total


@settings(deadline=None)
@given(some.lists(some.tuples(some.integers(0, 30), some.integers(1, 60), some.integers(1, 25), some.integers(0, 60)), min_size=1,
                  max_size=12),
       some.integers(1, 5), some.integers(1, 20), some.integers(0, 8), some.sampled_from([1, 4, 16]), some.integers(0, 100),
       some.randoms())
def test_everything_ends_and_nothing_leaks(arrivals, max_batch, chunk, scratch, size, spare, chance):
    """Random arrivals (step, prompt, max_tokens, cancelled at), batch, chunk and pool: invariants each step, an end for all."""
    largest = max(prompt + tokens + scratch for _, prompt, tokens, _ in arrivals)
    pages = Pages(1 + -(-largest // size) + spare // size, size)
    scheduler = Scheduler(pages, max_batch, chunk, scratch)
    requests = [request(prompt=[1] * prompt, max_tokens=tokens, index=index)
                for index, (_, prompt, tokens, _) in enumerate(arrivals)]
    work = sum(-(-prompt // chunk) + tokens for _, prompt, tokens, _ in arrivals) + 31
    admitted, before, step = [], None, 0
    while step <= 30 or scheduler.running or scheduler.waiting:
        for made, (at, _, _, cancel) in zip(requests, arrivals):
            if at == step:
                scheduler.add(made)
            if at < step == cancel:
                scheduler.finish(made)
                scheduler.check()
                assert made not in scheduler.running and made not in scheduler.waiting and made.slot is None and made.pages == []
        ready = [made for made in scheduler.running if not made.prefilling]
        action = scheduler.next()
        scheduler.check()
        admitted += [made.index for made in scheduler.running if made.index not in admitted]
        assert all(made.slot in range(max_batch) and made.index in admitted for made in scheduler.running)
        half = [made for made in scheduler.running if made.prefilling]
        if action is None:
            assert not scheduler.running and not scheduler.waiting
        elif action[0] == "prefill":
            _, made, start, stop = action
            assert made is half[0] and start == made.length < stop <= start + chunk and stop <= len(made.prompt_ids)
            assert not (ready and before == "prefill"), "two prefill chunks in a row while others wait for a round"
            made.length = stop
            if not made.prefilling:
                made.take([2])
        else:
            assert action[1] == ready and ready
            assert not (half and before == "round"), "two rounds in a row while a prompt waits"
            for made in ready:
                assert made.length == len(made.prompt_ids) + len(made.ids) - 1 < made.limit
                made.take([3] * chance.randint(1, 7))
        for made in list(scheduler.running):
            if made.finish_reason:
                scheduler.finish(made)
                scheduler.finish(made)
        scheduler.check()
        before, step = action and action[0], step + 1
        assert step <= work, "a step without progress"
    assert pages.free == pages.total
    for made, (at, _, tokens, cancel) in zip(requests, arrivals):
        assert made.finish_reason == "length" and len(made.ids) == tokens or cancel > at


def test_first_come_first_served():
    """A large request at the head is not overtaken by a small one that would fit."""
    scheduler = Scheduler(Pages(12, 4), 8, 16, 0)
    first, large, small = (request(prompt=[1] * n, max_tokens=4, index=n) for n in (16, 30, 2))
    for made in (first, large, small):
        scheduler.add(made)
    assert scheduler.next()[1] is first and list(scheduler.waiting) == [large, small]
    scheduler.finish(first)
    assert scheduler.next()[1] is large and list(scheduler.waiting) == [] and scheduler.running == [large, small]


def test_chunks_and_rounds_alternate():
    scheduler = Scheduler(Pages(100, 4), 4, 10, 0)
    short, long = request(prompt=[1] * 3, max_tokens=50), request(prompt=[1] * 40, max_tokens=5)
    scheduler.add(short)
    scheduler.add(long)
    seen = []
    for _ in range(10):
        action = scheduler.next()
        if action[0] == "prefill":
            action[1].length = action[3]
            seen.append((action[0], action[2], action[3]))
        else:
            seen.append((action[0], len(action[1])))
        for made in [action[1]] if action[0] == "prefill" else action[1]:
            if not made.prefilling:
                made.take([1])
    assert seen == [("prefill", 0, 3), ("round", 1), ("prefill", 0, 10), ("round", 1), ("prefill", 10, 20), ("round", 1),
                    ("prefill", 20, 30), ("round", 1), ("prefill", 30, 40), ("round", 2)]


def test_too_large_for_the_cache():
    scheduler = Scheduler(Pages(5, 4), 2, 8, 7)
    scheduler.add(request(prompt=[1] * 5, max_tokens=4))
    wanted = r"prompt 3 needs 20 cache slots \(5 prompt tokens, 5 to emit, 7 for the tree\), the cache has 16"
    with pytest.raises(MinispecError, match=wanted):
        scheduler.add(request(prompt=[1] * 5, max_tokens=5, index=3))
    assert len(scheduler.waiting) == 1


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_thousand_short_requests(size):
    """Leak test: ends, cancels in mid-prefill, in mid-round and while waiting; the pool is whole after each and at the end."""
    chance = random.Random(size)
    scheduler = Scheduler(Pages(200 // size + 8, size), 4, 8, 7)
    left, added = 1000, []
    while left or scheduler.running or scheduler.waiting:
        if left and len(scheduler.waiting) < 3:
            added.append(request(prompt=[1] * chance.randint(1, 20), max_tokens=chance.randint(1, 12)))
            scheduler.add(added[-1])
            left -= 1
        action = scheduler.next()
        for made in [action[1]] if action[0] == "prefill" else action[1]:
            if action[0] == "prefill":
                made.length = action[3]
            if not made.prefilling:
                made.take([1] * (1 if action[0] == "prefill" else chance.randint(1, 7)))
            if made.finish_reason or chance.random() < 0.05:
                scheduler.finish(made)
        if chance.random() < 0.05:
            scheduler.finish(chance.choice(added))
        scheduler.check()
    assert scheduler.pages.free == scheduler.pages.total and scheduler.next() is None

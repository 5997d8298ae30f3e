"""Which request computes next. Knows requests and pages, no tensors."""
from collections import deque

from minispec.errors import MinispecError
from minispec.pages import Pages
from minispec.request import Request


class Scheduler:
    """First come, first served, at most `max_batch` requests at once, prompts in chunks of `chunk` tokens.

    A request is admitted when pages for its worst case are free: `limit` tokens and `scratch` slots for the rows of a tree. So a
    running request never waits for memory and is never put back. Prefill chunks and rounds alternate: neither stops the other.
    """

    def __init__(self, pages: Pages, max_batch: int, chunk: int, scratch: int):
        self.pages, self.max_batch, self.chunk, self.scratch = pages, max_batch, chunk, scratch
        self.waiting, self.running, self._slots = deque(), [], list(range(max_batch))[::-1]
        self._prefilled = False  # the step before was a prefill chunk

    def add(self, request: Request) -> None:
        """Queues a request. MinispecError for one that would not fit the empty cache."""
        needed, size = self._needed(request), self.pages.page_size
        if needed > self.pages.total:
            parts = f"{len(request.prompt_ids)} prompt tokens, {request.room} to emit, {self.scratch} for the tree"
            raise MinispecError(f"prompt {request.index} needs {needed * size} cache slots ({parts}), the cache has "
                                f"{self.pages.total * size}; lower max_tokens or shorten the prompt")
        self.waiting.append(request)

    def next(self) -> tuple | None:
        """The next step, or None when nothing is left:
        ("prefill", request, start, stop)  prompt tokens start..stop-1; the caller then sets request.length = stop, and after the
                                           last chunk (stop == N) calls request.take with the first token
        ("round", [requests])              all requests whose prompt is done, oldest first
        """
        # strictly in order: a small request must not overtake a large one, which could then wait for ever
        while self.waiting and self._slots and self._needed(self.waiting[0]) <= self.pages.free:
            request = self.waiting.popleft()
            request.pages, request.slot = self.pages.take(self._needed(request)), self._slots.pop()
            self.running.append(request)
        rounds = [request for request in self.running if not request.prefilling]
        prefill = next((request for request in self.running if request.prefilling), None)
        self._prefilled = prefill is not None and not (rounds and self._prefilled)
        if self._prefilled:
            return "prefill", prefill, prefill.length, min(prefill.length + self.chunk, len(prefill.prompt_ids))
        return ("round", rounds) if rounds else None

    def finish(self, request: Request) -> None:
        """Ends a request, finished or cancelled, running or waiting: its pages and slot are free. Ended twice is ended."""
        if request in self.running:
            self.running.remove(request)
            self.pages.give(request.pages)
            self._slots.append(request.slot)
            request.pages, request.slot = [], None
        elif request in self.waiting:
            self.waiting.remove(request)

    def check(self) -> None:
        """RuntimeError unless every page and every slot has exactly one owner and each running request its worst case."""
        self.pages.check([request.pages for request in self.running])
        slots = sorted(self._slots + [request.slot for request in self.running])
        wrong = {request.index: len(request.pages) for request in self.running if len(request.pages) != self._needed(request)}
        if wrong or slots != list(range(self.max_batch)):
            raise RuntimeError(f"scheduler: slots {slots} of {self.max_batch}; wrong pages by prompt: {wrong}")

    def _needed(self, request):
        return self.pages.needed(request.limit + self.scratch)

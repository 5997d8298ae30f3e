"""The pages of the caches: who may write where. Page 0 is the dump page, where padding rows write; nobody owns it."""
from collections import Counter


class Pages:
    """A free list over `count` pages of `page_size` token slots each; pages 1..count-1 can be owned."""

    def __init__(self, count: int, page_size: int):
        if count < 2 or page_size < 1:
            raise ValueError(f"pages: {count} pages of {page_size} slots hold nothing beside the dump page")
        self.count, self.page_size, self.total = count, page_size, count - 1
        self._free = dict.fromkeys(range(count - 1, 0, -1))  # a stack: the page given back last is handed out first

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def take(self, number: int) -> list[int]:
        """`number` pages, owned by the caller until given back. RuntimeError when fewer are free; nothing is taken then."""
        if number > self.free:
            raise RuntimeError(f"pages: {number} asked for, {self.free} of {self.total} free")
        return [self._free.popitem()[0] for _ in range(number)]

    def give(self, pages: list[int]) -> None:
        """Takes pages back. RuntimeError for one given twice, free already or never handed out; nothing is taken back then."""
        if len(set(pages)) < len(pages) or any(not 0 < page < self.count or page in self._free for page in pages):
            raise RuntimeError(f"pages: {pages} given back, but one is there twice or nobody owns it")
        self._free.update(dict.fromkeys(reversed(pages)))

    def check(self, owned: list[list[int]]) -> None:
        """RuntimeError unless the free pages and the lists in `owned` hold each of the pages 1..count-1 exactly once."""
        held, whole = Counter(self._free.keys()), set(range(1, self.count))
        for pages in owned:
            held.update(pages)
        twice, lost, foreign = {page for page in held if held[page] > 1}, whole - held.keys(), held.keys() - whole
        if twice or lost or foreign:
            raise RuntimeError(f"pages: owned twice {sorted(twice)}, lost {sorted(lost)}, foreign {sorted(foreign)}")

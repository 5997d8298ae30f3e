"""The pages of the caches: who may write where. Page 0 is the dump page, where padding rows write; nobody owns it."""


class Pages:
    """A free list over `count` pages of `page_size` token slots each; pages 1..count-1 can be owned."""

    def __init__(self, count: int, page_size: int):
        if count < 2 or page_size < 1:
            raise ValueError(f"pages: {count} pages of {page_size} slots hold nothing beside the dump page")
        self.count, self.page_size = count, page_size
        self._free = list(range(count - 1, 0, -1))  # a stack: the page given back last is handed out first
        self._is_free = bytearray([0] + [1] * (count - 1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def total(self) -> int:
        return self.count - 1

    def needed(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def take(self, number: int) -> list[int]:
        """`number` pages, owned by the caller until given back. RuntimeError when fewer are free; nothing is taken then."""
        if number > self.free:
            raise RuntimeError(f"pages: {number} asked for, {self.free} of {self.total} free")
        taken = [self._free.pop() for _ in range(number)]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def give(self, pages: list[int]) -> None:
        """Takes pages back. RuntimeError for one that is free already, or was never handed out; nothing is taken back then."""
        for page in pages:
            if not 0 < page < self.count or self._is_free[page]:
                raise RuntimeError(f"pages: page {page} given back, but nobody owns it")
        if len(set(pages)) < len(pages):
            raise RuntimeError(f"pages: a page given back twice in {pages}")
        for page in reversed(pages):
            self._is_free[page] = 1
            self._free.append(page)

    def check(self, owned: list[list[int]]) -> None:
        """RuntimeError unless the free pages and the lists in `owned` hold each of the pages 1..count-1 exactly once."""
        held = sorted(self._free + [page for pages in owned for page in pages])
        whole = set(range(1, self.count))
        if held != sorted(whole):
            twice = sorted({page for page, after in zip(held, held[1:]) if page == after})
            lost, foreign = (sorted(a - b) for a, b in ((whole, set(held)), (set(held), whole)))
            raise RuntimeError(f"pages: owned twice {twice}, lost {lost}, foreign {foreign}")
        if any(self._is_free[page] for pages in owned for page in pages):
            raise RuntimeError("pages: a page is owned and marked free")

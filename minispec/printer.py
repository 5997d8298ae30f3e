"""Streamed text on stdout."""
import codecs
import json
import os
import sys
from collections import deque
from itertools import groupby

import click


class Printer:
    """Prints the events of one prompt after the other, the first live, the others as their turn comes.

    With `show_draft` accepted draft tokens are green on a terminal, in [brackets] elsewhere.
    """

    def __init__(self, engine, prompts, show_draft):
        self.engine, self.prompts, self.show_draft = engine, prompts, show_draft
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
        self.marked = [deque() for _ in prompts]                     # (character, is draft), decoded but not yet shown
        self.waiting, self.done, self.turn, self.last = [""] * len(prompts), [False] * len(prompts), -1, "\n"
        self.color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.next_turn()

    def add(self, event):
        if event.text is None:
            text = "".join(f"{token} " for token in event.ids)
        else:
            text = self.mark(event) if self.show_draft else event.text
        self.waiting[event.index] += text
        self.done[event.index] |= event.finish_reason is not None
        self.flush()
        while self.done[self.turn] and self.turn + 1 < len(self.prompts):
            self.next_turn()
            self.flush()

    def next_turn(self):
        self.turn += 1
        if len(self.prompts) > 1:
            self.end()
            prompt = self.prompts[self.turn]
            head = json.dumps(prompt[:60], ensure_ascii=False)
            click.echo(f"==> prompt {self.turn + 1} of {len(self.prompts)}: {head}{'...' * (len(prompt) > 60)} <==")

    def flush(self):
        if text := self.waiting[self.turn]:
            click.echo(text, nl=False, color=self.color)
            self.waiting[self.turn], self.last = "", text[-1]

    def end(self):
        click.echo("", nl=self.last != "\n")
        self.last = "\n"

    def mark(self, event):
        """`event.text` with its draft tokens marked. The text lags the ids (held back stops, half characters), never leads."""
        queue = self.marked[event.index]
        for i, token in enumerate(event.ids):
            data = self.engine.tokenizer.decode_bytes([token])
            queue.extend((char, i < (event.accepted or 0)) for char in self.decoders[event.index].decode(data))
        queue.extend(("\ufffd", False) for _ in range(len(event.text) - len(queue)))
        shown = [queue.popleft() for _ in event.text]
        runs = ((draft, "".join(char for char, _ in run)) for draft, run in groupby(shown, lambda pair: pair[1]))
        style = (lambda text: click.style(text, fg="green")) if self.color else "[{}]".format
        return "".join(style(text) if draft else text for draft, text in runs)

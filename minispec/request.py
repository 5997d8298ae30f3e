"""One request: its tokens so far, where it ends, and what the user sees of it."""
from dataclasses import dataclass

from minispec.errors import MinispecError
from minispec.fields import refuse_first
from minispec.params import SamplingParams


@dataclass(frozen=True)
class Event:
    """What one round (or the prefill) added to a request. `text` is None without a tokenizer, `accepted` None for the prefill."""
    index: int
    text: str | None
    ids: list[int]
    accepted: int | None
    finish_reason: str | None


@dataclass(frozen=True)
class Output:
    """A finished request. `ids` has the stop id, or the id that completed a stop string, at its end; `text` excludes both.
    `accepted` has one int a round after the prefill: draft tokens among the emitted; uncut, len(ids) == 1 + sum(accepted + 1)."""
    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    finish_reason: str
    accepted: list[int]
    logprobs: list[float] | None


class Request:
    """State of one request from admission to its end.

    index         the place of its prompt in the call, copied to its events
    prompt_ids    N token ids
    stop_ids      ids that end it: params.stop_ids, and the model's (`eos_ids`) unless ignore_eos
    limit         prompt and output never exceed this many tokens: min(N + max_tokens, max_length)
    decoder       minispec.text.Decoder with params.stop, or None without a tokenizer
    slot, pages   its place in the batch and its cache pages; the scheduler's to set
    length        tokens with target KV: the engine sets it during prefill, `take` afterwards
    draft_length  tokens with draft KV; the engine's to set
    ids           emitted tokens; the last one is pending, the root of the next tree, and has no KV yet
    """

    def __init__(self, index: int, prompt_ids: list[int], params: SamplingParams, eos_ids, max_length: int, decoder=None):
        size = len(prompt_ids)
        refuse_first(f"prompt {index}", (size == 0, "is empty; give at least one token"),
                     (size >= max_length, f"has {size} tokens and max_length is {max_length}, which leaves no room for output; "
                                          "shorten the prompt, or raise max_length where the target's context allows it"))
        if params.stop and decoder is None:
            raise MinispecError(f"stop {params.stop[0]!r} needs a tokenizer, which this target lacks; use stop_ids")
        self.index, self.prompt_ids, self.params, self.decoder = index, list(prompt_ids), params, decoder
        self.stop_ids = frozenset(params.stop_ids).union(() if params.ignore_eos else eos_ids)
        self.limit = min(size + params.max_tokens, max_length)
        self.slot, self.pages, self.length, self.draft_length = None, [], 0, 0
        self.ids, self.accepted, self.finish_reason = [], [], None
        self.logprobs = [] if params.logprobs else None
        self.text = None if decoder is None else ""

    @property
    def prefilling(self) -> bool:
        return self.length < len(self.prompt_ids)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted. The row at depth d emits the (d+1)-th, so a tree deeper than room - 1 is useless."""
        return self.limit - len(self.prompt_ids) - len(self.ids)

    def take(self, tokens: list[int], logprobs: list[float] | None = None) -> Event:
        """Takes what the prefill ([first]) or a round ([d1..dk, bonus], k draft tokens accepted) emitted, up to its end.

        The run is cut after the first token that is a stop id, or completes a stop string, or fills `limit`; where a stop and the
        limit fall on the same token the reason is "stop", as in decoding one token at a time. With m tokens kept, accepted is
        min(m, k): a bonus that ends the request still was a bonus. The prefill adds no entry, also when its token is a stop.
        """
        kept, text, accepted = tokens[:self.room], None, None
        reason = "length" if len(kept) == self.room else None
        shown = next((place for place, token in enumerate(kept) if token in self.stop_ids), len(kept))  # a stop id has no text
        if shown < len(kept):
            kept, reason = kept[:shown + 1], "stop"
        if self.decoder is not None:
            text, cut = self.decoder.push(kept[:shown])
            if cut is not None:
                kept, reason = kept[:cut], "stop"
            elif reason:
                text += self.decoder.finish()
            self.text += text
        if self.ids:
            accepted = min(len(kept), len(tokens) - 1)
            self.accepted.append(accepted)
            self.length += len(kept)
        self.ids += kept
        if self.logprobs is not None:
            self.logprobs += logprobs[:len(kept)]
        self.finish_reason = reason
        return Event(self.index, text, kept, accepted, reason)

    def output(self) -> Output:
        return Output(self.prompt_ids, self.ids, self.text, self.finish_reason, self.accepted, self.logprobs)

"""Drafts of replies from the texts that an engine has computed: no second model makes them.

Members of a group, earlier epochs of a task and a reply itself repeat text. Each text is entered
under every run of a few tokens; a draft is what stood behind the newest run that equals the end of
a reply. Drafts may be wrong: the engine samples from its own distribution whatever they say.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# Lengths of the runs under which text is entered, in tokens. The longest that is found counts.
RUNS = (8, 3)
# Tokens of finished texts that are kept; the oldest texts go first.
MOST_TOKENS = 1 << 21
# Newest tokens of a prompt that are entered; what is before them was mostly part of earlier texts.
PROMPT_TOKENS = 8192
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


@dataclass(slots=True)
class _OpenText:
    """A prompt and the reply that grows behind it."""

    number: int
    tokens: Sequence[int]
    # Runs that end before this place are entered.
    next_place: int
    # 0: the prompt was entered with an earlier text.
    prompt_key: int


class DraftIndex:
    """The texts of one engine, and where every run of tokens last stood in them.

    A run is entered only once a whole draft stands behind it: replies that advance together would
    otherwise find each other's ends.
    """

    def __init__(
        self, draft_tokens: int, *, slots: int = MOST_TOKENS, most_tokens: int = MOST_TOKENS
    ) -> None:
        """Sets the length of drafts; `slots`, a power of two: entries kept for each of `RUNS`."""
        self._draft_tokens, self._most_tokens = draft_tokens, most_tokens
        self._mask = slots - 1
        # By the run's hash: the number of the text, and the place behind the run. A newer entry
        # takes the slot of an older one.
        self._places = {length: array("Q", bytes(8 * slots)) for length in RUNS}
        self._texts: dict[int, Sequence[int]] = {}
        self._open: dict[str, _OpenText] = {}
        self._closed: deque[tuple[int, int]] = deque()
        self._closed_tokens = 0
        # The text with which each prompt was entered.
        self._prompts: dict[int, int] = {}
        self._last_number = 0

    def draft(self, name: str, tokens: Sequence[int], *, num_prompt: int, most: int) -> list[int]:
        """Returns at most `most` tokens that may follow; empty when the end of the text is new.

        `tokens`: prompt and reply. The caller passes the same sequence again, grown at its end.
        """
        text = self._open.get(name)
        if text is None:
            text = self._open[name] = self._begin(tokens, num_prompt)
        self._enter(text, len(tokens) - self._draft_tokens + 1)
        end = len(tokens)
        for length in RUNS:
            if end < length:
                continue
            run = tuple(tokens[end - length : end])
            number, place = self._found(length, run)
            found = self._texts.get(number)
            if found is not None and tuple(found[place - length : place]) == run:
                return list(found[place : place + most])
        return []

    def close(self, name: str) -> None:
        """Keeps the text of a request that has ended, until newer ones need its room."""
        text = self._open.pop(name, None)
        if text is None:
            return
        self._enter(text, len(text.tokens))
        self._texts[text.number] = array("I", text.tokens)
        self._closed.append((text.number, text.prompt_key))
        self._closed_tokens += len(text.tokens)
        while self._closed_tokens > self._most_tokens:
            number, prompt_key = self._closed.popleft()
            self._closed_tokens -= len(self._texts.pop(number))
            if prompt_key:
                del self._prompts[prompt_key]

    def _begin(self, tokens: Sequence[int], num_prompt: int) -> _OpenText:
        self._last_number += 1
        number, first, prompt_key = self._last_number, num_prompt, 0
        key = hash(tuple(tokens[:num_prompt]))
        if key not in self._prompts:
            self._prompts[key], prompt_key = number, key
            first = max(0, num_prompt - PROMPT_TOKENS)
        self._texts[number] = tokens
        return _OpenText(number, tokens, first, prompt_key)

    def _enter(self, text: _OpenText, end: int) -> None:
        """Enters the runs that end before place `end`."""
        tokens, stamp = text.tokens, text.number << _PLACE_BITS
        for place in range(text.next_place, end):
            for length in RUNS:
                if place >= length:
                    key = hash(tuple(tokens[place - length : place])) & self._mask
                    self._places[length][key] = stamp | place
        text.next_place = max(text.next_place, end)

    def _found(self, length: int, run: tuple[int, ...]) -> tuple[int, int]:
        entry = self._places[length][hash(run) & self._mask]
        return entry >> _PLACE_BITS, entry & _PLACE_MASK

"""Decides by measurement with how many requests at a time an engine drafts.

Consumes: the number of tokens and the time of each engine step. Produces: the length of the next
drafts, which may be 0. Waits for: nothing.

Drafts pay where a step takes as long for several tokens of a request as for one: with few requests,
and once the layer is trained. So tokens per second are measured with drafts and without, apart for
each power of two of requests. The faster way is kept, and the other is tried again now and then.
No step counts for much more than the median: a stall, or prompts, would decide a trial otherwise.
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

# Steps of a trial. The first ones do not count, since drafts of the step before are verified then.
TRIAL_STEPS = 48
SETTLING_STEPS = 4
# Steps of the faster way before the other one is tried again: the first number, which doubles with
# each trial that changes nothing, and the last one.
FIRST_KEPT = 240
MOST_KEPT = 3840
# Most time that a step counts for, in medians of its period.
MOST_MEDIANS = 1.5


@dataclass
class _Size:
    """What is known for numbers of requests of one power of two."""

    drafts: bool = True
    is_trial: bool = True
    # Whether the way that was kept last is that with drafts, and for how many steps it was kept.
    kept: bool | None = None
    kept_steps: int = FIRST_KEPT
    num_steps: int = 0
    num_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    # Tokens per second by way: without and with drafts. None before the first trial.
    rates: list[float | None] = field(default_factory=lambda: [None, None])

    def end_step(self, num_tokens: int, seconds: float) -> None:
        """Adds a step; after the last one of a period chooses the way of the next period."""
        self.num_steps += 1
        if self.num_steps > SETTLING_STEPS:
            self.num_tokens += num_tokens
            self.seconds.append(seconds)
        if self.num_steps < (TRIAL_STEPS if self.is_trial else self.kept_steps):
            return
        longest = MOST_MEDIANS * median(self.seconds)
        self.rates[self.drafts] = self.num_tokens / sum(
            min(duration, longest) for duration in self.seconds
        )
        plain, drafted = self.rates
        if plain is None or drafted is None or not self.is_trial:
            self.drafts = not self.drafts
            self.is_trial = True
        else:
            self.drafts = drafted > plain
            self.is_trial = False
            is_same = self.drafts == self.kept
            self.kept_steps = min(2 * self.kept_steps, MOST_KEPT) if is_same else FIRST_KEPT
            self.kept = self.drafts
        self.num_steps = 0
        self.num_tokens = 0
        self.seconds = []


class _EndedStep(NamedTuple):
    """An engine step: its size, whether it drafted, and when it ended by the caller's clock."""

    size: _Size
    drafts: bool
    end_s: float


class MeasuredDraftSwitch:
    """Keeps `lookup`, the length of drafts by number of requests, as vLLM's scheduler reads it."""

    def __init__(self, num_tokens: int, most_requests: int) -> None:
        """Takes the number of tokens of a draft, and the most requests of a step."""
        self._num_tokens = num_tokens
        self.lookup = [num_tokens] * (most_requests + 1)
        self._sizes = [_Size() for _ in range(most_requests.bit_length() + 1)]
        # The step that this one follows at once; None after a pause.
        self._previous: _EndedStep | None = None

    def end_step(self, num_requests: int, num_tokens: int, *, drafts: bool, now_s: float) -> None:
        """Notes a step of `num_requests`, which sampled `num_tokens`, and whether it drafted."""
        # A full server is of one size with one that lacks a request.
        number = (num_requests - 1).bit_length()
        size = self._sizes[number]
        previous = self._previous
        self._previous = _EndedStep(size, drafts, now_s)
        if previous is None or previous.size is not size:
            return
        if not previous.drafts == drafts == size.drafts:
            return
        size.end_step(num_tokens, now_s - previous.end_s)
        if size.drafts != drafts:
            for place in range((1 << number >> 1) + 1, min((1 << number) + 1, len(self.lookup))):
                self.lookup[place] = self._num_tokens if size.drafts else 0

    def pause(self) -> None:
        """Notes that the next step does not follow at once."""
        self._previous = None


def draft_switch(
    settings: Any,  # noqa: ANN401 - vLLM's configuration
    num_tokens: int,
) -> MeasuredDraftSwitch | None:
    """Returns the switch for drafts of a layer whose values publishes bring, None for others."""
    drafts = settings.speculative_config
    loading = None if drafts is None else drafts.draft_load_config
    if loading is None or loading.load_format != "dummy":
        return None
    return MeasuredDraftSwitch(num_tokens, int(settings.scheduler_config.max_num_seqs))

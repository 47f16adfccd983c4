"""Decides how much is drafted: as much as a step has room for, and nothing where it does not pay.

A step of few tokens reads all weights for them, so that more tokens cost next to nothing. A step of
many computes, and each token that is drafted in vain costs what a sampled one does. Where this
begins differs by model and GPU, and how often drafts are accepted by task. So both ways are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from slipstream.core.settings.sections import MOST_DRAFTED_EPISODES

# Most tokens of a step with drafts: the most episodes fill it with one drafted token each.
MOST_STEP_TOKENS = 2 * MOST_DRAFTED_EPISODES
# Steps of a trial that were planned before it began, or with the caches of the trial before.
_SKIPPED = 4


class DraftRule:
    """Tries steps with drafts, then steps without, and keeps to the faster way for a while."""

    def __init__(
        self,
        draft_tokens: int,
        *,
        trial_steps: int = 48,
        kept_steps: int = 512,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begins with a trial of drafts; `trial_steps`, above 4, are the steps of either trial."""
        self._draft_tokens = draft_tokens
        self._trial_steps, self._kept_steps, self._clock = trial_steps, kept_steps, clock
        # Whether replies are drafted now, and for how many steps more.
        self._drafts, self._left = True, trial_steps
        # The speed of the trial with drafts, in tokens/s, while the one without them runs.
        self._speed: float | None = None
        self._keeps = False
        self._last_s: float | None = None
        # Sampled tokens and seconds of each step of the trial.
        self._steps: list[tuple[int, float]] = []

    def next_length(self, *, num_replies: int, sampled: int) -> int:
        """Returns how many tokens to draft for each reply of the next step.

        `sampled` are the tokens of the step that ended now, `num_replies` those under way.
        """
        now_s = self._clock()
        if self._last_s is not None and not self._keeps:
            self._steps.append((sampled, now_s - self._last_s))
        self._last_s = now_s
        self._left -= 1
        if not self._left:
            self._turn()
        room = MOST_STEP_TOKENS // max(1, num_replies) - 1
        return max(0, min(self._draft_tokens, room)) if self._drafts else 0

    def _turn(self) -> None:
        if self._keeps:
            self._drafts, self._keeps, self._left = True, False, self._trial_steps
        elif self._speed is None:
            self._speed = self._trial_speed()
            self._drafts, self._left = False, self._trial_steps
        else:
            self._drafts = self._speed >= self._trial_speed()
            self._speed = None
            self._keeps, self._left = True, self._kept_steps
        self._steps = []

    def _trial_speed(self) -> float:
        steps = self._steps[_SKIPPED:]
        # The median leaves out pauses and prompts, which have nothing to do with drafts.
        seconds = statistics.median(seconds for _, seconds in steps)
        return statistics.fmean(sampled for sampled, _ in steps) / max(seconds, 1e-9)

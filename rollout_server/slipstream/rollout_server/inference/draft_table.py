"""N-gram drafts for speculative decoding, made from an engine's own texts, and their length.

Text recurs within a reply, in replies of the same group and in earlier epochs. A table maps the
hash of each n-gram (n is in `RUNS`) to the tokens that followed it last. A draft is the tokens that
followed the longest known n-gram at the end of a reply. A wrong draft does no harm: the engine
samples from its own distribution anyway. All shapes are static and nothing is read back, so no step
waits for the host.

A step of few tokens is bound by reading the weights, so more tokens cost next to nothing. A step of
many tokens is bound by compute, and each rejected token costs as much as a sampled one. The limit
between them depends on model and GPU, the acceptance rate on the task: `DraftRule` times steps with
and without drafts.
"""

import statistics
import time
from collections.abc import Callable

import torch
from slipstream.core.settings.sections import MOST_DRAFTED_EPISODES

# Most tokens of a step with drafts: the most episodes fill it with one drafted token each.
MOST_STEP_TOKENS = 2 * MOST_DRAFTED_EPISODES
# First steps of a trial, which do not count: they were planned before the trial began.
_SKIPPED = 4

# Lengths n of the n-grams, in tokens; the longest n-gram that the table has counts. An engine
# verifies equally many tokens for each reply, so a guess from one token costs nothing.
RUNS = (8, 3, 1)
# Entries of the table, a power of two; a newer entry takes the slot of an older one. With drafts of
# 4 tokens they take 100 MB.
SLOTS = 1 << 22
# Only the last tokens of a prompt, at most this many, are entered; the tokens before them were
# mostly part of earlier texts.
PROMPT_TOKENS = 8192
_LONGEST = max(RUNS)
# The lowest bit of a hash that selects its slot: the highest bits mix all tokens.
_SLOT_BITS = 40


class DraftTable:
    """Maps the n-grams of an engine's texts to the tokens that followed them.

    The caller passes the texts as rows of a table of tokens, [rows, columns]. `rows` has row
    indices; `places` and `ends` have column indices, one for each entry of `rows`.
    """

    def __init__(
        self, draft_tokens: int, *, slots: int = SLOTS, device: torch.device | str = "cpu"
    ) -> None:
        """Sets the length of drafts; the table keeps `slots` entries, a power of two."""
        self._mask = slots - 1
        # One slot more, which is never read: entries that do not count are written there.
        self._hashes = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(slots + 1, draft_tokens, dtype=torch.int32, device=device)
        self._behind = torch.arange(draft_tokens, device=device)
        self._before = torch.arange(-_LONGEST, 0, device=device)
        self._runs = torch.tensor(RUNS, device=device)
        self._order = torch.arange(len(RUNS), 0, -1, device=device)
        self._factors = _factors().to(device)

    def enter(
        self, texts: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Stores the tokens from each place on as the draft of the n-grams before that place.

        Skips places where `counts` is False. The caller must set it to False where fewer tokens
        follow than a draft has: otherwise replies that advance together would use each other's
        unfinished ends as drafts.
        """
        hashes, slots, whole = self._hashed(texts, rows, places)
        slots = slots.where(whole & counts[:, None], self._mask + 1)
        behind = (places[:, None] + self._behind).clamp(0, texts.shape[1] - 1)
        drafts = texts[rows[:, None], behind].int()
        self._hashes[slots] = hashes
        self._drafts[slots] = drafts[:, None].expand(-1, len(RUNS), -1)

    def draft(self, texts: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns drafts, int64 [rows, draft tokens], that continue the texts before `ends`.

        Where no n-gram is known, the draft repeats the last token.
        """
        hashes, slots, whole = self._hashed(texts, rows, ends)
        found = whole & (self._hashes[slots] == hashes)
        chosen = (found * self._order).argmax(1, keepdim=True)
        drafts = self._drafts[slots.gather(1, chosen).squeeze(1)].long()
        last = texts[rows, (ends - 1).clamp(min=0)].long()
        return drafts.where(found.any(1, keepdim=True), last[:, None])

    def _hashed(
        self, texts: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns hash, slot and a flag of each n-gram before `ends`: [rows, n-gram lengths] each.

        The flag says whether the text has that many tokens.
        """
        before = (ends[:, None] + self._before).clamp(0, texts.shape[1] - 1)
        tokens = texts[rows[:, None], before].long() + 1
        hashes = (tokens[:, :, None] * self._factors).sum(1)
        slots = (hashes >> _SLOT_BITS) & self._mask
        return hashes, slots, ends[:, None] >= self._runs


def _factors() -> torch.Tensor:
    """Returns the hash factors [longest n, n-gram lengths]: odd constants, 0 outside an n-gram."""
    chosen = torch.Generator().manual_seed(20)
    factors = torch.randint(-(1 << 62), 1 << 62, (_LONGEST, len(RUNS)), generator=chosen)
    places = torch.arange(_LONGEST)[:, None]
    return (factors * 2 + 1) * (places >= _LONGEST - torch.tensor(RUNS))


class DraftRule:
    """Times some steps with drafts, then some without, and uses the faster way for a while."""

    def __init__(
        self,
        draft_tokens: int,
        *,
        trial_steps: int = 48,
        kept_steps: int = 512,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A trial has `trial_steps` steps (above 4); between two trials are `kept_steps` steps."""
        self._draft_tokens = draft_tokens
        self._trial_steps, self._kept_steps, self._clock = trial_steps, kept_steps, clock
        # Whether replies are drafted now, and for how many steps more.
        self._drafts, self._left = True, trial_steps
        # The speed of the trial with drafts, in tokens/s, while the trial without drafts runs.
        self._speed: float | None = None
        self._keeps = False
        self._last_s: float | None = None
        # Sampled tokens and seconds of each step of the trial.
        self._steps: list[tuple[int, float]] = []

    def next_length(self, *, num_replies: int, sampled: int) -> int:
        """Returns how many tokens to draft for each reply of the next step.

        `sampled` is the number of tokens sampled in the step that has just ended, `num_replies` the
        number of running replies.
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

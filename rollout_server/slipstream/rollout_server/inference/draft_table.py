"""Drafts of replies from the texts that an engine has computed, looked up on the engine's device.

Members of a group, earlier epochs of a task and a reply itself repeat text. The tokens behind every
run of a few tokens are kept under the run's hash; the newest stay. A draft is what stood behind
the longest run that equals the end of a reply. Drafts may be wrong: the engine samples from its own
distribution whatever they say.

All shapes are known beforehand and nothing is read back, so that no step waits for the host.
"""

from __future__ import annotations

import torch

# Lengths of the runs under which text is entered, in tokens. The longest that is found counts. An
# engine verifies as many tokens for each reply, so that a guess from one token costs nothing.
RUNS = (8, 3, 1)
# Entries of the table, a power of two; a newer entry takes the slot of an older one. With drafts of
# 4 tokens they take 100 MB.
SLOTS = 1 << 22
# Most tokens of a prompt that are entered, the newest; what is before them was mostly part of
# earlier texts.
PROMPT_TOKENS = 8192
_LONGEST = max(RUNS)
# The lowest bit of a hash of which its slot is made: the highest bits mix all tokens.
_SLOT_BITS = 40


class DraftTable:
    """The tokens that stood behind the runs of an engine's texts.

    Texts are rows of a table of tokens that the caller keeps, and places are columns of it.
    """

    def __init__(
        self, draft_tokens: int, *, slots: int = SLOTS, device: torch.device | str = "cpu"
    ) -> None:
        """Sets the length of drafts; `slots`, a power of two: entries that are kept."""
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
        """Enters the tokens behind each place, under the runs that end there, where `counts`.

        A place counts only where a whole draft stands behind it: replies that advance together
        would otherwise find each other's ends.
        """
        hashes, slots, whole = self._hashed(texts, rows, places)
        slots = slots.where(whole & counts[:, None], self._mask + 1)
        behind = (places[:, None] + self._behind).clamp(0, texts.shape[1] - 1)
        drafts = texts[rows[:, None], behind].int()
        self._hashes[slots] = hashes
        self._drafts[slots] = drafts[:, None].expand(-1, len(RUNS), -1)

    def draft(self, texts: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns the tokens that may follow the texts that end at `ends`, of dtype int64.

        Where no run is known, the last token is repeated.
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
        """The hash and the slot of each run before `ends`, and whether the text has that run."""
        before = (ends[:, None] + self._before).clamp(0, texts.shape[1] - 1)
        tokens = texts[rows[:, None], before].long() + 1
        hashes = (tokens[:, :, None] * self._factors).sum(1)
        slots = (hashes >> _SLOT_BITS) & self._mask
        return hashes, slots, ends[:, None] >= self._runs


def _factors() -> torch.Tensor:
    """A factor for each token of each run, 0 before the run; the same in every process."""
    chosen = torch.Generator().manual_seed(20)
    factors = torch.randint(-(1 << 62), 1 << 62, (_LONGEST, len(RUNS)), generator=chosen)
    places = torch.arange(_LONGEST)[:, None]
    return (factors * 2 + 1) * (places >= _LONGEST - torch.tensor(RUNS))

"""Computes the ranks of each parallel group, in Megatron's order, without Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from slipstream.core.settings.sections import ParallelSection

Group: TypeAlias = tuple[int, ...]

# Largest number of groups that a line lists; of more groups it has the first ones and the last.
SHOWN_GROUPS = 8
# Largest number of ranks of a group that are listed.
SHOWN_RANKS = 4


@dataclass(frozen=True)
class RankLayout:
    """The sizes of all groups of `world_size` ranks.

    The ranks form two grids. Attention, embeddings and dense layers use tp, cp, dp and pp; experts
    use etp, ep, expert_dp and pp. In both grids the first axis varies fastest. The grids share only
    the pipeline stages, so that ep is independent of tp * cp.
    """

    world_size: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, parallel: ParallelSection, world_size: int) -> RankLayout:
        """Returns the layout of all ranks; an `etp` of None means tp.

        Raises ValueError with the rule when the sizes do not divide `world_size`.
        """
        etp = parallel.etp or parallel.tp
        dense, expert = parallel.tp * parallel.pp * parallel.cp, parallel.ep * etp * parallel.pp
        for text, size in (("tp * pp * cp", dense), ("ep * etp * pp", expert)):
            if world_size % size:
                raise ValueError(
                    f"learner.world_size must be a multiple of {text} = {size}, got {world_size}"
                )
        return cls(world_size, parallel.tp, parallel.cp, parallel.pp, parallel.ep, etp)

    @property
    def dp(self) -> int:
        """The number of replicas of the model without experts; each has its own micro batches."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """The number of replicas of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def groups(self) -> dict[str, tuple[Group, ...]]:
        """Returns all groups of each kind: tp, cp, dp, pp, etp, ep, expert_dp."""
        dense = (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp))
        expert = (("etp", self.etp), ("ep", self.ep), ("expert_dp", self.expert_dp), dense[3])
        return _grid_groups(expert) | _grid_groups(dense)

    def describe(self, *, has_experts: bool) -> str:
        """Returns a line of sizes, and for each kind with several ranks a line of its groups.

        Groups of experts are left out if `has_experts` is false.
        """
        found = self.groups()
        noun = "rank" if self.world_size == 1 else "ranks"
        sizes = f"tp {self.tp}, pp {self.pp}, cp {self.cp}, dp {self.dp}"
        names = ["tp", "cp", "dp", "pp"]
        if has_experts:
            sizes += f"; experts: ep {self.ep}, etp {self.etp}, dp {self.expert_dp}"
            names += ["ep", "etp", "expert_dp"]
        lines = [f"{self.world_size} {noun}: {sizes}"]
        lines += [
            f"{name}: {_groups_text(found[name])}" for name in names if len(found[name][0]) > 1
        ]
        return "\n".join(lines)


def _grid_groups(axes: Sequence[tuple[str, int]]) -> dict[str, tuple[Group, ...]]:
    sizes = [size for _, size in axes]
    grid = np.arange(math.prod(sizes)).reshape(sizes[::-1])
    return {
        name: tuple(
            tuple(row) for row in np.moveaxis(grid, -1 - axis, -1).reshape(-1, size).tolist()
        )
        for axis, (name, size) in enumerate(axes)
    }


def _groups_text(groups: Sequence[Group]) -> str:
    texts = list(_shortened([_ranks_text(group) for group in groups], SHOWN_GROUPS, " ... "))
    return f"{len(groups)} x {len(groups[0])}: {''.join(texts)}"


def _ranks_text(ranks: Group) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{''.join(_shortened([str(rank) for rank in ranks], SHOWN_RANKS, ' .. '))}]"


def _shortened(texts: Sequence[str], limit: int, gap: str) -> Iterator[str]:
    """Yields the texts joined by spaces.

    If they are more than `limit`, yields the first `limit` - 1 joined, then `gap`, then the last.
    """
    if len(texts) <= limit:
        yield " ".join(texts)
        return
    yield " ".join(texts[: limit - 1])
    yield gap
    yield texts[-1]

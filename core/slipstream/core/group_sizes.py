"""How many episodes of a task a group has: as many as the settings say for its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.core.extension import installed, resolve

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


@dataclass(frozen=True)
class GroupSizes:
    """The sizes of a run's groups, in episodes."""

    # `algorithm.group_size`.
    default: int
    # The sizes of environments that have their own, by name.
    of_environments: Mapping[str, int] = field(default_factory=dict)

    def of(self, environment: str) -> int:
        return self.of_environments.get(environment, self.default)

    @property
    def smallest(self) -> int:
        return min([self.default, *self.of_environments.values()])

    @property
    def largest(self) -> int:
        return max([self.default, *self.of_environments.values()])


def group_sizes(default: int, extensions: Mapping[str, Any]) -> GroupSizes:
    """Returns the sizes for `algorithm.group_size` and the plain tables of `extensions`.

    Raises pydantic's ValidationError for an invalid table.
    """
    sizes: dict[str, int] = {}
    for manifest in installed():
        if manifest.group_sizes and manifest.name in extensions:
            sizes |= resolve(manifest.group_sizes)(extensions[manifest.name])
    return GroupSizes(default, sizes)


def recorded_group_sizes(table: Mapping[str, Any]) -> GroupSizes:
    """Returns the sizes by a run's plain settings; raises KeyError or ValueError."""
    default = int(table["algorithm"]["group_size"])
    return group_sizes(default, table.get("extensions", {}))


def group_sizes_of(config: Tables) -> GroupSizes:
    """Returns the sizes of the groups of a run, whose settings must be valid."""
    return group_sizes(config.algorithm.group_size, config.extensions)

"""The settings of the option."""

from pydantic import Field
from slipstream.core.settings.section import Section


class OutsideSection(Section):
    """The table `[extensions.outside]`."""

    # Factor of the count that the trainer reports.
    factor: float = Field(1.0, gt=0)


class CountedSection(Section):
    """The table `[counted]`."""

    # Number of the trajectories of earlier runs.
    earlier: int = Field(0, ge=0)


class MedianArguments(Section):
    """The arguments of the advantage `group_median`."""

    # Factor of the distance from the median.
    scale: float = Field(1.0, gt=0)

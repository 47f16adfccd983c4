"""Tables of samples."""

from pydantic import JsonValue
from slipstream.learner.controller.reporting.trackers import Lines

# The columns of a table of samples, as the lines name them.
COLUMNS = (
    *("step", "environment", "task_index", "prompt", "reply", "answer"),
    *("reward", "advantage", "lag", "versions", "status", "sampled_tokens"),
)


def table_rows(episodes: Lines) -> list[list[JsonValue]]:
    """Returns a row of `COLUMNS` for each episode; versions become a text such as `12 by 3`."""
    rows = []
    for line in episodes:
        versions = ", ".join(f"{length} by {version}" for length, version in line["versions"])
        rows.append([versions if name == "versions" else line[name] for name in COLUMNS])
    return rows

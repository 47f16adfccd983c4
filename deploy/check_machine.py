"""Says in one line why `make install` could not succeed on this machine, before it begins.

Any Python 3 can run it: too old a one is what it looks for.
"""

import shutil
import sys

OLDEST, NEWEST = (3, 11), (3, 12)
NEEDED_GB = 5


def problem(major: int, minor: int, free_bytes: int) -> str:
    """Returns what is wrong, and what to do; "" when nothing is."""
    if not OLDEST <= (major, minor) <= NEWEST:
        return (
            f"Python must be {OLDEST[0]}.{OLDEST[1]} or {NEWEST[0]}.{NEWEST[1]}, got "
            f"{major}.{minor}: make install PYTHON=python{NEWEST[0]}.{NEWEST[1]}"
        )
    if free_bytes < NEEDED_GB * 10**9:
        return (
            f"the environment takes {NEEDED_GB} GB, and the disk of this folder has "
            f"{free_bytes / 1e9:.1f} GB left: free some, or make install VENV=FOLDER elsewhere"
        )
    return ""


if __name__ == "__main__":
    found = problem(*sys.version_info[:2], shutil.disk_usage(".").free)
    if found:
        sys.exit(f"slipstream: {found}")

"""Says in one line why `make install` could not succeed on this machine, before it begins.

Any Python 3 can run it: too old a one is what it looks for. Given the environment's folder it says
whether the torch in there is the wrong build.
"""

import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
from pathlib import Path

OLDEST = (3, 11)
NEWEST = (3, 12)
NEEDED_GB = 5
NEEDED_CORES = 2
NEEDED_MEMORY_GB = 8


def problem(major: int, minor: int, free_bytes: int) -> str:
    """Returns what is wrong, and what to do, or "" if nothing is."""
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


def shortages(cores: int, memory_bytes: int) -> list[str]:
    """Returns what this machine has less of than a run needs, with what comes of it."""
    found = []
    if cores < NEEDED_CORES:
        found.append(f"a run needs {NEEDED_CORES} cores, and has {cores} here: it is slow")
    # Part of the memory is the kernel's own.
    if memory_bytes < 0.9 * NEEDED_MEMORY_GB * 10**9:
        found.append(
            f"a run needs {NEEDED_MEMORY_GB} GB of memory, and has {memory_bytes / 1e9:.1f} GB "
            "here: Linux may kill it"
        )
    return found


def wrong_torch(environment: str) -> str:
    """Returns what is wrong with the torch of this Python, and what to do, or "" if nothing is.

    torch is not imported: that takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    cuda = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    if cuda is None:
        return ""
    version = importlib.metadata.version("torch")
    return (
        f"torch {version} of your package index is the build for CUDA {cuda}, and vLLM's CPU build "
        f"needs torch's: rm -r {environment}; make install "
        "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        found = wrong_torch(sys.argv[1])
    else:
        found = problem(*sys.version_info[:2], shutil.disk_usage(".").free)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for shortage in shortages(len(os.sched_getaffinity(0)), memory):
            print(f"slipstream: {shortage}", file=sys.stderr)
    if found:
        sys.exit(f"slipstream: {found}")

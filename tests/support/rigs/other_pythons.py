"""Virtual environments with and without what a worker needs."""

import sys
import venv
from pathlib import Path


def bare_python(folder: Path) -> Path:
    """Makes a virtual environment with no package; returns its interpreter."""
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def furnished_python(folder: Path) -> Path:
    """Makes one that has this one's packages, but not Slipstream."""
    python = bare_python(folder)
    (site,) = folder.glob("lib/*/site-packages")
    # An environment may have another one behind it, as that of `make candidate`.
    behind = [Path(path) for path in sys.path if path.endswith("site-packages")]
    for package in (path for folder in behind for path in folder.iterdir()):
        is_ours = (
            package.name.strip("_").startswith("slipstream") or package.suffix == ".pth"
        )
        if not is_ours and not (site / package.name).exists():
            (site / package.name).symlink_to(package)
    return python

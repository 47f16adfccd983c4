"""Virtual environments with and without what a worker needs."""

import sysconfig
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
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.strip("_").startswith("slipstream"):
            (site / package.name).symlink_to(package)
    return python

"""Starts an environment worker with another Python interpreter than the rollout server's.

    /path/to/venv/bin/python other_python.py FOLDERS ARGUMENTS...

FOLDERS are the folders of the server's package `slipstream`, so that server and worker have the
same version. All other packages come from the other interpreter, which must have those in `NEEDS`.
This file runs as a script, and imports only the standard library until `NEEDS` are checked.
"""

import sys

if __name__ == "__main__":
    # A script's folder comes first, and this folder has modules with names of Python's own modules.
    del sys.path[0]

import importlib.util  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import runpy  # noqa: E402
import types  # noqa: E402

WORKER = "slipstream.client.worker"
MIN_PYTHON = (3, 11)
# Modules that the worker imports, each with the requirement in pyproject.toml that provides it.
NEEDS = {
    "grpc": "grpcio>=1.76,<2",
    "google.protobuf": "protobuf>=6.33.5,<8",
    "google.rpc": "googleapis-common-protos>=1.66,<2",
    "numpy": "numpy>=2",
    "pydantic": "pydantic>=2.11,<3",
    "uvicorn": "uvicorn>=0.34,<1",
    "httptools": "httptools>=0.6.3,<1",
}
REFUSED = 2


# In quotes, here and below: older interpreters, which `main` refuses, cannot evaluate the type.
def worker_program(python: str) -> "tuple[str, ...]":
    """Returns a worker's command, before its arguments; "" is this process's interpreter."""
    if not python:
        return (sys.executable, "-m", WORKER)
    folders = os.pathsep.join(sys.modules["slipstream"].__path__)
    return (python, os.path.abspath(__file__), folders)


def main() -> None:
    """Runs the worker in this process, or exits with 2 and the reason on stderr."""
    folders, *arguments = sys.argv[1:]
    if sys.version_info < MIN_PYTHON:
        version_text = ".".join(map(str, sys.version_info[:2]))
        _refuse(f"Python 3.11 or newer is needed, {sys.executable} is {version_text}")
    needed = " ".join(f"'{need}'" for module, need in NEEDS.items() if not _is_there(module, need))
    if needed:
        _refuse(
            f"{sys.executable} lacks what a worker needs: {sys.executable} -m pip install {needed}"
        )
    package = types.ModuleType("slipstream")
    package.__path__ = folders.split(os.pathsep)
    sys.modules["slipstream"] = package
    if sys.prefix != sys.base_prefix:
        # To activate the virtual environment does the same.
        os.environ["VIRTUAL_ENV"] = sys.prefix
        programs = os.path.join(sys.prefix, "bin")
        os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    sys.argv = [WORKER, *arguments]
    runpy.run_module(WORKER, run_name="__main__", alter_sys=True)


def _is_there(module: str, requirement: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        if importlib.util.find_spec(module) is None:
            return False
        name, _, bounds = requirement.partition(">=")
        present = _numbers(version(name))
    except (ModuleNotFoundError, PackageNotFoundError):
        return False
    lowest, _, below = bounds.partition(",<")
    return _numbers(lowest) <= present and (not below or present < _numbers(below))


def _numbers(version: str) -> "list[int]":
    """Returns the leading numbers of a version: [1, 76, 0] for "1.76.0rc1"."""
    leading = re.match(r"\d+(?:\.\d+)*|", version)
    return [int(number) for number in leading[0].split(".") if number] if leading else []


def _refuse(line: str) -> None:
    print(line, file=sys.stderr)
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()

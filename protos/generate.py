"""Generates the Python code of all .proto files below a root, or checks the committed code."""

import argparse
import filecmp
import importlib.resources
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ENDS = (".py", ".pyi", "_grpc.py")


def generate(root: Path, out: Path) -> list[Path]:
    """Writes the code of every .proto file below `root`; returns the paths written, under `out`."""
    files = sorted(path.relative_to(root) for path in root.rglob("*.proto"))
    include = importlib.resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{root}", f"-I{include}", *outputs, *map(str, files)]) != 0:
        raise SystemExit("protoc failed")
    return sorted(out / f"{path.with_suffix('')}_pb2{end}" for path in files for end in ENDS)


def main() -> int:
    """Returns the exit code: 1 if --check finds a difference, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.root, arguments.root)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generated = generate(arguments.root, Path(folder))
        names = [str(path.relative_to(folder)) for path in generated]
        _, changed, missing = filecmp.cmpfiles(folder, arguments.root, names, shallow=False)
        stale = sorted(changed + missing)
    if stale:
        print(
            f"not what the .proto files say: {', '.join(stale)}; run `make protos`", file=sys.stderr
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

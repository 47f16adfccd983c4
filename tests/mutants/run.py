"""Takes away the code behind each row of the feature table and shows that its tests notice.

`python tests/mutants/run.py [ITEM ...]` works on a copy of the tree. All tests of the rows must
pass as they are; with each mutant at least one test of its row must fail. Exit code 1 otherwise.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from table import ROOT, Mutant, Row, rows

SOURCE_ROOTS = (
    "protos",
    "core",
    "client",
    "environments",
    "rollout_server",
    "learner",
    "extensions",
)
ALL_PASSED = 0
SOME_FAILED = 1
# Longest time of one call of pytest.
LIMIT_S = 3600


def main() -> int:
    """Runs the rows that are named, or all of them, and prints a line for each mutant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "items", nargs="*", type=int, help="numbers of rows; default: all"
    )
    expected = parser.parse_args().items
    rows_to_run = [
        row for row in rows() if row.tests and (not expected or row.item in expected)
    ]
    with tempfile.TemporaryDirectory(prefix="slipstream-mutants-") as folder:
        tree = copy_tree(Path(folder) / "tree")
        unchanged = list(
            dict.fromkeys(test for row in rows_to_run for test in row.tests)
        )
        if not rows_to_run or run_tests(unchanged, tree, quiet=False) != ALL_PASSED:
            print("the tests must pass before anything is changed")
            return 1
        verdicts = [
            check(row, mutant, tree) for row in rows_to_run for mutant in row.mutants
        ]
    print(
        f"{len(rows_to_run)} rows, {len(verdicts)} mutants, {verdicts.count(False)} not noticed"
    )
    return 0 if all(verdicts) else 1


def copy_tree(target: Path) -> Path:
    """What git knows of the tree, as it lies there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in listed.split("\0"):
        source = ROOT / name
        # The client has a link to the folder of the locks.
        if name and (source.is_file() or source.is_symlink()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    return target


def check(row: Row, mutant: Mutant, tree: Path) -> bool:
    """Whether the row's tests notice the mutant; the tree is as before afterwards."""
    path = tree / mutant.file
    original = path.read_text()
    assert original.count(mutant.find) == 1, mutant.name
    path.write_text(original.replace(mutant.find, mutant.replace))
    started = time.monotonic()
    try:
        code = run_tests(mutant.tests or row.tests, tree, quiet=True)
    finally:
        path.write_text(original)
    noticed = code == SOME_FAILED
    verdict = "noticed" if noticed else f"NOT NOTICED (pytest {code})"
    print(
        f"{row.item:3}  {verdict}  {time.monotonic() - started:4.0f} s  {mutant.name}",
        flush=True,
    )
    return noticed


def run_tests(tests: Sequence[str], tree: Path, *, quiet: bool) -> int:
    """Pytest's exit code, slow tests included."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(tree / root) for root in SOURCE_ROOTS),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env=environment,
        stdout=output,
        stderr=output,
        timeout=LIMIT_S,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

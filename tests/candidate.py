"""Installs other versions beside the pinned ones, and runs what proves a stack.

`make candidate PINS="megatron-core==0.19.0 transformers==5.20.2"` leaves versions, parts and tests
that failed in build/candidate/report.md; `ONLY="gaps replay"` chooses parts. The environment of the
repository is not changed: what has no pin comes from it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)")
TRAINER = "tests/unit/learner/trainer"
ENGINE = "tests/unit/rollout_server"
# Part -> its tests. Those that take minutes are among them, but for layouts of 16 ranks and images.
PARTS: Mapping[str, tuple[str, ...]] = {
    "patches": (
        TRAINER,
        "tests/unit/extensions",
        "tests/integration/test_cpu_repairs.py",
    ),
    "settings": (
        "tests/integration/test_passed_settings.py",
        "test_engine_arguments.py",
    ),
    "families": (
        "test_model_fields.py",
        "test_model_tensors.py",
        "test_trainer_vision.py",
    ),
    "layouts": ("test_trainer_parity.py", "test_trainer_lora.py", "test_recompute.py"),
    "steps": (
        "test_fuzzed_steps.py",
        "test_numeric_checks.py",
        "test_trainer_float16.py",
    ),
    "checkpoints": ("test_checkpoints.py",),
    "engine": (ENGINE, "test_rollout_engine.py", "test_tensor_parallel_engine.py"),
    "copy plans": ("test_copy_plan.py", "test_copied_weights.py"),
    "gaps": ("test_families_in_vllm.py",),
    "replay": ("test_recorded_experts.py", "test_replay_failures.py"),
    "scheduler": (
        "test_chunking_scheduler.py",
        "test_planned_drafts.py",
        "test_drafts.py",
    ),
    "pauses": ("test_engine_pause.py", "test_turns.py", "test_kept_context.py"),
    "runs": ("test_run_quickstart.py", "test_weight_stream.py"),
}
# Parts that consist of slow tests, which others leave out.
SLOW = ("gaps", "replay")


# Model -> field -> value.
Fields: TypeAlias = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Result:
    """What pytest said about a part; `failed` has a test's name and its last line."""

    passed: int
    skipped: int
    failed: tuple[tuple[str, str], ...]
    seconds: float
    code: int

    @property
    def holds(self) -> bool:
        return self.code == 0 and self.passed > 0


def split(pins: Iterable[str]) -> dict[str, str]:
    """Returns version by package; ends the program for what is no exact pin."""
    fields_of_modules = {}
    for pin in pins:
        if (match := PIN.fullmatch(pin)) is None:
            raise SystemExit(f"candidate: a pin must be NAME==VERSION, got {pin!r}")
        fields_of_modules[match[1]] = match[2]
    return fields_of_modules


def install(pins: Mapping[str, str], folder: Path) -> Path:
    """Makes an environment of the pins in front of the packages of this one; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    exact = [f"{name}=={version}" for name, version in pins.items()]
    subprocess.run([*pip, "--ignore-requires-python", *exact], check=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    behind = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "zz_pinned.pth").write_text(behind)
    subprocess.run([*pip, "--no-build-isolation", "--editable", str(ROOT)], check=True)
    return python


def versions(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the versions that a Python finds of the packages that decide results, and `names`."""
    code = (
        "import json, sys; from slipstream.core.machine.description import *;"
        "print(json.dumps(describe_packages() | installed(sys.argv[1:])))"
    )
    command = [str(python), "-c", code, *names]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    parsed: dict[str, str] = json.loads(done.stdout)
    return parsed


def paths(part: str) -> list[str]:
    """Returns the files and folders of a part's tests; a bare name is of tests/integration."""
    return [
        path if "/" in path else f"tests/integration/{path}" for path in PARTS[part]
    ]


def prove(python: Path, part: str, log: Path) -> Result:
    """Runs the tests of a part."""
    junit = log.with_suffix(".xml")
    marks = "not gpu" if part in SLOW else "not gpu and not slow"
    junit.unlink(missing_ok=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-m",
        marks,
        f"--junitxml={junit}",
        *paths(part),
    ]
    environ = os.environ | {"TORCHDYNAMO_DISABLE": "1", "FUZZ": "0.2"}
    start_s = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=file, stderr=file)
    return read(junit, time.monotonic() - start_s, done.returncode)


def fields(python: Path, models: Path, out: Path) -> Fields:
    """Returns Megatron's configuration of each tiny model; makes the models if none are there."""
    command = [str(python), "-m", "support.rigs.provider_fields", str(models), str(out)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    with out.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, env=environ, stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"candidate: models cannot be configured: see {log.name}")
    parsed: Fields = json.loads(out.read_text())
    return parsed


def changes(pinned: Fields, candidate: Fields) -> dict[str, list[str]]:
    """Returns the models of each change of a field; a test need not notice one."""
    names_by_cause: dict[str, list[str]] = {}
    for model, before in pinned.items():
        after = candidate[model]
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                change = (
                    f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
                )
                names_by_cause.setdefault(change, []).append(model)
    return names_by_cause


def read(junit: Path, seconds: float, code: int) -> Result:
    """Returns the result in pytest's file, which is missing when pytest itself has failed."""
    failed = []
    skipped = 0
    passed = 0
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        wrong = [test for test in case if test.tag in ("failure", "error")]
        for test in wrong:
            message = (test.get("message") or "").strip().splitlines() or [""]
            failed.append((f"{case.get('classname')}::{case.get('name')}", message[0]))
        skipped += case.find("skipped") is not None
        passed += not wrong and case.find("skipped") is None
    return Result(passed, skipped, tuple(failed), seconds, code)


def heading(
    pinned: Mapping[str, str],
    candidate: Mapping[str, str],
    changed: Mapping[str, list[str]],
) -> str:
    """Returns the beginning of the page about a candidate: versions and fields that differ."""
    lines = ["# Candidate", "", "| package | pinned | candidate |", "|---|---|---|"]
    lines += [
        f"| {name} | {pinned.get(name, 'none')} | {candidate.get(name, 'none')} |"
        for name in sorted({*pinned, *candidate})
        if pinned.get(name) != candidate.get(name)
    ]
    lines += [
        "",
        "Fields of Megatron's configuration that differ"
        + (":" if changed else ": none."),
    ]
    lines += [
        f"- `{change}`: {', '.join(models)}" for change, models in changed.items()
    ]
    return "\n".join([*lines, ""])


def report(results: Mapping[str, Result]) -> str:
    """Returns the rest of the page: parts, and tests that failed."""
    lines: list[str] = []
    lines += [
        "",
        "| part | verdict | passed | failed | skipped | s |",
        "|---|---|---|---|---|---|",
    ]
    for part, result in results.items():
        counts = f"{result.passed} | {len(result.failed)} | {result.skipped}"
        verdict = "holds" if result.holds else "**fails**"
        lines.append(f"| {part} | {verdict} | {counts} | {result.seconds:.0f} |")
    for part, result in results.items():
        if not result.holds:
            lines += ["", f"## {part}: pytest ended with {result.code}", ""]
            lines += _grouped(result.failed)
    left_out = [part for part in PARTS if part not in results]
    lines += ["", f"Not run: {', '.join(left_out)}."] if left_out else []
    return "\n".join([*lines, ""])


def _grouped(failed: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each cause, with the first of its tests."""
    causes: dict[str, list[str]] = {}
    for name, cause in failed:
        causes.setdefault(cause, []).append(name)
    return [
        f"- `{names[0]}`{f' and {len(names) - 1} more' if names[1:] else ''}: {cause}"
        for cause, names in causes.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every part holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pins", nargs="+", metavar="NAME==VERSION")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build/candidate")
    options = parser.parse_args(arguments)
    pins = split(options.pins)
    folder = options.folder.resolve()
    python = install(pins, folder / "venv")
    pinned, candidate = (
        versions(interpreter, pins) for interpreter in (Path(sys.executable), python)
    )
    if unmet := {
        name: expected
        for name, expected in pins.items()
        if candidate.get(name) != expected
    }:
        raise SystemExit(f"candidate: asked for {unmet}, installed are {candidate}")
    places = {
        Path(sys.executable): folder / "pinned.json",
        python: folder / "candidate.json",
    }
    configured = [
        fields(folder_of_fields, folder / "models", out)
        for folder_of_fields, out in places.items()
    ]
    begin = heading(pinned, candidate, changes(*configured))
    results: dict[str, Result] = {}
    for part in options.only:
        results[part] = prove(python, part, folder / f"{part.replace(' ', '_')}.log")
        (folder / "report.md").write_text(begin + report(results))
        print(f"{part}: {'holds' if results[part].holds else 'fails'}", flush=True)
    print((folder / "report.md").read_text())
    return 0 if all(result.holds for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

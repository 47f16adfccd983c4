"""The whole examination: this process checks the machine, other programs what they must import."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.client.doctor.findings import Finding, Verdict, problem, table
from slipstream.client.doctor.gpus import check_build, check_gpus
from slipstream.client.doctor.machine import check_machine
from slipstream.client.doctor.packages import check_packages
from slipstream.client.doctor.queue import check_queue
from slipstream.client.doctor.setup import check_passed, check_setup
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import load_config
from slipstream.core.machine.gpus import list_gpus
from slipstream.core.settings.config import Config

LEARNER_PROGRAM = "slipstream.learner.trainer.doctor"
PROGRAM_LIMIT_S = 120.0


async def run_doctor(path: Path | None, overrides: Sequence[str], *, as_json: bool) -> int:
    """Prints all findings; returns 1 if one of them is a problem. ConfigError for a wrong file."""
    config = load_config(path, overrides) if path is not None else None
    findings = await examine(config)
    if as_json:
        say("\n".join(found.write() for found in findings))
    else:
        say(table(findings))
        say(conclusion(findings))
    return 1 if any(found.verdict is Verdict.PROBLEM for found in findings) else 0


async def examine(config: Config | None) -> list[Finding]:
    """Returns the findings about this machine, and about a configuration on it."""
    gpus = list_gpus()
    has_gpu = bool(gpus)
    run_dir = config.run.dir if config is not None else Path("runs")
    findings = [*check_machine(run_dir=run_dir, has_gpu=has_gpu), *check_packages()]
    findings += check_gpus(gpus)
    findings += check_build(gpus, config)
    if importlib.util.find_spec("torch") is not None:
        findings += await ask_program(LEARNER_PROGRAM)
    if config is not None:
        findings += await asyncio.to_thread(lambda: list(check_setup(config, gpus)))
        findings += await check_passed(config)
        findings += await check_queue(config)
    return findings


async def ask_program(module: str, *, limit_s: float = PROGRAM_LIMIT_S) -> list[Finding]:
    """Returns the findings that a module prints; one problem if it fails or misses `limit_s`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return [problem("torch", f"{module} did not end within {limit_s:g} s", "see nvidia-smi")]
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        said = lines[-1] if lines else f"exit code {process.returncode}"
        return [problem("torch", f"{module}: {said}", "install the tested versions")]
    return [Finding.read(line) for line in output.decode().splitlines()]


def conclusion(findings: Sequence[Finding]) -> str:
    """Returns the last line: how many problems and hints there are."""
    problems = sum(found.verdict is Verdict.PROBLEM for found in findings)
    hints = sum(found.verdict is Verdict.ADVICE for found in findings)
    what = f"{problems} problem{'s' * (problems != 1)}" if problems else "nothing"
    stands = "stand" if problems > 1 else "stands"
    return f"\n{what} {stands} in the way of a run, {hints} hint{'s' * (hints != 1)}"

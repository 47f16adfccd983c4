"""Evaluations of Inspect, unchanged: `inspect eval` at the run's model, at a version of the run.

    [[evaluations]]
    name = "sums"
    reference = "slipstream.environments.frameworks.inspect_ai:Inspect"
    num_episodes = 4
    args = { inspect = "venvs/inspect/bin/inspect", task = "evals/sums.py", samples = 64 }

An episode is one evaluation of `samples_per_episode` samples, by Inspect's own command. Its log is
one of Inspect's, which `inspect view` shows.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client.agent import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.core.errors import ConfigError
from slipstream.core.machine.left_files import read_left
from slipstream.core.machine.owned_folder import OwnedFolder
from slipstream.core.machine.process import open_variables
from slipstream.environments.sandbox.kept_program import ProgramEnd, ProgramLimits, run_program

# First and last sample of an episode, counted from 1.
Span: TypeAlias = tuple[int, int]
Log: TypeAlias = Mapping[str, Any]

MODEL = "openai-api/slipstream/policy"
# The variable in which Inspect looks for the key of this model.
KEY_VARIABLE = "SLIPSTREAM_API_KEY"
MAX_OUTPUT_BYTES = 16 << 20
MAX_LOG_BYTES = 1 << 30
NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


class Inspect(AgentEnvironment[Span]):
    """Evaluates samples of a task with its own solver and its own scorers.

    Each value of Inspect's metrics is a metric, as SCORER_METRIC if there are several scorers. The
    reward is the first one, or the one that `reward` names. An evaluation whose log does not say
    success fails the episode with Inspect's error.
    """

    def __init__(
        self,
        task: str,
        *,
        samples: int,
        samples_per_episode: int = 16,
        inspect: str = "inspect",
        options: Sequence[str] = (),
        reward: str | None = None,
        log_dir: str | None = None,
        limit_s: float = 3600.0,
    ) -> None:
        """`task` and `options` are as on Inspect's command line: FILE.py@NAME, or a package's task.

        The first `samples` of the task are evaluated. `inspect` is the path of the command, which
        may be that of another virtual environment. Logs go to `log_dir`, or are removed with the
        episode. Raises ConfigError for arguments that cannot work.
        """
        program = shutil.which(inspect)
        if program is None:
            raise ConfigError(
                f"there is no program {inspect!r}: pip install inspect-ai openai, in a virtual "
                f"environment of its own, and give the path of its `inspect`"
            )
        if samples < 1 or samples_per_episode < 1:
            raise ConfigError(
                f"samples and samples_per_episode must be at least 1, "
                f"got {samples} and {samples_per_episode}"
            )
        file, mark, name = task.partition("@")
        if file.endswith(".py") and not Path(file).is_file():
            raise ConfigError(f"task {file} does not exist; the working directory is {Path.cwd()}")
        # Inspect takes no absolute path of a task.
        self._folder = Path(file).absolute().parent if file.endswith(".py") else None
        self._task = task if self._folder is None else f"{Path(file).name}{mark}{name}"
        self._program = str(Path(program).absolute())
        self._options = tuple(options)
        self._reward = reward
        self._log_dir = None if log_dir is None else Path(log_dir).absolute()
        self._limits = ProgramLimits(seconds=limit_s, output_bytes=MAX_OUTPUT_BYTES)
        firsts = range(1, samples + 1, samples_per_episode)
        self._spans = [(first, min(samples, first + samples_per_episode - 1)) for first in firsts]

    def tasks(self) -> list[Span]:
        """Returns the samples of each episode: the first and the last one."""
        return self._spans

    async def run(self, task: Span, endpoint: Endpoint) -> AgentOutcome:
        """Runs `inspect eval` and reads its log."""
        with contextlib.closing(OwnedFolder("agent")) as owned:
            logs = owned.path / "logs"
            ended = await run_program(
                self._command(task, endpoint, logs),
                folder=self._folder or owned.path,
                variables=open_variables(os.environ)
                | {KEY_VARIABLE: endpoint.api_key, "NO_PROXY": "127.0.0.1"},
                limits=self._limits,
            )
            log = _read_log(logs, ended)
            if self._log_dir is not None:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                for path in logs.iterdir():
                    shutil.move(path, self._log_dir / path.name)
        metrics = _metrics(log)
        wanted = self._reward or next(iter(metrics), "")
        if wanted not in metrics:
            known = ", ".join(metrics) or "none"
            raise ValueError(f"the log has no metric {wanted!r}; its metrics are: {known}")
        return AgentOutcome(metrics[wanted], metrics)

    def _command(self, span: Span, endpoint: Endpoint, logs: Path) -> list[str]:
        return [
            *(self._program, "eval", self._task, *self._options),
            *("--model", MODEL, "--model-base-url", endpoint.base_url),
            *("--limit", f"{span[0]}-{span[1]}"),
            *("--log-dir", str(logs), "--log-format", "json", "--display", "none"),
        ]


def _read_log(logs: Path, ended: ProgramEnd) -> Log:
    """Returns the log of an evaluation that has succeeded.

    Raises RuntimeError, which says why it has not.
    """
    found = sorted(logs.glob("*.json")) if logs.is_dir() else []
    said = ended.limit or f"{ended.cause or 'exit status 0'}: {ended.last_line}"
    if not found:
        raise RuntimeError(f"inspect left no log after {said}")
    log: Log = json.loads(read_left(found[-1], MAX_LOG_BYTES))
    if log.get("status") != "success":
        error = (log.get("error") or {}).get("message")
        raise RuntimeError(f"inspect eval ended as {log.get('status')}: {error or said}")
    return log


def _metrics(log: Log) -> dict[str, float]:
    """Returns the metrics of all scorers, in the order of the log."""
    scores = (log.get("results") or {}).get("scores") or []
    values = {}
    for score in scores:
        prefix = f"{score['name']}_" if len(scores) > 1 else ""
        for name, metric in score["metrics"].items():
            if isinstance(metric["value"], int | float):
                values[NOT_A_NAME.sub("_", f"{prefix}{name}")] = float(metric["value"])
    return values

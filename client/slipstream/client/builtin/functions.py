"""Functions that the model writes, and that tests of a file examine in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.client.builtin.question_files import read_rows
from slipstream.client.environment import Environment, Message, StepResult
from slipstream.client.sandbox import Limits, Sandbox, StartedProgram
from slipstream.protocol.errors import ConfigError

REWARDS = ("share", "all")
PROGRAM = Path(__file__).with_name("functions_program.py")
# A block of code: from ``` with at most one word to the next ```, or to the end of the reply.
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# Seconds in which Python starts in a sandbox, on a busy machine.
START_LIMIT_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True)
class Exam:
    """One task: the question, the tests, what runs before them, and the functions' names."""

    question: str
    setup: str
    tests: tuple[str, ...]
    functions: tuple[str, ...]


class Functions(Environment[Exam]):
    """Asks for functions and runs tests against the last block of code of the reply.

    The tests run in one sandbox and the code in another: code under test can read neither the
    tests nor the expected values, and says nothing about the verdict. Functions take and return
    values of Python's own types; arguments are passed by value.
    """

    def __init__(
        self,
        path: str,
        *,
        question: str = "question",
        tests: str = "tests",
        setup: str | None = None,
        function: str | None = None,
        instruction: str = "{question}",
        reward: Literal["share", "all"] = "share",
        limit_s: float = 5.0,
        memory_mib: int = 512,
        max_running: int = 0,
    ) -> None:
        """`question`, `tests`, `setup` and `function` are columns of the .jsonl or .parquet file.

        Tests are a list of Python texts, or one text; one that defines `check` is called with the
        function. Without `function` all names are examined that tests use and do not define.
        `limit_s` is the limit of one call; `max_running` that of replies that are examined at one
        time, 0: as many as there are cores. ConfigError names what cannot work.
        """
        if reward not in REWARDS:
            raise ConfigError(f"reward must be one of {', '.join(REWARDS)}, got {reward!r}")
        if "{question}" not in instruction:
            raise ConfigError(f"instruction must contain {{question}}, got {instruction!r}")
        if max_running < 0:
            raise ConfigError(f"max_running must be at least 0, got {max_running}")
        self._instruction = instruction
        self._reward = reward
        self._limit_s = limit_s
        columns = {"question": question, "tests": tests, "setup": setup, "function": function}
        self._exams = [
            _read_exam(row, columns, f"{path}, row {number}")
            for number, row in enumerate(read_rows(Path(path)), start=1)
        ]
        if not self._exams:
            raise ConfigError(f"{path} has no rows")
        seconds = START_LIMIT_S + 2 * limit_s * max(len(exam.tests) for exam in self._exams)
        self._sandbox = Sandbox(
            Limits(seconds=seconds, processor_s=int(seconds) + 1, memory_bytes=memory_mib * MIB)
        )
        self._program = PROGRAM.read_text(encoding="utf-8")
        self._running = asyncio.Semaphore(max_running or os.cpu_count() or 1)

    def tasks(self) -> list[Exam]:
        """Returns the tasks in the order of the file."""
        return self._exams

    def reset(self, task: Exam) -> list[Message]:
        """Asks the question."""
        self._exam = task
        return [Message("user", self._instruction.replace("{question}", task.question))]

    async def step(self, reply: str) -> StepResult:
        """Examines the code of the reply."""
        code = code_of(reply)
        async with self._running:
            outcomes = Counter(await self._examine(code))
        share = outcomes["passed"] / len(self._exam.tests)
        metrics = {
            "passed": share,
            "all_passed": float(share == 1),
            "errors": outcomes["error"] / len(self._exam.tests),
            "timeouts": outcomes["timeout"] / len(self._exam.tests),
        }
        return StepResult(share if self._reward == "share" else float(share == 1), metrics=metrics)

    async def _examine(self, code: str) -> list[str]:
        """Returns the outcome of each test: "passed", "failed", "error" or "timeout"."""
        exam = self._exam
        files = {f"test_{number}.py": text for number, text in enumerate(exam.tests)}
        facts = {"functions": exam.functions, "num_tests": len(exam.tests)}
        files |= {"exam.json": json.dumps(facts), "setup.py": exam.setup}
        candidate = _Candidate(self._sandbox, f"{exam.setup}\n{code}\n", self._limit_s)
        outcomes: list[str] = []
        try:
            async with _started(self._sandbox, self._program, "examiner", files) as examiner:
                while len(outcomes) < len(exam.tests):
                    line = await examiner.stdout.readline()
                    said = json.loads(line) if line else None
                    if said is None:
                        finished = await examiner.finish()
                        break
                    if "outcome" in said:
                        outcomes.append(said["outcome"])
                        continue
                    examiner.stdin.write(await candidate.ask(line))
                    await examiner.stdin.drain()
        finally:
            await candidate.end()
        if len(outcomes) < len(exam.tests):
            if not finished.ended_by:
                said_last = finished.stderr.decode(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"the tests do not run: {''.join(said_last)}")
            # A value of the candidate's made a test too long or too large.
            missing = len(exam.tests) - len(outcomes)
            outcomes += ["timeout" if "s" in finished.ended_by else "error"] * missing
        return outcomes


class _Candidate:
    """The code under test, in a sandbox that is started again when it has ended."""

    def __init__(self, sandbox: Sandbox, code: str, limit_s: float) -> None:
        self._sandbox = sandbox
        self._code = code
        self._limit_s = limit_s
        self._program: StartedProgram | None = None
        self._context = contextlib.AsyncExitStack()

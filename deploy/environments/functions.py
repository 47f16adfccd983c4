"""Coding tasks: the model writes functions, which tests from a file check in sandboxes."""

import ast
import asyncio
import builtins
import contextlib
import functools
import itertools
import os
import py_compile
import re
import site
import sys
import sysconfig
import tempfile
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal, NamedTuple

from slipstream.client.environment import Environment, Message, StepResult, answer_of
from slipstream.core.arguments import AboveZero, Count, NotNegative, checked
from slipstream.core.errors import ConfigError
from slipstream.environments.answers import TAGGED
from slipstream.environments.arguments import FIELD, check_filled, check_holds, filled
from slipstream.environments.question_files import (
    UNREAD,
    Row,
    cell_in,
    check_read,
    named_rows,
    plain_cell,
    text_in,
    text_of,
    unpacked,
)
from slipstream.environments.sandbox import Limits, Sandbox, StartedProgram

from deploy.environments import functions_program
from deploy.environments.functions_program import heard, said

_CHECK = re.compile(r"^def check\(", re.MULTILINE)
# A block of code: from ``` or ~~~ to the next one that is no deeper, or to the end of the reply.
_BLOCK = re.compile(
    r"(?:^([ \t]*)|(?<=[^\s>] )(?=`{3,}py))(`{3,}+|~{3,}+)[^\n`]*\n(.*?)(?:^(?:\1| {0,3})\2|\Z)",
    re.DOTALL | re.MULTILINE,
)
# The first line of code in a text without blocks.
_CODE_BEGINS = re.compile(r"^(?:@|(?:async )?def |class |from \S+ import |import )", re.MULTILINE)
# Most lines at which code in a text without blocks is looked for.
_MAX_STARTS = 8
# The mark of a quotation before each of its lines.
_QUOTED = re.compile(r"^> ?", re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# The program of both sandboxes, compiled once.
_PROGRAM = "program.pyc"
# Seconds in which Python starts in a sandbox, on a busy machine.
START_LIMIT_S = 60.0
# Kinds of answers to a call.
ANSWERS = (b"value ", b"raised ")
# Types of values that functions return, and the methods that a test may call.
_OWN = (str, bytes, int, float, complex, list, dict, set, range)
_METHODS = {name for kind in _OWN for name in dir(kind)}
# How tests take over what Python prints.
_READERS_OF_OUTPUT = {
    "redirect_stdout",
    "redirect_stderr",
    "capsys",
    "capfd",
    "capsysbinary",
    "captured_stdout",
}
TIME_LIMITS = ("seconds", "processor_s")
MIB = 1 << 20


@dataclass(frozen=True)
class Exam:
    """One task: its row, question, prompt, code before the tests, tests, functions, a solution.

    `modules` are those from which tests import functions, although only a reply defines them.
    """

    where: str
    question: str
    prompt: str
    setup: str
    tests: tuple[str, ...]
    functions: tuple[str, ...]
    modules: tuple[str, ...] = ()
    solution: str = ""


class _Columns(NamedTuple):
    """The prompt, and the names of columns, as arguments of `Functions`."""

    instruction: str
    question: str
    tests: str
    setup: str | None
    function: str | None
    solution: str | None


def _read_exam(row: Row, where: str, columns: _Columns) -> Exam:
    instruction, question, tests, setup, function, solution = columns
    question_text = text_in(row, question, where)
    check_read(row, {*UNREAD} - {*FIELD.findall(instruction)}, where)
    prompt = filled(instruction, {**row, "question": question_text})
    before, solved = (_text(row, column, where) for column in (setup, solution))
    if solved[:1].isspace():
        # HumanEval's are the body of the function that its prompt begins.
        solved = before + solved
    name = None if function is None else text_in(row, function, where)
    texts = cell_in(row, tests, where)
    if isinstance(texts, str):
        # A list of tests may be stored as text.
        texts = unpacked(texts, where) if texts.lstrip()[:1] == "[" else [texts]
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise ConfigError(
            f"{where}: column {tests!r} must hold a test or a list of tests, each a text of Python"
        )
    if name is None and any(map(_CHECK.search, texts)):
        raise ConfigError(
            f"{where}: a test defines check(): name the column with the function's name, as "
            f"function = 'entry_point'"
        )
    texts = [f"{text}\n\ncheck({name})\n" if _CHECK.search(text) else text for text in texts]
    # Names that tests take from modules that are not there, with the modules.
    imported: dict[str, str] = {}
    for node in itertools.chain.from_iterable(ast.walk(_parsed(text, where)) for text in texts):
        if isinstance(node, ast.ImportFrom) and node.module and not is_there(node.module):
            imported |= {alias.name: node.module for alias in node.names if alias.name != "*"}
    names = {name} if name else set()
    own_names = set(dir(builtins))
    for text in () if name else (before, *texts):
        _parsed(text, where)
        here, there = names_in(text)
        own_names = own_names | here
        names = names | there
    # Names that setup, tests or Python define are not tested.
    names = {name} if name else names - own_names
    names |= imported.keys()
    if not names:
        raise ConfigError(f"{where}: the tests use no name that they do not define themselves")
    for text in texts:
        _check_output(_parsed(text, where), where)
        _check_judges([*ast.walk(_parsed(text, where))], names, where)
    modules = sorted(set(imported.values()))
    return Exam(
        where,
        question_text,
        prompt,
        before,
        tuple(texts),
        tuple(sorted(names)),
        tuple(modules),
        solved,
    )


def _text(row: Row, column: str | None, where: str) -> str:
    """Returns the text in a column; a row may have none."""
    cell = None if column is None else plain_cell(row.get(column))
    return "" if cell in (None, "") else text_of(cell, f"{where}: column {column!r}")


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: a test is no Python: {error}") from error


def _check_judges(nodes: Sequence[ast.AST], names: set[str], where: str) -> None:
    """Raises ConfigError for a test that no function fails, and for one that every function fails.

    The first compares nothing, or nothing comes of it; the second asks for an object's own methods.
    """
    callable_names = {*names, *dir(builtins)}
    asserts = (ast.Assert, ast.Raise)
    values: dict[str, list[ast.AST]] = {}
    for assignment in (node for node in nodes if isinstance(node, ast.Assign)):
        for target in assignment.targets:
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(assignment.value)
    results = {
        name for name, sources in values.items() if all(_calls(source, names) for source in sources)
    }
    for node in nodes:
        compared = node.value if isinstance(node, ast.Expr) else None
        # A comparison of another kind may be there to raise.
        is_vain = isinstance(compared, ast.Compare) and isinstance(compared.ops[0], ast.Eq | ast.Is)
        if isinstance(node, ast.Assert):
            says = node.msg.value if isinstance(node.msg, ast.Constant) else ""
            is_odd = _calls(node.test, names) and not isinstance(says, str)
            is_vain = is_odd or isinstance(node.test, ast.Tuple)
        if is_vain:
            what = f"a test compares, and asserts nothing: {ast.unparse(node)[:80]!r}"
            raise ConfigError(f"{where}: {what}")
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            value = node.value
            if _calls(value, names) or (isinstance(value, ast.Name) and value.id in results):
                what = f"a test needs .{node.attr} of {ast.unparse(value)[:60]!r}"
                raise ConfigError(f"{where}: {what}; only values of Python's own types reach it")
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    is_pure = all(_calls(call, callable_names) for call in calls)
    if is_pure and not any(isinstance(node, asserts) for node in nodes):
        raise ConfigError(f"{where}: a test asserts nothing: {ast.unparse(nodes[0])[:80]!r}")


def _check_output(test: ast.Module, where: str) -> None:
    """Raises ConfigError for a test that reads what a function prints, which is another process."""
    for node in ast.walk(test):
        name = {
            ast.Name: "id",
            ast.Attribute: "attr",
            ast.alias: "name",
            ast.arg: "arg",
        }.get(type(node))
        word = "" if name is None else getattr(node, name)
        is_written = word == "stdout" and isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.Constant) and node.value == "sys.stdout":
            # A patch names it as a text.
            word = "sys.stdout"
            is_written = True
        if word in _READERS_OF_OUTPUT or is_written:
            what = f"a test reads by {word} what a function prints"
            raise ConfigError(f"{where}: {what}; only values that it returns reach the test")


def _calls(node: ast.AST, names: Container[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _check_prompts(exams: Iterable[Exam]) -> None:
    """Raises ConfigError for two rows with one prompt: one reply would get two rewards."""
    first_exams: dict[str, Exam] = {}
    for exam in exams:
        first = first_exams.setdefault(exam.prompt, exam)
        if first is exam:
            continue
        remedy = "test it differently: put all tests into one row"
        if (first.setup, first.tests) == (exam.setup, exam.tests):
            remedy = "test it alike: leave one of them out"
        row = exam.where.rpartition(", ")[2]
        raise ConfigError(f"{first.where} and {row} ask the same and {remedy}")


class Functions(Environment[Exam]):
    """Asks for functions and runs tests against the blocks of the reply that define them.

    The tests run in one sandbox and the code in another: tested code can neither read the tests or
    the expected values, nor report the verdict itself. Functions take and return values of Python's
    built-in types, async functions and numpy's numbers and arrays too. Arguments are passed by
    value, but to a function that returns nothing and changes a list, dictionary or set.
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        *,
        question: str = "question",
        tests: str = "tests",
        setup: str | None = None,
        function: str | None = None,
        solution: str | None = None,
        instruction: str = "{question}",
        reward: Literal["share", "all"] = "share",
        limit_s: AboveZero = 5.0,
        memory_mib: Count = 512,
        max_running: NotNegative = 0,
    ) -> None:
        """Reads tasks from `path`, .jsonl or .parquet. Raises ConfigError for invalid arguments.

        `question`, `tests`, `setup` and `function` name columns. A row's tests are a list of Python
        texts, or one text; its setup is code that runs before them. The column `function` has the
        tested function's name; a test that defines `check` calls `check` with this function.
        Without `function`, all names that the tests use but do not define are tested. `solution`
        names a column of code that passes, which only `slipstream check` runs.

        `instruction` is the prompt, with the question in place of `{question}` and other columns in
        place of their names, as in `{starter_code}`. `reward` is the share of passed tests, or with
        "all" 1 if all pass, else 0. `limit_s` limits one call, `memory_mib` each sandbox. At most
        `max_running` replies are tested at once; 0 means one more than cores.
        """
        check_holds("instruction", instruction, "{question}")
        self._reward = reward
        self._limit_s = limit_s
        rows = list(named_rows(Path(path)))
        check_filled("instruction", [instruction], [{"question": "", **row} for _, row in rows])
        for column in filter(None, (setup, solution)):
            if not any(column in row for _, row in rows):
                cell_in(rows[0][1], column, rows[0][0])
        columns = _Columns(instruction, question, tests, setup, function, solution)
        self._exams = [_read_exam(row, where, columns) for where, row in rows]
        _check_prompts(self._exams)
        # Tests of functions that only the question of another row names are that row's.
        called = {n: e.where for e in self._exams for n in re.findall(r"\w+(?=\()", e.question)}
        for exam in self._exams:
            named_in_prompt = {*re.findall(r"\w+", exam.prompt)} & {*exam.functions}
            for name in () if named_in_prompt else sorted(called.keys() & {*exam.functions})[:1]:
                other = called[name].rpartition(", ")[2]
                what = f"{name}, which its question does not name, and the question of {other} does"
                raise ConfigError(f"{exam.where}: the tests call {what}")
        # The solution of the next row of the same functions, by the row's name.
        self._neighbour = {
            exam.where: following.solution
            for exam, following in itertools.pairwise([*self._exams, self._exams[0]])
            if exam.functions == following.functions and exam.solution != following.solution != ""
        }
        seconds = START_LIMIT_S + 2 * limit_s * max(len(exam.tests) for exam in self._exams)
        self._sandbox = Sandbox(
            Limits(seconds=seconds, processor_s=int(seconds) + 1, memory_bytes=memory_mib * MIB)
        )
        # A reply waits while its sandbox begins or ends.
        self._running = asyncio.Semaphore(max_running or (os.cpu_count() or 1) + 1)

    def tasks(self) -> list[Exam]:
        return self._exams

    def reset(self, task: Exam) -> list[Message]:
        self._exam = task
        self.right_reply = _as_code(task.solution) if task.solution else ""
        programs = [
            "\n".join(f"def {name}(*a, **_): return {value}" for name in task.functions)
            for value in ("None", "a[0] if a else True")
        ]
        programs += [self._neighbour[task.where]] if task.where in self._neighbour else []
        self.wrong_reply = [_as_code(program) for program in programs]
        return [Message("user", task.prompt)]

    async def step(self, reply: str) -> StepResult:
        """Runs the tests against the reply's code, and returns the reward.

        Raises ValueError for a test that calls none of the functions: it would judge nothing.
        """
        code = code_of(answer_of(reply), self._exam.functions)
        async with self._running:
            results = await self._examine(code)
        outcomes = Counter(results)
        share = outcomes["passed"] / len(self._exam.tests)
        metrics = {
            "passed": share,
            "all_passed": float(share == 1),
            "errors": outcomes["error"] / len(self._exam.tests),
            "timeouts": outcomes["timeout"] / len(self._exam.tests),
        }
        return StepResult(share if self._reward == "share" else float(share == 1), metrics=metrics)

    async def _examine(self, code: str) -> list[str]:
        """Returns the outcome of each test: "passed", "failed", "error" or "timeout".

        Raises ValueError if the tests themselves are at fault.
        """
        exam = self._exam
        files = _program() | {"setup.py": exam.setup}
        files |= {f"test_{number}.py": text for number, text in enumerate(exam.tests)}
        candidate = _Candidate(self._sandbox, exam.setup, code, self._limit_s)
        outcomes: list[str] = []
        try:
            async with self._sandbox.start(_command("examiner"), files=files) as examiner:
                examiner.stdin.write(_line("exam", exam.functions, exam.modules, len(exam.tests)))
                while (num_left := len(exam.tests) - len(outcomes)) > 0:
                    try:
                        line = await examiner.stdout.readline()
                    except ValueError:
                        # A value from the candidate made a call longer than the longest line.
                        return outcomes + ["error"] * num_left
                    if not line.endswith(b"\n"):
                        finished = await examiner.finish()
                        if not finished.ended_by:
                            output = finished.stderr.decode(errors="replace").strip().splitlines()
                            what = f"exit status {finished.status}: {''.join(output[-1:])}"
                            raise ValueError(f"the tests do not run: {what}")
                        # Tested code can cause both.
                        is_late = finished.ended_by in TIME_LIMITS
                        return outcomes + ["timeout" if is_late else "error"] * num_left
                    if line.startswith(b"call "):
                        examiner.stdin.write(await candidate.answer(line))
                        await examiner.stdin.drain()
                        continue
                    _, (outcome, cause) = heard(line.decode())
                    if outcome == "idle":
                        idle = exam.tests[len(outcomes)].strip()[:80]
                        names = ", ".join(exam.functions)
                        what = f"a test of {exam.where} calls none of {names}: {idle!r}"
                        raise ValueError(f"{what} {cause}".strip())
                    outcomes.append(outcome)
        finally:
            await candidate.end()
        return outcomes


class _Candidate:
    """The tested code, in a sandbox that is started again when its program has ended in a call."""

    def __init__(self, sandbox: Sandbox, setup: str, code: str, limit_s: float) -> None:
        self._sandbox = sandbox
        self._files = _program() | {"solution.py": f"{setup}\n{code}\n"}
        self._limit_s = limit_s
        self._program: StartedProgram | None = None
        self._context = contextlib.AsyncExitStack()
        # The answer to every call where code cannot be loaded: it is not started again.
        self._always = b""
        if not code.strip() and not setup.strip():
            self._always = _line("raised", "NameError", "the reply has no code")

    async def answer(self, call: bytes) -> bytes:
        """Returns the line that answers a call, `ended` with an outcome if the code gives none.

        The outcome of the test is "timeout" or "error".
        """
        if self._always:
            return self._always
        is_loaded = self._program is not None
        program = self._program
        try:
            if program is None:
                started = self._sandbox.start(_command("candidate"), files=self._files)
                program = await self._context.enter_async_context(started)
                await _next_line(program, START_LIMIT_S)
                # The code under test runs for the first time.
                await _next_line(program, self._limit_s)
                self._program = program
                is_loaded = True
            program.stdin.write(call)
            await program.stdin.drain()
            answer = await _next_line(program, self._limit_s)
            if answer.startswith(ANSWERS) and answer.isascii():
                return answer
            # Only this process may tell the examiner how a test ended.
            outcome = "error"
        except TimeoutError:
            outcome = "timeout"
        except (ValueError, ConnectionError):
            # The program ended, or wrote too long a line.
            outcome = "error"
        await self.end()
        ended = _line("ended", outcome)
        self._always = b"" if is_loaded else ended
        return ended

    async def end(self) -> None:
        """Ends the program if it runs."""
        self._program = None
        context = self._context
        self._context = contextlib.AsyncExitStack()
        await context.aclose()


def _as_code(text: str) -> str:
    return text if "```" in text else f"```python\n{text}\n```"


def _line(kind: str, *values: object) -> bytes:
    return f"{said(kind, *values)}\n".encode()


async def _next_line(program: StartedProgram, limit_s: float) -> bytes:
    async with asyncio.timeout(limit_s):
        line = await program.stdout.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the program has ended")
    return line


def _command(role: str) -> list[str]:
    # Python's own start reads the files of all installed packages: the program takes their folders.
    return [sys.executable, "-I", "-S", _PROGRAM, *site.getsitepackages(), role]


@functools.cache
def _program() -> dict[str, str | bytes]:
    with tempfile.TemporaryDirectory() as folder:
        compiled = os.path.join(folder, _PROGRAM)
        py_compile.compile(functions_program.__file__, compiled, doraise=True)
        return {_PROGRAM: Path(compiled).read_bytes()}


def code_of(reply: str, names: Iterable[str] = ()) -> str:
    """Returns the code of a reply: its last blocks that define `names`, and what these use.

    It is the last block if none defines one of them, and the whole reply if there is no block.
    """
    matches = _BLOCK.findall(reply) or _BLOCK.findall(_QUOTED.sub("", reply))
    blocks = [textwrap.dedent(block) for _, _, block in matches]
    if not blocks:
        tagged = TAGGED.findall(reply)
        return tagged[-1][1] if tagged else _without_prose(reply)
    pairs = [names_in(block) for block in blocks]
    needed = set(names)
    defined_names = set(dir(builtins))
    chosen_blocks = set[int]()
    # A helper may stand below what uses it.
    while helpers := [
        at for at in range(len(blocks)) if at not in chosen_blocks and needed & pairs[at][0]
    ]:
        defined, used_names = pairs[helpers[-1]]
        chosen_blocks.add(helpers[-1])
        defined_names |= defined
        needed = (needed | used_names) - defined_names
    return "\n".join(blocks[at] for at in sorted(chosen_blocks or {len(blocks) - 1}))


def _without_prose(text: str) -> str:
    """Returns the code in a text without blocks, or the text if it is code or none is found."""
    starts = [beginning.start() for beginning in _CODE_BEGINS.finditer(text)]
    for start in (0, *starts[:_MAX_STARTS]):
        code = text[start:]
        try:
            ast.parse(code)
        except SyntaxError as error:
            # Prose may stand behind the code.
            code = "".join(code.splitlines(keepends=True)[: (error.lineno or 1) - 1])
            if names_in(code)[0]:
                return code
        except (ValueError, RecursionError, MemoryError):
            return text
        else:
            return code
    return text


@functools.cache
def is_there(module: str) -> bool:
    """Whether a module is Python's own or of an installed package."""
    top = module.partition(".")[0]
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return top in sys.stdlib_module_names or PathFinder.find_spec(top, installed) is not None


def names_in(code: str) -> tuple[set[str], set[str]]:
    """Returns the names that a text of Python defines, and those that it uses.

    Of a text that is no Python, these are the functions and classes whose definitions it begins.
    """
    try:
        nodes: Iterator[ast.AST] = ast.walk(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^\s*(?:async\s+)?(?:def|class)\s+(\w+)", code, re.MULTILINE)), set()
    defined: set[str] = set()
    read_names: set[str] = set()
    for node in nodes:
        if isinstance(node, _DEFINITIONS):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            # An example of use takes the function from a module that is not there.
            if is_there(getattr(node, "module", None) or "sys"):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            (read_names if isinstance(node.ctx, ast.Load) else defined).add(node.id)
    return defined, read_names

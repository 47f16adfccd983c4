"""Two programs, each in a sandbox of its own, between which the environment passes messages.

    python -S functions_program.py FOLDERS... examiner|candidate

The examiner has the tests and the expected values. In place of a tested function, a test calls a
stand-in that writes the call as a line and reads the value from the next line. The candidate has
the functions and answers such calls; if one returns nothing, also with what lists, dictionaries and
sets among the arguments hold afterwards. So tested code sees the arguments, but not the test, its
expected values or its verdict; the test gets values of built-in types only, whose `==` the tested
code cannot override.

A message is a line: its kind, then values in words, such as `l2 i5 sAda` for [5, "Ada"]. Only
modules are imported that Python has loaded anyway: json would take as long as the rest of an exam.
"""

from __future__ import annotations

import builtins
import itertools
import os
import site
import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import IO, Any, TypeAlias

    # A value of Python's own types.
    Value: TypeAlias = Any

# Most items of an iterator that a function may return.
MAX_ITEMS = 100_000


class EndedError(BaseException):
    """The candidate gave no answer; as a BaseException, it passes `except Exception` in a test."""


def encode(value: Value) -> str:
    """Returns the words for a value of built-in types. Raises TypeError for other types."""
    match value:
        case None | bool():
            return {None: "N", True: "T", False: "F"}[value]
        case str():
            text = str.__str__(value).encode("unicode_escape").decode()
            return "s" + text.replace(" ", "\\x20")
        case int():
            return f"i{int(value):x}"
        case float():
            return f"f{float(value)!r}"
        case complex():
            return f"c{value.real!r},{value.imag!r}"
        case bytes() | bytearray():
            return f"b{bytes(value).hex()}"
        case list():
            return _several("l", value)
        case tuple():
            return _several("t", value)
        case set() | frozenset():
            return _several("S" if isinstance(value, set) else "Z", value)
        case dict():
            return _several("d", itertools.chain.from_iterable(value.items()))
        case range():
            return _several("r", (value.start, value.stop, value.step))
    if hasattr(value, "__next__"):
        return _several("I", itertools.islice(value, MAX_ITEMS))
    if hasattr(value, "cr_frame"):
        import asyncio

        return _several("C", [asyncio.run(value)])
    kind = type(value)
    if kind in _VIEWS:
        return _several(_VIEWS[kind], value)
    if kind.__module__ == _FOUND_IN.get(kind.__name__):
        return _several("m", [kind.__name__, [*value] if kind.__name__ == "deque" else str(value)])
    if kind.__module__ == "numpy":
        return encode(value.tolist())
    raise TypeError(f"a {kind.__name__} cannot be passed to a test")


def _several(kind: str, items: Iterable[Value]) -> str:
    words = [encode(item) for item in items]
    return " ".join([f"{kind}{len(words)}", *words])


def decode(words: Iterator[str]) -> Value:
    """Returns the value whose words `encode` returned, which are taken from `words`."""
    word = next(words)
    kind = word[0]
    inside = word[1:]
    if kind in _ALONE:
        return _ALONE[kind](inside)
    return _OF_ITEMS[kind]([decode(words) for _ in range(int(inside))])


# The views of a dictionary, and further types with their modules.
_VIEWS = {type({}.keys()): "k", type({}.values()): "v", type({}.items()): "p"}
_FOUND_IN = {"deque": "collections", "Fraction": "fractions", "Decimal": "decimal"}
_FOUND_IN |= dict.fromkeys(("date", "time", "datetime"), "datetime")
_ALONE: dict[str, Callable[[str], Value]] = {
    "N": lambda _: None,
    "T": lambda _: True,
    "F": lambda _: False,
    "s": lambda inside: inside.encode().decode("unicode_escape"),
    "i": lambda inside: int(inside, 16),
    "f": float,
    "c": lambda inside: complex(*map(float, inside.split(","))),
    "b": bytes.fromhex,
}
_OF_ITEMS: dict[str, Callable[[list[Value]], Value]] = {
    "l": list,
    "t": tuple,
    "S": set,
    "Z": frozenset,
    "d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    "r": lambda items: range(*items),
    "k": lambda items: dict.fromkeys(items).keys(),
    "v": lambda items: dict(enumerate(items)).values(),
    "p": lambda items: dict(items).items(),
    "m": lambda items: _made(*items),
    "I": iter,
    "C": lambda items: _awaited(items[0]),
}


def _made(name: Value, given: Value) -> Value:
    kind = getattr(__import__(_FOUND_IN[name]), name)
    return getattr(kind, "fromisoformat", kind)(given)


async def _awaited(value: Value) -> Value:
    return value


def examine(hears: IO[str], says: IO[str]) -> None:
    """Runs the tests in turn, and writes `outcome` to `says` after each one.

    Calls of tested functions are written to `says` too. Functions, modules and number of tests,
    and then the answers, are read from `hears`. The outcome of a test that has called no function
    is "idle", whatever else it did: it tests nothing.
    """
    _, (functions, modules, num_tests) = heard(hears.readline())
    # How each call of the current test ended: "" or an outcome.
    ends: list[str] = []
    names = {name: _stand_in(name, hears, says, ends) for name in functions}
    defined = _run("setup", {})
    known_names = {
        name: value for name, value in defined.items() if not name.startswith("__")
    } | names
    for name in modules:
        # Tests import the functions from a file that a reply would be in.
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            module = sys.modules.setdefault(part, type(sys)(part))
            vars(module).update(known_names, __path__=[])
    for number in range(num_tests):
        ends.clear()
        cause = ""
        try:
            defined = _run(f"test_{number}", known_names)
            if not ends:
                _run_cases(defined, known=known_names)
            outcome = "passed"
        except AssertionError:
            outcome = "failed"
        except BaseException as error:  # noqa: BLE001 - whatever a test raises is its outcome
            cause = f"({type(error).__name__}: {error})"
            outcome = "error"
        # A test that caught the end of the tested code has not passed.
        outcome = next(filter(None, ends), outcome) if ends else "idle"
        _say(says, "outcome", outcome, cause[:200])


def _run(name: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Runs a file of the folder as a module that knows the names `given`; returns all its names."""
    module = type(sys)(name)
    path = f"{name}.py"
    sys.modules[name] = module
    vars(module).update(given, __file__=path)
    SourceFileLoader(name, path).exec_module(module)
    return vars(module)


def _run_cases(found: dict[str, Any], known: dict[str, Any]) -> None:
    """Runs what a text of pytest or unittest defines beside `known`, and has not called."""
    import contextlib

    unittest: Any = sys.modules.get("unittest")
    for name, case_of_name in found.items():
        if name in known:
            continue
        if (
            unittest
            and isinstance(case_of_name, type)
            and issubclass(case_of_name, unittest.TestCase)
        ):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(case_of_name):
                with contextlib.suppress(unittest.SkipTest):
                    case.debug()
        elif name.startswith("Test") and isinstance(case_of_name, type):
            for method in filter(lambda method: method.startswith("test"), dir(case_of_name)):
                case = case_of_name()
                if callable(test := getattr(case, method)):
                    begin: Any = getattr(case, "setup_method", lambda: None)
                    # pytest gives it the method if it takes one.
                    begin(*[test][: begin.__code__.co_argcount - 1])
                    test()
        elif name.startswith("test") and hasattr(case_of_name, "__code__"):
            case_of_name()


def _stand_in(name: str, hears: IO[str], says: IO[str], ends: list[str]) -> Callable[..., object]:
    def called(*arguments: object, **named: object) -> object:
        _say(says, "call", name, arguments, named)
        try:
            kind, answer = heard(hears.readline())
        except (ValueError, LookupError, TypeError, StopIteration, RecursionError, MemoryError):
            # Only tested code writes such words.
            kind = "ended"
            answer = ["error"]
        if kind == "ended":
            ends.append(answer[0])
            raise EndedError(answer[0])
        ends.append("")
        if kind == "raised":
            raise _error(*answer)
        value, contents = answer
        # The arguments get the content that they have after the call.
        for argument, changed in zip((*arguments, *named.values()), contents, strict=False):
            if isinstance(argument, list):
                argument[:] = changed
            elif isinstance(argument, dict | set):
                argument.clear()
                argument.update(changed)
        return value

    return called


def _error(name: Value, text: str) -> Exception:
    kind = vars(builtins).get(name)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {text}")
    try:
        return kind(text)
    except TypeError:
        # Some errors, such as UnicodeDecodeError, need more than a text.
        return RuntimeError(f"{name}: {text}")


def answer_calls(hears: IO[str], says: IO[str]) -> None:
    """Writes `started`, loads the functions, writes `ready`, then answers calls.

    Calls are read from `hears`; everything is written to `says`.
    """
    _say(says, "started")
    functions = _run("solution", {})
    _say(says, "ready")
    for line in hears:
        _, (name, arguments, keywords) = heard(line)
        try:
            if name in functions or "Solution" not in functions:
                function = functions[name]
            else:
                # LeetCode's functions are methods of this class.
                function = getattr(functions["Solution"](), name)
            value = function(*arguments, **keywords)
            words = encode(value)
            # A function that returns a value could clear its arguments: a test would expect less.
            changeable = () if value is not None else (*arguments, *keywords.values())
            contents = [
                argument if isinstance(argument, list | dict | set) else None
                for argument in changeable
            ]
            answer = f"value l2 {words} {encode(contents)}"
        except Exception as error:  # noqa: BLE001 - it travels to the test
            bases = type(error).__mro__
            kind = next(base for base in bases if base.__module__ == "builtins")
            answer = said("raised", kind.__name__, str(error)[:1000])
        says.write(f"{answer}\n")
        says.flush()


def said(kind: str, *values: Value) -> str:
    """Returns the message of a kind with values."""
    return f"{kind} {encode([*values])}"


def heard(line: str) -> tuple[str, list[Value]]:
    """Returns kind and values of a message."""
    kind, *words = line.split()
    return kind, decode(iter(words))


def _say(says: IO[str], kind: str, *values: Value) -> None:
    says.write(f"{said(kind, *values)}\n")
    says.flush()


def main(*folders: str, role: str) -> None:
    """Runs the examiner or the candidate on stdin and stdout; other output goes to stderr.

    `folders` have the installed packages.
    """
    sys.dont_write_bytecode = True
    sys.path += folders
    site.setquit()
    says = os.fdopen(os.dup(1), "w", encoding="ascii")
    hears = os.fdopen(os.dup(0), encoding="ascii")
    os.dup2(2, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    (examine if role == "examiner" else answer_calls)(hears, says)
    # The end of Python takes as long as an exam.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:-1], role=sys.argv[-1])

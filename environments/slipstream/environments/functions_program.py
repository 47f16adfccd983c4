"""Two programs, each in a sandbox of its own, between which the environment passes messages.

    python functions_program.py examiner|candidate

The examiner has the tests and the expected values. In place of a tested function, a test calls a
stand-in that writes the call as a line of JSON and reads the value from the next line. The
candidate has the functions and answers such calls; if one returns nothing, also with what lists,
dictionaries and sets among the arguments hold afterwards. So tested code sees the arguments, but
not the test, its expected values or its verdict; the test gets values of built-in types only, whose
`==` the tested code cannot override.

Only Python's standard library is imported: the sandbox contains no other file.
"""

import builtins
import itertools
import json
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeAlias

# A value of Python's own types, or of JSON.
Value: TypeAlias = Any

# Most items of an iterator that a function may return.
MAX_ITEMS = 100_000
# Integers from this size on are written as text.
PLAIN_INTEGERS = 1 << 53


class EndedError(BaseException):
    """The candidate gave no answer; as a BaseException, it passes `except Exception` in a test."""


def encode(value: Value) -> Value:
    """Returns the JSON form of a value of built-in types. Raises TypeError for other types."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value) if abs(value) < PLAIN_INTEGERS else {"int": hex(value)}
        case float():
            return {"float": repr(float(value))}
        case complex():
            return {"complex": [repr(value.real), repr(value.imag)]}
        case bytes() | bytearray():
            return {"bytes": bytes(value).hex()}
        case list():
            return [encode(item) for item in value]
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case set() | frozenset():
            kind = "set" if isinstance(value, set) else "frozenset"
            return {kind: [encode(item) for item in value]}
        case dict():
            return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case Iterator():
            items = list(itertools.islice(value, MAX_ITEMS))
            return {"iterator": [encode(item) for item in items]}
        case types.CoroutineType():
            import asyncio

            return {"coroutine": encode(asyncio.run(value))}
    if type(value).__module__ == "numpy":
        return encode(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be passed to a test")


def decode(value: Value) -> Value:
    """Returns the value whose JSON form `encode` returned."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    return _KINDS[kind](inside)


_KINDS: dict[str, Callable[[Value], Value]] = {
    "int": lambda inside: int(inside, 16),
    "float": float,
    "complex": lambda inside: complex(*map(float, inside)),
    "bytes": bytes.fromhex,
    "tuple": lambda inside: tuple(map(decode, inside)),
    "set": lambda inside: set(map(decode, inside)),
    "frozenset": lambda inside: frozenset(map(decode, inside)),
    "range": lambda inside: range(*inside),
    "dict": lambda inside: {decode(key): decode(item) for key, item in inside},
    "iterator": lambda inside: iter([decode(item) for item in inside]),
    "coroutine": lambda inside: _awaited(decode(inside)),
}


async def _awaited(value: Value) -> Value:
    return value


def examine(hears: IO[str], says: IO[str]) -> None:
    """Runs the tests in turn, and writes {"outcome": ...} to `says` after each one.

    Calls of tested functions are written to `says` too; their answers are read from `hears`. The
    outcome of a test that has called none is "idle", whatever else it did: it tests nothing.
    """
    with open("exam.json", encoding="utf-8") as file:
        exam = json.load(file)
    # How each call of the current test ended: "" or an outcome.
    ends: list[str] = []
    names = {name: _stand_in(name, hears, says, ends) for name in exam["functions"]}
    found = runpy.run_path("setup.py")
    given = {name: value for name, value in found.items() if not name.startswith("__")}
    for name in exam["modules"]:
        # Tests import the functions from a file that a reply would be in.
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            module = sys.modules.setdefault(part, types.ModuleType(part))
            vars(module).update(given | names, __path__=[])
    for number in range(exam["num_tests"]):
        ends.clear()
        cause = ""
        try:
            found = runpy.run_path(f"test_{number}.py", init_globals=given | names, run_name="test")
            if not ends:
                _run_cases(found, known=given | names)
            outcome = "passed"
        except AssertionError:
            outcome = "failed"
        except BaseException as error:  # noqa: BLE001 - whatever a test raises is its outcome
            cause, outcome = f"({type(error).__name__}: {error})", "error"
        # A test that caught the end of the tested code has not passed.
        outcome = next(filter(None, ends), outcome) if ends else "idle"
        _say(says, {"outcome": outcome, "cause": cause[:200]})


def _run_cases(found: dict[str, Any], known: dict[str, Any]) -> None:
    """Runs what a text of pytest or unittest defines beside `known`, and has not called."""
    import contextlib

    unittest: Any = sys.modules.get("unittest")
    for name, each in found.items():
        if name in known:
            continue
        if unittest and isinstance(each, type) and issubclass(each, unittest.TestCase):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(each):
                with contextlib.suppress(unittest.SkipTest):
                    case.debug()
        elif name.startswith("Test") and isinstance(each, type):
            for method in filter(lambda method: method.startswith("test"), dir(each)):
                case = each()
                if callable(test := getattr(case, method)):
                    begin: Any = getattr(case, "setup_method", lambda: None)
                    # pytest gives it the method if it takes one.
                    begin(*[test][: begin.__code__.co_argcount - 1])
                    test()
        elif name.startswith("test") and isinstance(each, types.FunctionType):
            each()


def _stand_in(name: str, hears: IO[str], says: IO[str], ends: list[str]) -> Callable[..., object]:
    def called(*arguments: object, **named: object) -> object:
        _say(says, {"call": name, "arguments": encode(arguments), "named": encode(named)})
        answer = json.loads(hears.readline())
        ends.append(answer.get("ended", ""))
        if "ended" in answer:
            raise EndedError(answer["ended"])
        if "raised" in answer:
            raise _error(answer["raised"], str(answer.get("text", "")))
        for given, changed in zip((*arguments, *named.values()), answer["changed"], strict=False):
            _change(given, decode(changed))
        return decode(answer["value"])

    return called


def _change(given: object, changed: Value) -> None:
    """Gives an argument of a call the content that it has after the call."""
    if isinstance(given, list):
        given[:] = changed
    elif isinstance(given, dict | set):
        given.clear()
        given.update(changed)


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
    """Writes {"is": "started"}, loads the functions, writes {"is": "ready"}, then answers calls.

    Calls are read from `hears`; everything is written to `says`.
    """
    _say(says, {"is": "started"})
    functions = runpy.run_path("solution.py", run_name="solution")
    _say(says, {"is": "ready"})
    for line in hears:
        call = json.loads(line)
        try:
            name = call["call"]
            if name in functions or "Solution" not in functions:
                function = functions[name]
            else:
                # LeetCode's functions are methods of this class.
                function = getattr(functions["Solution"](), name)
            arguments, named = decode(call["arguments"]), decode(call["named"])
            value = encode(function(*arguments, **named))
            # What returns a value could clear its arguments, so that a test expects less.
            given = () if value is not None else (*arguments, *named.values())
            answer = {"value": value, "changed": _contents(given)}
        except Exception as error:  # noqa: BLE001 - it travels to the test
            kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
            answer = {"raised": kind.__name__, "text": str(error)[:1000]}
        _say(says, answer)


def _contents(arguments: Sequence[Value]) -> list[Value]:
    """Returns what the lists, dictionaries and sets among the arguments of a call hold."""
    return [encode(each) if isinstance(each, list | dict | set) else None for each in arguments]


def _say(says: IO[str], what: object) -> None:
    says.write(json.dumps(what) + "\n")
    says.flush()


def main(role: str) -> None:
    """Runs the examiner or the candidate on stdin and stdout; other output goes to stderr."""
    says = os.fdopen(os.dup(1), "w", encoding="utf-8")
    hears = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    (examine if role == "examiner" else answer_calls)(hears, says)


if __name__ == "__main__":
    main(sys.argv[1])

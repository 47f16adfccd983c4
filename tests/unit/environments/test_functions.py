"""Functions that models write, examined by tests which the code cannot reach."""

import json
import sys
from pathlib import Path

import pytest
from slipstream.client import StepResult
from slipstream.core.errors import ConfigError
from slipstream.environments.sandbox import Limits, Sandbox
from support.rigs.waiting import LIMIT_S

from deploy.environments.functions import Functions, code_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux"),
]

# The columns of MBPP.
MBPP = {
    "text": "Write a function to add two numbers.",
    "test_setup_code": "import math",
    "test_list": [
        "assert add(17, 25) == 42",
        "assert add('a', 'b') == 'ab'",
        "assert math.isclose(add(0.1, 0.2), 0.3)",
        "assert [add(*pair) for pair in ((1, 2), (3, 4))] == [3, 7]",
    ],
}
# The columns of HumanEval.
HUMANEVAL = {
    "prompt": "def half(x):\n    return x / 2\n\ndef twice(x):\n    '''Twice x.'''\n",
    "entry_point": "twice",
    "test": (
        "def check(candidate):\n    assert candidate(2) == 4\n    assert half(candidate(3)) == 3"
    ),
}
MBPP_COLUMNS = {"question": "text", "tests": "test_list", "setup": "test_setup_code"}
HUMANEVAL_COLUMNS = {
    "question": "prompt",
    "tests": "test",
    "setup": "prompt",
    "function": "entry_point",
}


def functions(folder: Path, row: dict[str, object], **options: object) -> Functions:
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return Functions(str(path), **{"limit_s": LIMIT_S, **options})


async def judged(environment: Functions, reply: str) -> StepResult:
    environment.reset(environment.tasks()[0])
    return await environment.step(reply)


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


async def test_the_reward_is_the_share_of_tests_that_pass_or_for_all_or_none(
    tmp_path,
) -> None:
    mbpp = functions(tmp_path, MBPP, **MBPP_COLUMNS)
    assert (
        mbpp.reset(mbpp.tasks()[0])[0].content == "Write a function to add two numbers."
    )
    right = await judged(mbpp, block("def add(a, b):\n    return a + b"))
    assert right.reward == 1
    assert right.metrics == {"passed": 1, "all_passed": 1, "errors": 0, "timeouts": 0}
    half = await judged(mbpp, block("def add(a, b):\n    return int(a) + int(b)"))
    assert half.reward == 0.5
    assert half.metrics == {
        "passed": 0.5,
        "all_passed": 0,
        "errors": 0.25,
        "timeouts": 0,
    }
    mbpp = functions(tmp_path, MBPP, **MBPP_COLUMNS, reward="all")
    assert (await judged(mbpp, block("def add(a, b):\n    return a + b"))).reward == 1
    half = await judged(mbpp, block("def add(a, b):\n    return int(a) + int(b)"))
    assert (half.reward, half.metrics["passed"]) == (0, 0.5)


async def test_a_check_is_called_with_the_function(tmp_path: Path) -> None:
    tasks = functions(tmp_path, HUMANEVAL, **HUMANEVAL_COLUMNS)
    assert (
        await judged(tasks, block("def twice(x):\n    return 4 * half(x)"))
    ).reward == 1
    assert (await judged(tasks, block("def twice(x):\n    return x"))).reward == 0


async def test_code_that_hangs_counts_as_a_timeout_and_the_next_test_runs(
    tmp_path: Path,
) -> None:
    mbpp = functions(tmp_path, MBPP, **MBPP_COLUMNS, limit_s=10.0)
    code = "import time\ndef add(a, b):\n    while a == 17: time.sleep(60)\n    return a + b"
    verdicts = await judged(mbpp, block(code))
    assert verdicts.metrics == {
        "passed": 0.75,
        "all_passed": 0,
        "errors": 0,
        "timeouts": 0.25,
    }


async def test_values_of_all_kinds_travel_both_ways(tmp_path: Path) -> None:
    values = (
        "None",
        "True",
        "-3",
        "10**400",
        "1.5",
        "float('inf')",
        "2j",
        "'\\u00e4\\ud800'",
        "b'\\x00'",
        "[1, [2]]",
        "(1, (2,))",
        "{1, 2}",
        "{1: (2, 3), (4,): [5]}",
        "{frozenset({1}): 2}",
        "range(3)",
        "range(9, 0, -2)",
        "{1: [2]}.keys()",
        "{1: [2]}.items()",
        "__import__('collections').deque([1, 2])",
        "__import__('fractions').Fraction(-1, 3)",
        "__import__('decimal').Decimal('1.50')",
        "__import__('datetime').date(2024, 2, 29)",
    )
    tests = [f"assert same({value}) == {value}" for value in values]
    tests += [f"assert type(same({value})) == type({value})" for value in values]
    tests += [
        "assert same(float('nan')) != same(float('nan'))",
        "assert list(several(3)) == [0, 1, 2]",
        "assert sorted(same({1: 3, 2: 3}.values())) == [3, 3]",
        "assert counted('aab') == {'a': 2, 'b': 1}",
        "try:\n    wrong()\n    assert False, 'it did not raise'\nexcept KeyError: pass",
        "try:\n    odd()\n    assert False, 'it did not raise'\nexcept ValueError: pass",
        "assert same(x=1) == 1",
    ]
    code = (
        "import collections\n"
        "class Odd(ValueError): pass\n"
        "def same(x): return x\n"
        "def several(n): yield from range(n)\n"
        "def counted(text): return collections.Counter(text)\n"
        "def wrong(): raise KeyError('x')\n"
        "def odd(): raise Odd('x')\n"
    )
    tasks = functions(tmp_path, {"question": "?", "tests": tests})
    verdicts = await judged(tasks, block(code))
    assert verdicts.reward == 1, verdicts


# Code that knows no answer and wants to pass. `SAY` writes a line to every open file.
SAY = """
import os
def say(what):
    for number in range(64):
        try: os.write(number, (what + "\\n").encode())
        except OSError: pass
"""
FAKES = {
    "exit_0": "import os\nos._exit(0)",
    "exit_0_when_called": "def add(a, b):\n    import os\n    os._exit(0)",
    "system_exit": "def add(a, b): raise SystemExit(0)",
    "say_it_passed": SAY
    + "for _ in range(99): say('outcome l2 spassed s')\ndef add(a, b): return 0",
    "say_it_ended_well": SAY + "def add(a, b):\n    say('ended l1 spassed')",
    "say_it_before": (
        SAY + "for _ in range(9): say('ended l1 spassed')\ndef add(a, b): return 0"
    ),
    "say_nonsense": SAY
    + "def add(a, b):\n    say(''); say('x'); say('value l9 t9 I99'); say('value l2 i2a i0')",
    "say_what_is_no_json": (
        "import os\ndef add(a, b):\n    for n in range(64):\n"
        "        try: os.write(n, b'\\x00' * 100 + b'[' * 100000 + b'\\n')\n"
        "        except OSError: pass"
    ),
    "equal_to_all": (
        "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def add(a, b): return Equal()"
    ),
    "number_equal_to_all": (
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def add(a, b): return Equal(0)"
    ),
    "raise_what_tests_expect": "def add(a, b): raise AssertionError",
    "stop_iteration": "def add(a, b): raise StopIteration",
    "keyboard_interrupt": "def add(a, b): raise KeyboardInterrupt",
    "patch_the_machinery": (
        "import builtins, sys\n"
        "main = sys.modules['__main__']\n"
        "main.encode = main.decode = lambda value: 42\n"
        "main.said = lambda *_: 'outcome l2 spassed s'\n"
        "builtins.AssertionError = type('Never', (Exception,), {})\n"
        "def add(a, b): return 0"
    ),
    "leave_at_the_end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "too_long": "def add(a, b): return 'x' * (50 << 20)",
    "too_deep": (
        "def add(a, b):\n    deep = []\n    for _ in range(100000): deep = [deep]\n    return deep"
    ),
    "endless": "import itertools\ndef add(a, b): return itertools.count()",
    "flood": "import sys\ndef add(a, b):\n    while True: print('x' * 1000, file=sys.stderr)",
    "look_for_the_answers": (
        "import gc, glob, inspect, os, re, sys\n"
        "def add(a, b):\n"
        "    seen = []\n"
        "    frame = inspect.currentframe()\n"
        "    while frame:\n"
        "        seen.append(repr((frame.f_locals, frame.f_globals)))\n"
        "        frame = frame.f_back\n"
        "    seen += [repr(each)[:10000] for each in gc.get_objects()]\n"
        "    folders = ['.', '..', '/tmp', os.environ.get('TMPDIR', '/tmp')]\n"
        "    for folder in folders + glob.glob('/tmp/slipstream-sandbox-*') + ['/proc/self/fd']:\n"
        "        for root, _, names in os.walk(folder):\n"
        "            for name in names:\n"
        "                place = os.path.join(root, name)\n"
        "                try: seen.append(open(place, errors='replace').read(99999))\n"
        "                except OSError: pass\n"
        "    found = re.search(r'add\\(17, 25\\) == (\\d+)', ' '.join(seen))\n"
        "    return int(found[1]) if found else 0"
    ),
}
# The programs go on until each of the two tests has had its limit.
ENDLESS = ("endless", "flood")


@pytest.mark.parametrize("name", FAKES)
async def test_code_cannot_fake_a_pass(name, tmp_path, backend, monkeypatch):
    monkeypatch.setattr(
        "slipstream.environments.sandbox.sandbox.first_backend", lambda: backend
    )
    row = {
        "question": "?",
        "tests": ["assert add(17, 25) == 42", "assert add(1, 1) == 2"],
    }
    tasks = functions(tmp_path, row, limit_s=2.0 if name in ENDLESS else 8.0)
    verdicts = await judged(tasks, block(FAKES[name]))
    assert verdicts.reward == 0, verdicts
    assert verdicts.metrics["passed"] == 0


async def test_the_code_is_the_last_block_of_the_reply() -> None:
    block_of_code = "```python\na = 1\n```"
    two = "```\nb = 2\n```"
    assert code_of(f"first\n{block_of_code}\nthen\n{two}\nend") == "b = 2\n"
    assert code_of("a = 1") == "a = 1"
    assert code_of("```py\na = 1") == "a = 1"
    assert code_of("  ```python\n  a = 1\n  ```") == "a = 1\n"
    assert code_of("`x` and ```inline``` alone") == "`x` and ```inline``` alone"
    assert code_of("") == ""


def test_a_list_of_tests_may_be_stored_as_text(tmp_path: Path) -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 2"]
    (exam,) = functions(tmp_path, {"question": "?", "tests": json.dumps(tests)}).tasks()
    assert exam.tests == tuple(tests)


PYTEST = "def test_add():\n    assert add(1, 2) == 3\n"
UNITTEST = (
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def setUp(self): self.right = 3\n"
    "    def test_add(self): self.assertEqual(add(1, 2), self.right)\n"
)
CLASS = (
    "class TestAdd:\n    def setup_method(self): self.right = 3\n"
    "    def test_add(self): assert add(1, 2) == self.right\n"
)
CLASS_OF_METHODS = (
    "class TestAdd:\n    test_values = [1, 2]\n"
    "    def setup_method(self, method): self.right = 3\n"
    "    def test_add(self): assert add(*self.test_values) == self.right\n"
)


@pytest.mark.parametrize("test", [PYTEST, UNITTEST, CLASS, CLASS_OF_METHODS])
async def test_tests_of_pytest_and_unittest_are_run(test: str, tmp_path: Path) -> None:
    tasks = functions(tmp_path, {"question": "?", "tests": [test]})
    assert (await judged(tasks, block("def add(a, b):\n    return a + b"))).reward == 1
    assert (await judged(tasks, block("def add(a, b):\n    return 0"))).reward == 0


@pytest.mark.parametrize(
    "test",
    [
        "def check_add():\n    assert add(1, 2) == 3",
        "def test_add(given):\n    assert add(1, given) == 3",
        "async def test_add():\n    assert add(1, 2) == 3",
        "class TestAdd:\n    def test_add(self, given):\n        assert add(1, given) == 3",
        "if __name__ == '__main__':\n    assert add(1, 2) == 3",
        "for n in []:\n    assert add(n, n) == 2 * n",
        "import no_such_package\ndef test_add():\n    assert add(1, 2) == 3",
        "assert add(lambda: 1, 2) == 3",
    ],
)
async def test_a_test_that_calls_nothing_is_a_fault_of_the_data(
    test: str, tmp_path: Path
) -> None:
    tasks = functions(
        tmp_path, {"question": "?", "tests": ["assert add(1, 2) == 3", test]}
    )
    with pytest.raises(ValueError, match="a test of .*row 1 calls none of add: "):
        await judged(tasks, block("def add(a, b):\n    return a + b"))


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("add(1, 2) == 3", "compares, and asserts nothing: 'add(1, 2) == 3'"),
        ("assert add(1, 2) == 3\nadd(2, 2) == 4", "compares, and asserts nothing"),
        (
            "assert (add(1, 2), 3)",
            "compares, and asserts nothing: 'assert (add(1, 2), 3)'",
        ),
        ("assert add(1, 2), 3", "compares, and asserts nothing"),
        ("add(1, 2)", "a test asserts nothing"),
        ("print(add(1, 2))", "a test asserts nothing"),
        ("def test_add():\n    return add(1, 2) == 3", "a test asserts nothing"),
        ("", "a test asserts nothing"),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1", "a test needs .push of 's'"),
        ("assert Total().of(1, 2) == 3", "a test needs .of of 'Total()'"),
        (
            "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n"
            "    add(1, 2)\nassert '3' in out.getvalue()",
            "a test reads by redirect_stdout what a function prints",
        ),
        (
            "def test_add(capsys):\n    add(1, 2)\n    assert capsys.readouterr()",
            "by capsys what",
        ),
        (
            "import io, sys\nsys.stdout = io.StringIO()\nassert add(1, 2)",
            "by stdout what",
        ),
        (
            "from unittest.mock import patch\nwith patch('sys.stdout') as out:\n    add(1, 2)\n"
            "assert out",
            "by sys.stdout what",
        ),
    ],
)
def test_a_test_that_every_function_passes_or_fails_is_refused(
    test, said, tmp_path
) -> None:
    with pytest.raises(ConfigError, match="row 1: ") as refused:
        functions(tmp_path, {"question": "?", "tests": ["assert add(1, 2) == 3", test]})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("test", "code", "reward"),
    [
        ("a = [3, 1]\nf(a)\nassert a == [1, 3]", "def f(a): a.sort()", 1),
        # Otherwise emptied arguments would lower what is expected.
        ("a = [3, 1]\nassert f(a) == sorted(a)", "def f(a): a.clear(); return a", 0),
        (
            "a = [3, 1]\nassert f(a) == [1, 3] and a == [3, 1]",
            "def f(a): a.sort(); return a",
            1,
        ),
        (
            "a, b = {'x': [2, 1]}, {1}\nf(a, k=b)\nassert a == {'x': [1, 2], 'y': 2} and b == {5}",
            "def f(a, k):\n    a['x'].sort()\n    a['y'] = 2\n    k.clear()\n    k.add(5)",
            1,
        ),
        (
            "import asyncio\nassert asyncio.run(f(1)) == 2",
            "async def f(a): return a + 1",
            1,
        ),
        ("assert f(1) == 2", "async def f(a): return a + 1", 0),
        ("assert f(1) == 2, 2", "def f(a): return a + 1", 1),
        # A class of data finds its module.
        (
            "assert f() == (['a'], {'return': 'missing'})",
            "import dataclasses, typing\n@dataclasses.dataclass\n"
            "class A:\n    a: 'typing.ClassVar' = 1\n"
            "def f() -> 'missing': return [*typing.get_type_hints(A)], f.__annotations__",
            1,
        ),
        (
            "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('x')\n"
            "    def test_a(self): self.assertEqual(f(1), 3)\n"
            "    def test_b(self): self.assertEqual(f(1), 2)",
            "def f(a): return a + 1",
            1,
        ),
    ],
)
async def test_what_a_function_does_counts_as_in_one_process(
    test, code, reward, tmp_path
) -> None:
    tasks = functions(tmp_path, {"question": "?", "tests": [test]})
    assert (await judged(tasks, block(code))).reward == reward


class Counted(Sandbox):
    """Keeps the last word of each command that it starts."""

    def start(self, program, *, files=None):
        self.started = [*getattr(self, "started", ()), program[-1]]
        return super().start(program, files=files)


@pytest.mark.parametrize(
    ("code", "number"),
    [("", 0), ("def f(:", 1), ("raise ValueError", 1), ("def f(): return 1", 1)],
)
async def test_code_is_started_once_at_most_if_it_cannot_be_loaded(
    code, number, tmp_path
) -> None:
    environment = functions(
        tmp_path, {"question": "?", "tests": ["assert f() == 1"] * 3}
    )
    sandbox = environment._sandbox = Counted(Limits(seconds=LIMIT_S))
    assert (await judged(environment, block(code) if code else "")).reward == (
        "return 1" in code
    )
    assert sandbox.started == ["examiner", *["candidate"] * number]


async def test_a_sandbox_imports_what_tests_and_code_import(tmp_path: Path) -> None:
    # All of these take as long there as the rest of an exam.
    slow = "import sys\nslow = {'json', 're', 'runpy', 'typing'} & {*sys.modules}\n"
    tasks = functions(
        tmp_path, {"question": "?", "tests": [f"{slow}assert f() == slow == set()"]}
    )
    assert (await judged(tasks, block(f"{slow}def f(): return slow"))).reward == 1


async def test_code_that_ends_passes_no_test_that_catches_everything(
    tmp_path: Path,
) -> None:
    test = "try:\n    assert add(1, 2) == 3\nexcept:\n    pass"
    tasks = functions(tmp_path, {"question": "?", "tests": [test]})
    ended = await judged(tasks, block("def add(a, b):\n    import os\n    os._exit(0)"))
    assert (ended.reward, ended.metrics["errors"]) == (0, 1)
    assert (await judged(tasks, block("def add(a, b):\n    return a + b"))).reward == 1


async def test_the_code_that_defines_the_function_is_judged_without_thoughts(
    tmp_path: Path,
):
    tasks = functions(tmp_path, {"question": "?", "tests": ["assert add(1, 2) == 3"]})
    right = "def add(a, b):\n    return a + b"
    use = "from your_module import add\nprint(add(1, 2))"
    for reply, reward in (
        (f"{block(right)}\nCall it:\n{block('print(add(1, 2))')}", 1),
        # An example of use that imports the function does not define it, unless it stands alone.
        (f"{block(right)}\nUse it:\n{block(use)}", 1),
        (block("from operator import add"), 1),
        (f"<think>{block(right)}", 0),
        (f"<think>{block('def add(a, b): return 0')}</think>{block(right)}", 1),
    ):
        assert (await judged(tasks, reply)).reward == reward


def test_the_prompt_may_name_other_columns(tmp_path: Path) -> None:
    row = {
        "title": "Add {tests}.",
        "starter_code": "def add(a, b):",
        "tests": "assert add(1, 2) == 3",
    }
    tasks = functions(
        tmp_path, row, question="title", instruction="{question}\n{starter_code}"
    )
    assert tasks.reset(tasks.tasks()[0])[0].content == "Add {tests}.\ndef add(a, b):"
    with pytest.raises(ConfigError, match="{starter_cod}"):
        functions(
            tmp_path, row, question="title", instruction="{question}{starter_cod}"
        )


@pytest.mark.parametrize(
    "solution", ["def twice(x):\n    return 2 * x", "    return 2 * x\n"]
)
async def test_solutions_as_data_sets_write_them_pass(solution, tmp_path: Path) -> None:
    row = HUMANEVAL | {"solution": solution}
    tasks = functions(tmp_path, row, **HUMANEVAL_COLUMNS, solution="solution")
    tasks.reset(tasks.tasks()[0])
    assert (await tasks.step(tasks.right_reply)).reward == 1


def test_a_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    for column in ("setup", "solution"):
        with pytest.raises(ConfigError, match="row 1 has no column 'typo'"):
            functions(
                tmp_path, {"question": "?", "tests": "assert f()"}, **{column: "typo"}
            )


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            {"tests": ["assert add(2, 2) == 5"]},
            "test it differently: put all tests into one row",
        ),
        ({"tests": ["assert add(1, 2) == 3"]}, "test it alike: leave one of them out"),
        ({"question": "Write add(a, b) otherwise."}, ""),
        ({"starter": "def add(a, b):"}, ""),
    ],
)
def test_two_rows_with_one_prompt_are_refused(
    tmp_path: Path, second: dict[str, object], said: str
) -> None:
    first = {
        "question": "Write add(a, b).",
        "tests": ["assert add(1, 2) == 3"],
        "starter": "def",
    }
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (first, first | second)))
    instruction = "{question}\n{starter}"
    if said:
        with pytest.raises(ConfigError) as refused:
            Functions(str(path), instruction=instruction)
        assert str(refused.value) == f"{path}, row 1 and row 2 ask the same and {said}"
    else:
        assert len(Functions(str(path), instruction=instruction).tasks()) == 2


async def test_a_test_that_cannot_run_fails_the_episode(tmp_path: Path) -> None:
    row = {
        "question": "?",
        "tests": ["assert f() == 1"],
        "setup": "import no_such_module",
    }
    tasks = functions(tmp_path, row, setup="setup")
    with pytest.raises(ValueError, match="the tests do not run: .*no_such_module"):
        await judged(tasks, block("def f(): return 1"))


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        (
            {"tests": ["assert f()"]},
            {},
            "row 1 has no column 'question'; its columns are 'tests'",
        ),
        (
            {"question": "?"},
            {},
            "row 1 has no column 'tests'; its columns are 'question'",
        ),
        ({"question": "?", "tests": []}, {}, "row 1: column 'tests' is empty"),
        ({"question": "?", "tests": "[]"}, {}, "the tests use no name"),
        ({"question": "?", "tests": [1]}, {}, "must hold a test or a list of tests"),
        ({"question": "?", "tests": ["assert f("]}, {}, "row 1: a test is no Python"),
        ({"question": "?", "tests": ["assert 1 == 1"]}, {}, "the tests use no name"),
        (
            {"question": "?", "tests": "def check(f):\n    f()"},
            {},
            "function = 'entry_point'",
        ),
        (
            MBPP | {"image": "a.png"},
            MBPP_COLUMNS,
            "column 'image' is not read, got a.png",
        ),
        (MBPP, {"reward": "some"}, "reward must be 'share' or 'all', got 'some'"),
        (MBPP, {"limit_s": 0.0}, "limit_s must be above 0, got 0.0"),
        (MBPP, {"instruction": "x"}, "instruction must contain {question}"),
        (MBPP, {"max_running": -1}, "max_running must be at least 0, got -1"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, row, options, said):
    columns = MBPP_COLUMNS if row is MBPP else {}
    with pytest.raises(ConfigError) as refused:
        functions(tmp_path, row, **columns, **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)

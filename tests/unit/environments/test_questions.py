import asyncio
import importlib.util
import json
import math
import subprocess
import sys
import threading
from datetime import date, time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from make_question_files import main as make_question_files
from slipstream.client.environment import Message, Reply, StepResult, ToolCall
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.core.hub import HubFiles
from slipstream.core.template_values import show
from slipstream.environments.arguments import is_heldout
from slipstream.environments.question_files import cell_in, check_read, text_of
from slipstream.environments.questions import Questions
from slipstream.v1 import environment_pb2 as pb
from support.fakes.fake_workers import worker_process

REFERENCE = "slipstream.environments.questions:Questions"
CONVERTED = [("1, and 1?", "007"), ("a\nb", "é")]
SUMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(100)]


def json_lines(folder: Path, rows: list, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def parquet(folder: Path, rows: list, name: str = "data.parquet") -> str:
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    files.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def refusal(path: str | list[str], **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Questions(path, **{"judge": "exact", **settings})
    return str(caught.value)


@pytest.mark.parametrize("write", [json_lines, parquet])
def test_questions_of_a_file_are_tasks_in_its_order(tmp_path: Path, write):
    environment = Questions(write(tmp_path, SUMS), judge="exact")
    tasks = environment.tasks()
    assert [task.answer for task in tasks] == [row["answer"] for row in SUMS]
    assert environment.reset(tasks[3]) == [Message("user", "What is 3 + 3?")]


async def test_rows_and_the_judge_may_be_objects_of_this_process():
    def judge(reply, row):
        return {"reward": float(row["answer"] in reply), "length": len(reply)}

    environment = Questions((dict(row) for row in SUMS), judge=judge)
    environment.reset(environment.tasks()[3])
    assert await environment.step(Reply("6!")) == StepResult(1.0, metrics={"length": 2})
    assert refusal([{"question": "b"}]) == (
        "the given rows, row 1 has no column 'answer'; its columns are 'question'"
    )
    assert refusal([*SUMS, "a.jsonl"]).startswith(
        "path must be a file, a pattern, a list"
    )
    with pytest.raises(
        ConfigError, match="judge .*<lambda> must take the argument reply"
    ):
        Questions(SUMS, judge=lambda answer: 1.0)


TALK = [
    {"role": "user", "content": "Weather in Oslo?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "-3 C"},
    {"role": "user", "content": "And in F?"},
]


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        (threading.Lock(), "TypeError: cannot pickle '_thread.lock' object"),
        ((n for n in range(3)), "TypeError: cannot pickle 'generator' object"),
    ],
)
async def test_a_row_that_cannot_be_copied_is_no_row_for_a_judge(field, cause) -> None:
    row = {"question": "1 + 1", "extra": field}
    environment = Questions([row], judge=lambda reply, row: 1.0)
    environment.reset(environment.tasks()[0])
    with pytest.raises(EnvironmentFailed) as failed:
        await environment.step("2")
    message = str(failed.value)
    assert "gets a copy of the row, and that of '1 + 1' has none: " + cause in message
    assert message.endswith("; keep what is no data outside the rows")
    environment = Questions([row], judge=lambda reply, question: 1.0)
    environment.reset(environment.tasks()[0])
    assert (await environment.step("2")).reward == 1.0


@pytest.mark.parametrize("write", [json_lines, parquet])
@pytest.mark.parametrize("form", [list, json.dumps, str])
def test_messages_keep_all_that_they_hold_also_as_text(tmp_path: Path, write, form):
    path = write(tmp_path, [{"prompt": form(TALK), "answer": "26.6"}])
    environment = Questions(path, question="prompt", judge="exact")
    (task,) = environment.tasks()
    call = ToolCall("c1", "look", {"city": "Oslo"})
    assert environment.reset(task) == [
        Message("user", "Weather in Oslo?"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "-3 C", "c1"),
        Message("user", "And in F?"),
    ]


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        *(([{"role": "system", "content": "s"}, *TALK], {"system": system},
           "begins with a system message: leave out system") for system in ("Be kind.", "")),
        (TALK, {"instruction": "{question}!"}, "holds messages, into which no instruction is put"),
        ([*TALK, {"role": "assistant", "content": "26.6"}], {}, "ends with a reply: the model is"),
        ([{"role": "user", "content": "q", "weight": 0}], {}, "the field 'weight' says what is"),
        ('[{"role": "user", "content": "q"', {}, "looks like a list, but cannot be read"),
        ([*TALK[:2], {**TALK[2], "tool_call_id": "c2"}], {}, "no call has the id 'c2' of a result"),
        ([{"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"a": 1}}]}],
         {}, "a part of type 'text' has no field 'cache_control'"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_asked_are_refused(
    tmp_path: Path, prompt, settings, said
):
    path = json_lines(tmp_path, [{"question": prompt, "answer": "2"}])
    text = refusal(path, **settings)
    assert text.startswith(f"{path}, row 1: column 'question'")
    assert said in text


async def test_a_decimal_is_the_number_that_it_writes() -> None:
    environment = Questions(
        [{"question": "q", "answer": Decimal("18.90")}], judge="exact"
    )
    environment.reset(environment.tasks()[0])
    earned = [
        (await environment.step(reply)).reward for reply in ("18.9", "18.90", "18.91")
    ]
    assert earned == [1.0, 1.0, 0.0]
    assert (
        Questions([{"question": "q", "answer": Decimal("72.00")}]).tasks()[0].answer
        == "72"
    )


@pytest.mark.parametrize("write", [json_lines, parquet])
async def test_a_number_is_a_number_whatever_a_file_makes_of_it(tmp_path: Path, write):
    rows = [{"question": f"q{n}", "answer": n} for n in (72.0, 0.1, 1e23)]
    environment = Questions(write(tmp_path, rows), judge="exact")
    large = "1" + "0" * 23
    assert [task.answer for task in environment.tasks()] == ["72", "0.1", large]
    for task, replies in zip(
        environment.tasks(),
        (("72", "72.0", "$72"), ("0.1", ".1"), (large, "1e23")),
        strict=True,
    ):
        environment.reset(task)
        assert [(await environment.step(reply)).reward for reply in replies] == [
            1.0
        ] * len(replies)
        assert (await environment.step("7")).reward == 0.0


def test_what_is_missing_in_a_column_of_numbers_is_empty(tmp_path: Path):
    path = json_lines(tmp_path, [{"question": "q", "answer": float("nan")}])
    assert refusal(path) == f"{path}, row 1: column 'answer' is empty"
    path = json_lines(tmp_path, [{"question": "q", "answer": True}])
    assert refusal(path).endswith(
        "must hold a text or a number, got True: write its text"
    )


@pytest.mark.parametrize(
    "answer", [date(2024, 1, 5), time(5, 30), ("7",), {"7"}, b"7", 1j]
)
def test_a_value_that_is_neither_text_nor_number_is_refused(answer):
    with pytest.raises(ConfigError, match="must hold a text or a number, got"):
        Questions([{"question": "q", "answer": answer}], judge="exact")
    questions = Questions(
        [{"question": "q", "answer": answer}], judge=lambda reply, answer: 1.0
    )
    assert questions.tasks()[0].value == answer


def test_arrays_of_rows_are_lists_and_their_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    messages = numpy.array([{"role": "user", "content": "q"}], dtype=object)
    rows = [{"question": messages, "answer": numpy.int64(7)}]
    (task,) = Questions(rows, judge="exact").tasks()
    assert (task.messages, task.answer) == ((Message("user", "q"),), "7")


def test_numbers_of_32_bits_are_their_shortest_decimals(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    numbers = pyarrow.array([0.1, 72.0], pyarrow.float32())
    truths = pyarrow.StructArray.from_arrays([numbers], ["value"])
    lists = pyarrow.array([[0.1], None], pyarrow.list_(pyarrow.float32()))
    columns = {
        "question": ["a", "b"],
        "answer": numbers,
        "truth": truths,
        "seen": lists,
    }
    columns["halves"] = numbers.cast(pyarrow.float16())
    columns["pair"] = pyarrow.array(
        [[0.1, 0.2], None], pyarrow.list_(pyarrow.float32(), 2)
    )
    columns["map"] = pyarrow.array(
        [[("x", 0.1)]] * 2, pyarrow.map_("string", pyarrow.float32())
    )
    table = pyarrow.table(columns)
    files.write_table(table, tmp_path / "data.parquet")
    tasks = Questions(str(tmp_path / "data.parquet"), judge="exact").tasks()
    assert [(task.answer, task.row["answer"]) for task in tasks] == [
        ("0.1", 0.1),
        ("72", 72.0),
    ]
    assert tasks[0].row["truth"] == {"value": 0.1}
    assert [task.row["seen"] for task in tasks] == [[0.1], None]
    assert [task.row["pair"] for task in tasks] == [[0.1, 0.2], None]
    assert [tasks[0].row[name] for name in ("halves", "map")] == [0.1, [("x", 0.1)]]


def test_a_time_that_python_cannot_hold_is_one_line(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    times = pyarrow.array([1_700_000_000_123_456_789], pyarrow.timestamp("ns"))
    files.write_table(
        pyarrow.table({"question": ["q"], "answer": times}), tmp_path / "data.parquet"
    )
    assert "data.parquet cannot be read: Nanosecond" in refusal(
        str(tmp_path / "data.parquet")
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"question": "q", "answer": "1", "answer": "2"}',
            "'answer' stands twice in one object",
        ),
        ('{"question": "q", "answer": 1e400}', "must hold a finite number, got inf"),
        (
            '{"question": "q \\ud800", "answer": "1"}',
            r"line 1 holds half of a character, '\ud800'",
        ),
        ('{"question": true, "answer": "1"}', "must hold a text or a number, got True"),
        (
            '{"question": "q", "answer": "1", "tools": [{"type": "x"}]}',
            "'tools' is not read",
        ),
        (
            '{"question": "<image>?", "answer": "1", "images": ["a.png"]}',
            "'images' is not read",
        ),
        (
            '{"question": "What is it?", "answer": "1", "image": "a.png"}',
            "'image' is not read",
        ),
        (
            '{"question": "q", "answer": "1", "system": "Be kind."}',
            "'system' is not read",
        ),
        (
            r'{"question": "q", "answer": "\frac{1}{2}"}',
            r"holds '\x0crac': in JSON a backslash",
        ),
        (r'{"question": "2 \times 3 \neq 5?", "answer": "1"}', r"holds '\times'"),
        (
            """{"question": "[{'from': 'human', 'value': 'a'}]", "answer": "1"}""",
            "a message has role and content, got {'from'",
        ),
        (
            """{"question": "array([{'role': 'user', 'content': 'a'}])", "answer": "1"}""",
            "looks like a list, but cannot be read",
        ),
        (
            json.dumps({"question": '{"role": "user", "content": "a"}', "answer": "1"}),
            "looks like a list, and is a dict",
        ),
    ],
)
def test_a_line_that_would_be_read_otherwise_than_written_is_refused(
    tmp_path: Path, line, said
):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{line}\n")
    assert said in refusal(str(path))


def typed(reply, answer, row):
    return {
        "reward": 1.0,
        type(answer).__name__: 1.0,
        type(row["answer"]).__name__: 1.0,
    }


@pytest.mark.parametrize("write", [json_lines, parquet])
@pytest.mark.parametrize("answer", [2, 2.5, True, ["a"], "2"])
async def test_a_function_gets_answers_of_their_own_type(tmp_path: Path, write, answer):
    path = write(tmp_path, [{"question": "q", "answer": answer}])
    environment = Questions(path, judge=f"{__name__}:typed")
    environment.reset(environment.tasks()[0])
    assert (await environment.step(Reply("x"))).metrics == {type(answer).__name__: 1.0}


def test_a_system_prompt_and_an_instruction_stand_around_the_question(tmp_path: Path):
    environment = Questions(
        json_lines(tmp_path, SUMS),
        judge="exact",
        system="You can count.",
        instruction="{question} Reply with the number.",
    )
    assert environment.reset(environment.tasks()[1]) == [
        Message("system", "You can count."),
        Message("user", "What is 1 + 1? Reply with the number."),
    ]


def test_the_questions_of_several_files_follow_each_other(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parquet(tmp_path, SUMS[:3], "b.parquet")
    json_lines(tmp_path, SUMS[3:5], "a.jsonl")
    json_lines(tmp_path, SUMS[5:8], "c[1].jsonl")

    def answers(path: str | list[str]) -> list[int]:
        return [
            int(task.answer) // 2 for task in Questions(path, judge="exact").tasks()
        ]

    assert answers(["b.parquet", "a.jsonl"]) == [0, 1, 2, 3, 4]
    assert answers("*") == [3, 4, 0, 1, 2, 5, 6, 7]
    assert answers(["c[1].jsonl", "b*"]) == [5, 6, 7, 0, 1, 2]
    json_lines(tmp_path, [SUMS[0]], "d.jsonl")
    assert refusal(["a.jsonl", "b.parquet", "d.jsonl"]) == (
        "b.parquet, row 1 and d.jsonl, row 1 ask the same question; "
        "duplicates='drop' keeps the first"
    )
    assert refusal(["a.jsonl", "a.jsonl"]).startswith(
        "a.jsonl, row 1 and a.jsonl, row 1 ask the"
    )
    json_lines(tmp_path, [SUMS[9], {"question": "b", "answer": None}], "d.jsonl")
    assert refusal(["a.jsonl", "d.jsonl"]) == "d.jsonl, row 2: column 'answer' is empty"


def test_arguments_are_checked_before_anything_is_downloaded(monkeypatch):
    monkeypatch.setattr(HubFiles, "bring", lambda *_: pytest.fail("a download began"))
    assert "instruction" in refusal("hf:a/b", instruction="Say yes.")


def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("none.jsonl") == (
        f"none.jsonl does not exist; the working directory is {tmp_path}"
    )
    assert refusal("openai/gsm8k").endswith(f"{tmp_path}; on the hub: hf:openai/gsm8k")
    assert (
        refusal("*.jsonl")
        == f"no file matches *.jsonl; the working directory is {tmp_path}"
    )
    assert (
        refusal(["hf:a/b"])
        == "a data set of the hub stands alone in path, got 'hf:a/b' in a list"
    )
    assert refusal([]) == "path is an empty list; it must have files or rows"
    assert refusal({"question": ["q"], "answer": ["a"]}) == (
        "rows are a list of dicts, got a dict of ('question',); columns become rows by "
        'to_dict("records") of a DataFrame'
    )
    assert (
        refusal([1])
        == "path must be a file, a pattern, a list of these or of rows, got 1"
    )
    assert refusal(str(tmp_path)).startswith(
        f"{tmp_path} is a folder, not a file; the working"
    )
    for name, split in (("state.json", ""), ("dataset_dict.json", "['train']")):
        (saved := tmp_path / name.partition("_")[0]).mkdir()
        (saved / name).touch()
        (arrow := saved / "data-00000-of-00001.arrow").touch()
        converted = f"load_from_disk('{saved}'){split}.to_parquet('{saved}.parquet')\""
        assert refusal(str(saved)).endswith(converted)
        assert refusal(str(arrow)).endswith(converted)
    json_lines(tmp_path, [{"prompt": "a", "solution": "b"}])
    assert refusal("data.jsonl") == (
        "data.jsonl, row 1 has no column 'question'; its columns are 'prompt', 'solution'"
    )
    assert refusal("data.jsonl", question="prompt", answer="solution.final") == (
        "data.jsonl, row 1 has no column 'solution.final'; its columns are 'prompt', 'solution'"
    )
    json_lines(tmp_path, [])
    assert refusal("data.jsonl") == "data.jsonl has no rows"
    json_lines(tmp_path, [SUMS[0], {"question": "b", "answer": None}])
    assert refusal("data.jsonl") == "data.jsonl, row 2: column 'answer' is empty"
    json_lines(tmp_path, [SUMS[0], SUMS[1], SUMS[0]])
    assert refusal("data.jsonl") == (
        "data.jsonl, row 1 and data.jsonl, row 3 ask the same question; "
        "duplicates='drop' keeps the first"
    )
    (tmp_path / "data.jsonl").write_text('{"question": "a", "answer": "b"}\n[1\n')
    assert refusal("data.jsonl").startswith("data.jsonl, line 2 is no JSON: ")
    (tmp_path / "data.jsonl").write_text('[\n{"question": "a", "answer": "b"}\n]\n')
    assert refusal("data.jsonl") == (
        "data.jsonl is one JSON list, not an object a line; convert it by: python -c "
        "\"import csv, json; print(*map(json.dumps, json.load(open(0))), sep='\\n')\" < data.jsonl "
        "> data-lines.jsonl"
    )
    (tmp_path / "data.jsonl").write_text(
        '{"question": "a", "answer": "b"}\n["c", "d"]\n'
    )
    assert refusal("data.jsonl") == "data.jsonl, line 2 is no JSON object"
    json_lines(tmp_path, [SUMS[0], {"question": [], "answer": "b"}])
    assert refusal("data.jsonl") == "data.jsonl, row 2: column 'question' is empty"
    json_lines(tmp_path, [{"question": [{"role": "user"}], "answer": "b"}])
    assert refusal("data.jsonl") == (
        "data.jsonl, row 1: column 'question': a message has role and content, got {'role': 'user'}"
    )
    json_lines(
        tmp_path, [{"question": [{"role": "user", "content": None}], "answer": "b"}]
    )
    assert refusal("data.jsonl") == (
        "data.jsonl, row 1: column 'question': content must be a text or a list of parts, got None"
    )
    json_lines(tmp_path, [SUMS[0], {"question": "q", "answer": {"text": ["b"]}}])
    assert refusal("data.jsonl") == (
        "data.jsonl, row 2: column 'answer' must hold a text or a number, got {'text': ['b']}"
        ": write its text"
    )
    (tmp_path / "data.jsonl").write_text(
        '{"question": "Größe", "answer": "1"}\n', "latin-1"
    )
    assert refusal("data.jsonl") == "data.jsonl must be UTF-8, but line 1 is not"
    pytest.importorskip("pyarrow")
    (tmp_path / "data.parquet").write_text("no parquet")
    assert refusal("data.parquet").startswith("data.parquet cannot be read: ")
    assert "\n" not in refusal("data.parquet")
    (tmp_path / "data.xlsx").write_text("")
    assert refusal("data.xlsx") == (
        "the name of a file of questions ends in .jsonl or .parquet, got data.xlsx"
    )
    for name, remedy in (
        ("a.JSONL", "name it .jsonl if"),
        ("a.jsonl.gz", "unpack it by gunzip"),
    ):
        (tmp_path / name).write_text("")
        assert f"got {name}; {remedy}" in refusal(name)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sums.csv", '\ufeffquestion,answer\n"1, and 1?",007\n"a\nb",é\n'),
        ("sums.tsv", 'question\tanswer\n1, and 1?\t007\n"a\nb"\té\n'),
        ("sums.json", json.dumps([{"question": q, "answer": a} for q, a in CONVERTED])),
    ],
)
def test_the_refusal_of_another_format_has_the_command_that_converts_it(
    tmp_path, monkeypatch, name, text
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        Questions(name, judge="exact")
    assert ("name it .jsonl" in str(refused.value)) is (name == "sums.json")
    command = str(refused.value).partition("convert it by: python ")[2]
    subprocess.run(["sh", "-c", f"{sys.executable} {command}"], check=True)
    tasks = Questions("sums.jsonl", judge="exact").tasks()
    assert [(task.text, task.answer) for task in tasks] == CONVERTED


def test_a_byte_order_mark_is_no_part_of_a_question_file(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text(Path(json_lines(tmp_path, SUMS)).read_text(), encoding="utf-8-sig")
    assert len(Questions(str(path), judge="exact").tasks()) == len(SUMS)


def test_duplicates_may_be_dropped(tmp_path: Path):
    path = json_lines(tmp_path, [SUMS[0], SUMS[1], SUMS[0]])
    assert len(Questions(path, judge="exact", duplicates="drop").tasks()) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"judge": "guess"},
            "judge must be one of math_verify, exact, contains, module:function, got 'guess'",
        ),
        ({"judge": "no_such:judge"}, "judge: there is no module 'no_such'"),
        ({"judge": "json:judge"}, "judge: module json has no function 'judge'"),
        (
            {"judge": f"{__name__}:verls"},
            f"judge {__name__}:verls must take reply, question, answer, row by name, or some of "
            "them, and takes 'data_source': wrap it in a function that does",
        ),
        ({"judge": 3}, "judge must be a text or callable, got 3"),
        (
            {"judge": f"{__name__}:blind"},
            f"judge {__name__}:blind must take the argument reply",
        ),
        ({"split": "test"}, "split must be 'all', 'train' or 'heldout', got 'test'"),
        ({"instruction": "?"}, "instruction must contain {question}, got '?'"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"limit": 1.5}, "limit must be a whole number, got 1.5"),
        ({"judge_timeout_s": 0.0}, "judge_timeout_s must be above 0, got 0.0"),
        ({"judge_timeout_s": "9"}, "judge_timeout_s must be a number, got '9'"),
        ({"question": ["a"]}, "question must be a text, got ['a']"),
        ({"answer": 3}, "answer must be a text, got 3"),
        ({"instruction": None}, "instruction must be a text, got None"),
        ({"system": 3}, "system must be a text, got 3"),
        ({"answer_after": ["#"]}, "answer_after must be a text, got ['#']"),
    ],
)
def test_an_argument_that_cannot_work_is_refused(tmp_path: Path, settings, message):
    assert refusal(json_lines(tmp_path, SUMS), **settings) == message


@pytest.mark.parametrize("path", [3, None])
def test_what_gives_no_rows_is_refused(path: object) -> None:
    assert (
        refusal(path)
        == f"path must be a text or an instance of Path or iterable, got {path}"
    )


async def test_an_empty_mark_is_none(tmp_path: Path) -> None:
    questions = Questions(json_lines(tmp_path, SUMS), judge="exact", answer_after="")
    questions.reset(task := questions.tasks()[0])
    assert (await questions.step(str(task.answer))).reward == 1.0


def test_a_split_that_holds_no_question_is_named(tmp_path: Path):
    path = json_lines(tmp_path, SUMS[:1])
    (only,) = Questions(path, judge="exact").tasks()
    split = "train" if is_heldout(only.identity, 10) else "heldout"
    assert refusal(path, split=split) == f"{path} has no questions in split {split!r}"


def test_train_and_heldout_questions_are_apart_whatever_the_order(tmp_path: Path):
    forward = json_lines(tmp_path, SUMS, "forward.jsonl")
    backward = json_lines(tmp_path, SUMS[::-1], "backward.jsonl")
    train = set(Questions(forward, judge="exact", split="train").tasks())
    heldout = set(
        Questions(backward, judge="exact", split="heldout", shuffle_seed=1).tasks()
    )
    assert train.isdisjoint(heldout)
    assert len(train | heldout) == 100
    assert 3 <= len(heldout) <= 20


def test_a_seed_shuffles_before_the_limit_and_always_in_the_same_way(tmp_path: Path):
    path = json_lines(tmp_path, SUMS)
    first = Questions(path, judge="exact", shuffle_seed=3, limit=10).tasks()
    assert first == Questions(path, judge="exact", shuffle_seed=3, limit=10).tasks()
    assert first != Questions(path, judge="exact", shuffle_seed=4, limit=10).tasks()
    assert first != Questions(path, judge="exact", limit=10).tasks()
    assert len(first) == 10


@pytest.mark.parametrize(
    ("judge", "reply", "right"),
    [
        ("exact", "Paris", True),
        ("exact", " Paris\n", True),
        ("exact", "It is Paris", False),
        ("exact", "I think.\nAnswer: Paris", True),
        ("contains", "it is paris!", True),
        ("contains", "it is London", False),
    ],
)
async def test_texts_are_compared(tmp_path: Path, judge, reply, right):
    row = {"question": "The capital of France?", "answer": "Paris"}
    environment = Questions(
        json_lines(tmp_path, [row]), judge=judge, answer_after="Answer:"
    )
    environment.reset(environment.tasks()[0])
    result = await environment.step(reply)
    assert result.reward == float(right)
    assert result.metrics == {"right": right}


def verls(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def blind(row):
    return 0.0


def by_cases(reply, answer):
    return float(reply in answer)


async def all_four(question, reply, answer, row):
    await asyncio.sleep(0)
    right = reply == str(answer)
    return {
        "reward": right - 0.5,
        "right": right,
        "level": row["level"],
        "asked": len(question),
    }


@pytest.mark.parametrize("write", [json_lines, parquet])
async def test_a_function_judges_by_the_arguments_that_it_takes(tmp_path: Path, write):
    row = {"prompt": "1 + 1?", "truth": {"value": 2}, "level": 3}
    path = write(tmp_path, [row])
    columns = {
        "question": "prompt",
        "answer": "truth.value",
        "instruction": "{question} Now.",
    }

    async def verdict(judge, reply: str, **settings: object) -> StepResult:
        environment = Questions(path, judge=judge, **{**columns, **settings})
        environment.reset(environment.tasks()[0])
        return await environment.step(
            reply if isinstance(reply, Reply) else Reply(reply)
        )

    def longest(reply, *, power=1):
        return len(reply) ** power

    assert (await verdict(longest, "four")).reward == 4.0
    assert (await verdict(lambda **given: len(given), "x")).reward == 4.0
    result = StepResult(1, metrics={"good": 1}, token_rewards=[0.25, 0.5])
    by_token = {"reward": 1, "token_rewards": [0.25, 0.5], "good": 1}
    assert await verdict(lambda reply: by_token, Reply("x", token_ids=(1, 2))) == result
    # The question is the file's: an instruction is no part of it.
    # Neither is the answer changed: a number stays one.
    answer = await verdict(f"{__name__}:all_four", "2")
    assert (answer.reward, answer.metrics) == (
        0.5,
        {"right": True, "level": 3, "asked": 6},
    )
    assert (await verdict(all_four, "so 2", answer_after="so ")).metrics["right"]
    marked = Reply("<think>so 3</think>so 2", token_ids=(1, 2))
    parts = await verdict(
        lambda reply: {
            "reward": reply == reply.content == "2",
            "seen": len(reply.token_ids),
        },
        marked,
        answer_after="so ",
    )
    assert (parts.reward, parts.metrics) == (1.0, {"seen": 2})
    # A function that does not take the answer needs no column of answers.
    assert (await verdict(longest, "ab", answer="none")).reward == 2.0
    with pytest.raises(ConfigError, match="has no column 'none'"):
        await verdict(all_four, "2", answer="none")
    for wrong in (None, "good", []):
        with pytest.raises(
            EnvironmentFailed, match="must return a number, or metrics with 'rew"
        ):
            await verdict(lambda reply, said=wrong: said, "x")


@pytest.mark.parametrize("given", [np.array([1, 2]), 10**400, math.nan])
async def test_a_reward_that_is_no_number_is_named(given) -> None:
    rows = [{"question": "What is 1 + 1?"}]
    host = EpisodeHost(Questions(rows, judge=lambda reply: given))
    await host.answer(pb.WorkerCommand(reset=pb.ResetCommand(episode_key="a")))
    answer = await host.answer(
        pb.WorkerCommand(step=pb.StepCommand(episode_key="a", reply="2"))
    )
    assert (
        answer.failure.message
        == f"the reward must be a finite number, got {show(given)}"
    )


async def test_a_function_that_changes_its_row_changes_it_for_one_reply(tmp_path: Path):
    def changes(row, reply):
        row["seen"].append(reply)
        return len(row["seen"])

    path = json_lines(tmp_path, [{"question": "?", "seen": []}])
    environment = Questions(path, judge=changes)
    environment.reset(environment.tasks()[0])
    assert [(await environment.step(Reply("a"))).reward for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "asked",
    [
        '{"content": "a"} has how many keys?',
        '[{"role": "king", "age": 4}] How old is he?',
    ],
)
def test_a_question_about_json_is_a_text(tmp_path: Path, asked: str) -> None:
    path = json_lines(tmp_path, [{"question": asked, "answer": "1"}])
    assert Questions(path, judge="exact").tasks()[0].text == asked


@pytest.mark.parametrize("judge", ["exact", "contains", "math_verify"])
def test_an_answer_of_which_nothing_is_left_is_refused(
    tmp_path: Path, judge: str
) -> None:
    rows = [
        {"question": "q2", "answer": "so #### 7"},
        {"question": "q1", "answer": "cut ####"},
    ]
    path = json_lines(tmp_path, rows)
    message = f"{path}, row 2: column 'answer' has nothing behind '####'"
    assert refusal(path, judge=judge, answer_after="####") == message
    path = json_lines(tmp_path, [{"question": "q", "answer": "**\u200b**"}])
    assert refusal(path, judge=judge).endswith("row 1: column 'answer' has only marks")


class Lengths(Questions):
    """Judges by itself."""

    def __init__(self, path: str) -> None:
        super().__init__(path, judge="exact")

    async def step(self, reply):
        facts = (self.question.text, self.question.answer, self.question.row["level"])
        return StepResult(float(facts == ("What is 3?", "three", 7)))


async def test_a_subclass_finds_question_answer_and_row(tmp_path: Path):
    row = {"question": "What is 3?", "answer": "three", "level": 7}
    environment = Lengths(json_lines(tmp_path, [row]))
    environment.reset(environment.tasks()[0])
    assert (await environment.step("x")).reward == 1.0


@pytest.mark.process
async def test_a_function_that_gives_no_verdict_is_refused_by_the_check(tmp_path: Path):
    path = json_lines(tmp_path, SUMS)
    message = (
        "judge mine:wordy must return a number, or metrics with 'reward', got 'good'"
    )
    nan = "the reward must be a finite number, got nan"
    for value, cause in (("'good'", message), ("float('nan')", nan)):
        (tmp_path / "mine.py").write_text(f"def wordy(reply):\n    return {value}\n")
        args = json.dumps({"path": path, "judge": "mine:wordy"})
        options = ["--args", args, "--search-path", str(tmp_path)]
        async with worker_process("--check", REFERENCE, *options) as process:
            _, errors = await process.communicate()
        assert process.returncode == 2
        line = errors.decode().splitlines()[-1]
        assert line.startswith(f"environment {REFERENCE}: {cause} (in ")


@pytest.mark.parametrize(
    ("answer", "after", "reply"),
    [
        ("7", None, "7"),
        ("7", "####", "#### 7"),
        (["7", "seven"], None, "7"),
        # A verdict by cases has no reply that is right.
        ({"7": 1.0, "8": 0.5}, None, ""),
    ],
)
async def test_the_check_before_a_run_is_told_a_right_reply(
    tmp_path, answer, after, reply
) -> None:
    path = json_lines(tmp_path, [{"question": "3 + 4?", "answer": answer}])
    judged = "exact" if isinstance(answer, str) else by_cases
    questions = Questions(path, judge=judged, answer_after=after)
    questions.reset(questions.tasks()[0])
    assert questions.right_reply == reply


def test_a_judge_whose_package_is_missing_says_how_to_install_it(
    tmp_path, monkeypatch
) -> None:
    path = json_lines(tmp_path, [{"question": "3 + 4?", "answer": "7"}])
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "math_verify" else find_spec(name),
    )
    assert refusal(path, judge="math_verify") == (
        "judge 'math_verify' needs the package math-verify: "
        "pip install 'math-verify[antlr4_9_3]==0.9.0'"
    )


@pytest.mark.process
async def test_only_what_follows_the_mark_of_the_answer_counts(tmp_path: Path):
    pytest.importorskip("math_verify")
    row = {"question": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    environment = Questions(json_lines(tmp_path, [row]), answer_after="####")
    environment.reset(environment.tasks()[0])
    for reply, right in (("3 + 4 is 8 #### 7.0", True), ("7 #### 8", False)):
        result = await environment.step(reply)
        assert result.reward == float(right)
        assert result.metrics == {
            "right": right,
            "readable": True,
            "judge_timeout": False,
        }
    await environment._math.close()


def test_a_data_set_becomes_two_files_that_share_no_question(tmp_path: Path, capsys):
    rows = [
        {"question": row["question"], "answer": f"thinking #### {row['answer']}"}
        for row in SUMS
    ]
    source = json_lines(tmp_path, [*rows, rows[0]])
    arguments = [
        source,
        "--answer-after",
        "####",
        "--test-fraction",
        "0.2",
        "--format",
        "jsonl",
    ]
    for target in ("first", "second"):
        assert (
            make_question_files([*arguments, "--seed", "5", str(tmp_path / target)])
            == 0
        )
    assert capsys.readouterr().out.count("train.jsonl: 80 questions") == 2
    first = tmp_path / "first"
    second = tmp_path / "second"
    for name in ("train.jsonl", "test.jsonl"):
        assert (first / name).read_text() == (second / name).read_text()
    train = set(Questions(str(first / "train.jsonl"), judge="exact").tasks())
    test = set(Questions(str(first / "test.jsonl"), judge="exact").tasks())
    assert train.isdisjoint(test)
    assert {q.answer for q in train | test} == {row["answer"] for row in SUMS}


def test_the_files_are_parquet_and_the_environment_reads_them(tmp_path: Path):
    pytest.importorskip("pyarrow")
    source = json_lines(tmp_path, SUMS)
    assert make_question_files([source, str(tmp_path / "data")]) == 0
    assert (
        len(Questions(str(tmp_path / "data" / "train.parquet"), judge="exact").tasks())
        == 90
    )
    assert (
        len(Questions(str(tmp_path / "data" / "test.parquet"), judge="exact").tasks())
        == 10
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["--question", "prompt"],
            "has no column 'prompt'; its columns are 'question', 'answer'",
        ),
        (
            ["--test-fraction", "0"],
            "--test-fraction must leave questions on both sides, got 0.0",
        ),
        (["--answer-after", "####"], "an answer has no '####': '0'"),
    ],
)
def test_a_data_set_that_cannot_be_split_is_one_line(
    tmp_path: Path, capsys, extra, message
):
    source = json_lines(tmp_path, SUMS)
    assert make_question_files([source, str(tmp_path / "data"), *extra]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_pandas_puts_into_rows_is_read_as_what_files_hold() -> None:
    numpy = pytest.importorskip("numpy")
    row = {"images": numpy.array([1, 2]), "system": math.nan, "tools": numpy.array([])}
    check_read(row, ["system", "tools"], "row 1")
    with pytest.raises(
        ConfigError, match=r"^row 1: column 'images' is not read, got \[1 2\]: "
    ):
        check_read(row, row, "row 1")
    for missing in (math.nan, Decimal("NaN"), numpy.array([])):
        with pytest.raises(ConfigError, match="column 'answer' is empty"):
            cell_in({"answer": missing}, "answer", "row 1")
    for number in (math.inf, Decimal("Infinity"), math.nan):
        with pytest.raises(ConfigError, match="must hold a text or a number"):
            text_of(number, "row 1")

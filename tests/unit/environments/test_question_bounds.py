"""What a file of rows may hold, whoever wrote it."""

import json
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.environments import question_files
from slipstream.environments.demonstrations import Demonstrations
from slipstream.environments.question_files import named_rows
from slipstream.environments.questions import Questions


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Questions(str(path), **{"judge": "exact", **settings})
    text = str(caught.value)
    assert "\n" not in text
    return text


def json_lines(folder: Path, *rows: object) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def parquet(folder: Path, columns: dict[str, object]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    path = folder / "data.parquet"
    files.write_table(pyarrow.table(columns), path, compression="zstd")
    return path


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"question": ["a" * 50, "b"], "answer": ["1", "2"]})
    content = path.read_bytes()
    for start in range(4, len(content) - 8, 7):
        damaged = bytearray(content)
        damaged[start] ^= 0xFF
        damaged[start + 3] ^= 0xFF
        path.write_bytes(damaged)
        try:
            list(named_rows(path))
        except ConfigError as error:
            assert str(error).startswith(f"{path}")
            assert "\n" not in str(error)


def test_lists_within_lists_of_parquet_are_one_line(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    kind = pyarrow.string()
    value: object = "x"
    for _ in range(400):
        kind = pyarrow.list_(kind)
        value = [value]
    deep = pyarrow.array([value], kind)
    path = parquet(tmp_path, {"question": ["a"], "answer": ["1"], "deep": deep})
    assert refusal(path).startswith(
        f"{path} cannot be read: Parquet schema too deeply nested"
    )


def test_a_small_file_that_stands_for_many_rows_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    repeated = pyarrow.array(["x" * 1000] * 2000).dictionary_encode()
    path = parquet(tmp_path, {"question": repeated, "answer": repeated})
    monkeypatch.setattr(question_files, "MIN_TABLE_BYTES", 1 << 20)
    size = path.stat().st_size
    assert refusal(path) == (
        f"{path}: {size} bytes hold more than 1048576 bytes of rows; write it without repetitions"
    )
    monkeypatch.setattr(question_files, "MAX_ROWS", 1999)
    assert refusal(path) == (
        f"{path} has 2000 rows, and at most 1999 are read: write it as several files"
    )


def test_two_columns_of_parquet_with_one_name_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    names = ["question", "question", "answer"]
    columns = [pyarrow.array([name]) for name in names]
    table = pyarrow.Table.from_arrays(columns, names=names)
    files.write_table(table, path)
    assert refusal(path) == f"{path} has several columns 'question': keep one of them"


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(question_files, "MAX_LINE_BYTES", 1 << 20)
    path = json_lines(
        tmp_path, {"question": "q", "answer": "1"}, {"question": "a" * (2 << 20)}
    )
    assert (
        refusal(path) == f"{path}, line 2 has more than 1 MiB: is it one object a line?"
    )


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b", "\x7f", "\x9b"])
def test_a_control_character_is_refused(tmp_path: Path, character: str) -> None:
    fault = f"holds the control character {character!a}: take it out"
    path = json_lines(tmp_path, {"question": f"a{character}b", "answer": "1"})
    assert refusal(path) == f"{path}, row 1: column 'question' {fault}"
    path = json_lines(tmp_path, {"question": "q", "answer": f"1{character}"})
    assert refusal(path) == f"{path}, row 1: column 'answer' {fault}"
    path = json_lines(tmp_path, {"prompt": "q", "reply": f"a{character}"})
    with pytest.raises(ConfigError, match="column 'reply' holds the control character"):
        Demonstrations(path, prompt="prompt", reply="reply")
    messages = [
        {"role": "user", "content": f"q{character}"},
        {"role": "assistant", "content": "a"},
    ]
    path = json_lines(tmp_path, {"messages": messages})
    with pytest.raises(
        ConfigError, match="column 'messages' holds the control character"
    ):
        Demonstrations(path)


def test_tabs_and_line_breaks_are_no_control_characters(tmp_path: Path) -> None:
    path = json_lines(tmp_path, {"question": "a\tb\r\nc", "answer": "1"})
    assert len(Questions(str(path), judge="exact").tasks()) == 1


def test_one_question_with_two_answers_is_a_conflict(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path,
        {"question": "1 + 1?", "answer": "2"},
        {"question": "q", "answer": "0"},
        {"question": "1 + 1?", "answer": "3"},
    )
    assert refusal(path) == (
        f"{path}, row 1 and {path}, row 3 ask the same question and answer it differently, "
        "'2' and '3': correct one of them"
    )
    assert [
        task.answer
        for task in Questions(path, judge="exact", duplicates="drop").tasks()
    ] == [
        "2",
        "0",
    ]

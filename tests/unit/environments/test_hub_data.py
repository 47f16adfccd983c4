import json
import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fakes.hub import COMMIT, Hub, serve_hub
from support.rigs.completed import python

pytest.importorskip("huggingface_hub")
pyarrow = pytest.importorskip("pyarrow")
files = pytest.importorskip("pyarrow.parquet")

# The clients read their variables when they are imported, so each use is a process of its own.
pytestmark = pytest.mark.process

PROGRAM = """
import json, sys
from slipstream.environments.questions import Questions
from slipstream.core.errors import ConfigError
try:
    asked = Questions(**{"judge": "exact", **json.loads(sys.argv[1])})
except ConfigError as error:
    sys.exit(f"refused: {error}")
print(json.dumps([task.answer or task.row for task in asked.tasks()]))
"""
README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Sums
"""
FENCE = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def rows(first: int, last: int) -> list[dict[str, str]]:
    return [
        {"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(first, last)
    ]


def write_parquet(path: Path, found: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(pyarrow.Table.from_pylist(found), path)


def write_lines(path: Path, found: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    sums = folder / "openai" / "sums"
    write_parquet(sums / "main" / "train-00000-of-00002.parquet", rows(0, 3))
    write_parquet(sums / "main" / "train-00001-of-00002.parquet", rows(3, 5))
    write_parquet(sums / "main" / "test-00000-of-00001.parquet", rows(5, 7))
    write_parquet(sums / "socratic" / "train-00000-of-00001.parquet", rows(7, 8))
    (sums / "README.md").write_text(README)
    write_lines(folder / "some" / "lines" / "train.jsonl", rows(0, 2))
    write_lines(folder / "some" / "lines" / "test.jsonl", rows(2, 3))
    (folder / "some" / "csv").mkdir()
    (folder / "some" / "csv" / "train.csv").write_text("question,answer\n1,1\n")
    with serve_hub(folder) as served:
        yield served


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Callable[..., list[str] | str]:
    """Returns the answers of a data set, or the line that refuses it."""

    def ask(path: str, **settings: object) -> list[str] | str:
        variables = os.environ | {
            "HF_ENDPOINT": str(settings.pop("endpoint", hub.url)),
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": str(int(bool(settings.pop("offline", False)))),
        }
        variables.pop("HF_TOKEN", None)
        done = python(
            PROGRAM, json.dumps({"path": path, **settings}), cwd=tmp_path, env=variables
        )
        refused = [
            line for line in done.stderr.splitlines() if line.startswith("refused: ")
        ]
        assert bool(refused) != (done.returncode == 0), done.stderr
        return (
            refused[0].removeprefix("refused: ") if refused else json.loads(done.stdout)
        )

    return ask


def test_a_function_judges_rows_of_the_hub(
    ask: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def judge(reply, row):\n    return reply == row['answer']\n"
    )
    facts = ask(
        "hf:openai/sums", hub_config="main", hub_split="test", judge="mine:judge"
    )
    assert facts == rows(5, 7)


@pytest.mark.long
def test_splits_and_configs_of_a_data_set_are_read_in_order(ask: Callable) -> None:
    assert ask("hf:openai/sums", hub_config="main") == ["0", "2", "4", "6", "8"]
    assert ask("hf:openai/sums", hub_config="main", hub_split="test") == ["10", "12"]
    assert ask("hf:openai/sums", hub_config="socratic", hub_revision=COMMIT) == ["14"]
    assert ask("hf:some/lines", hub_split="test") == ["4"]


@pytest.mark.long
def test_what_was_read_once_is_read_again_without_a_network(
    ask: Callable, hub: Hub
) -> None:
    read = ask("hf:openai/sums", hub_config="main")
    assert read == ["0", "2", "4", "6", "8"]
    num_requests = len(hub.requests)
    assert ask("hf:openai/sums", hub_config="main", offline=True) == read
    assert len(hub.requests) == num_requests
    # A different split was not read, and is not taken for an empty one.
    answer = ask("hf:some/lines", offline=True)
    assert isinstance(answer, str)
    assert answer.startswith("hf:some/lines")


def test_a_hub_that_does_not_answer_is_one_line(ask: Callable) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        answer = ask("hf:openai/sums", hub_config="main", endpoint=endpoint)
    assert isinstance(answer, str)
    assert answer.startswith("hf:openai/sums is not in ")
    assert f"{endpoint} gives no answer" in answer


def test_what_is_missing_or_gated_is_named_with_what_to_do(
    ask: Callable, hub: Hub
) -> None:
    assert "hf:openai/summs is not at " in ask("hf:openai/summs")
    hub.gated.add("openai/sums")
    answer = ask("hf:openai/sums", hub_config="main")
    assert "hf:openai/sums is gated: accept its terms at" in answer
    assert "hf auth login" in answer
    hub.gated.clear()
    assert ask("hf:openai/sums", hub_config="main", hub_revision="v9") == (
        "hf:openai/sums has no revision 'v9'"
    )
    unnamed = ask("hf:openai/sums")
    assert "main" in unnamed
    assert "socratic" in unnamed
    assert "socratic" in ask("hf:openai/sums", hub_config="maine")
    assert "test" in ask("hf:openai/sums", hub_config="main", hub_split="dev")


def test_files_of_another_format_are_named_with_what_to_do(ask: Callable) -> None:
    assert ask("hf:some/csv") == (
        "hf:some/csv has no parquet or JSON lines for split 'train': "
        "write it as parquet and give the file as path"
    )


@pytest.mark.long
def test_the_data_set_on_the_page_is_read(ask: Callable, hub: Hub) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "questions.md"
    (shown,) = [text for text in FENCE.findall(page.read_text()) if "hf:" in text]
    table = tomllib.loads(shown)
    (trained,), (evaluated,) = table["environments"], table["evaluations"]
    folder = hub.folder / "openai" / "sums"
    folder.rename(hub.folder / "openai" / "gsm8k")
    assert ask(**trained["args"]) == ["0", "2", "4", "6", "8"]
    assert ask(**evaluated["args"]) == ["10", "12"]


def test_settings_of_the_hub_are_for_names_on_the_hub(ask: Callable) -> None:
    assert ask("data.jsonl", hub_split="test") == (
        "hub_config, hub_split and hub_revision are for hf: names, got 'data.jsonl'"
    )

"""The files and commands of docs/guides/demonstrations.md."""

from pathlib import Path

import pytest
from slipstream.client.environment_loader import load_environment
from support.fakes.page_reader import BLOCK, Reader
from support.rigs.completed import completed
from support.rigs.run_processes import PROGRAM, check_ledger, summary_of

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "demonstrations.md"
GOES_ON = "slipstream run deploy/configs/quickstart.toml"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_survives")
def test_every_command_of_the_page_works(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    lines = PAGE.read_text().splitlines(keepends=True)
    (second,) = (line for line in lines if line.startswith(GOES_ON))
    page = tmp_path / "page.md"
    page.write_text("".join(line for line in lines if line is not second))
    Reader(page, tmp_path, 6).go()
    summary = summary_of(tmp_path / "runs" / "supervised")
    assert (summary["steps"], summary["reward_last"]) == (6, 1.0)
    check_ledger(summary)
    # The next run would begin with the model that this one has made.
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    arguments = second.split()[1:]
    done = completed([PROGRAM, *arguments, "--dry-run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_environment_of_the_page_gives_its_replies(tmp_path: Path) -> None:
    (code,) = (block[2] for block in BLOCK.finditer(PAGE.read_text()) if block[1] == "python")
    (tmp_path / "echoes.py").write_text(code)
    environment = load_environment("echoes:Echoes", "{}", str(tmp_path))
    assert environment.reset("b").reply == "b b"  # type: ignore[union-attr]
    assert environment.step("b b").reward == 1.0  # type: ignore[union-attr, arg-type]

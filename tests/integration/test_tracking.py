"""Trackers in a whole run of the controller, with servers that compute nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from support.rigs import tools
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import rows_of
from support.rigs.waiting import LIMIT_S


async def test_all_trackers_at_once_take_every_step_and_the_evaluations(
    tmp_path, monkeypatch
):
    tools.add_packages("trackers", monkeypatch)
    for package in ("wandb", "tensorboard", "mlflow", "sqlalchemy"):
        pytest.importorskip(package, reason=f"{package} is not installed: {tools.HOW}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config(
        tmp_path,
        {"name": "held", "num_episodes": 4},
        run__steps=3,
        tracking__trackers=["tensorboard", "wandb", "mlflow"],
        tracking__project="p",
        controller__sample_every_steps=1,
    )
    summary = await play(config)
    assert summary["code"] == 0
    run_ids = json.loads((config.run_dir / "tracking.json").read_text())
    assert set(run_ids) == {"wandb", "mlflow"}

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{config.run_dir}/mlflow.db")
    rewards = client.get_metric_history(run_ids["mlflow"], "reward_mean")
    assert [metric.step for metric in rewards] == [1, 2, 3]
    tables = sorted((config.run_dir / "mlartifacts").glob("*/artifacts/samples/*.json"))
    assert [table.name for table in tables] == [
        f"step-00000{step}.json" for step in (1, 2, 3)
    ]
    table = json.loads(tables[2].read_text())
    assert table["data"] and {len(row) for row in table["data"]} == {
        len(table["columns"])
    }
    heldout = client.get_metric_history(run_ids["mlflow"], "held/pass_at_1")
    assert [metric.step for metric in heldout] == [0, 3]
    (offline,) = (config.run_dir / "wandb").glob(
        f"offline-run-*-{run_ids['wandb']}/*.wandb"
    )
    assert offline.read_bytes().count(b"held/reward_mean") >= 2
    assert len(list(offline.parent.glob("files/media/table/samples_*.table.json"))) == 3


def other_package(folder: Path, source: str, group: str, entry: str) -> Path:
    """A package of somebody else, as pip installs it: a module and its metadata."""
    info = folder / "strange-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "strange.py").write_text(source)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return folder


TRACKER = """
import json

from pydantic import BaseModel, Field


class Table(BaseModel, extra="forbid"):
    digits: int = Field(2, ge=1)


class Lines:
    def __init__(self, config, folder, ids):
        self.digits = Table.model_validate(config.extensions["x"]).digits
        self.file = (folder / f"{config.run.name}.jsonl").open("a")

    def log(self, step, values):
        self.file.write(json.dumps([step, round(values["reward_mean"], self.digits)]) + "\\n")

    def samples(self, step, episodes, groups):
        pass

    def close(self):
        self.file.close()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = other_package(
        tmp_path / "other", TRACKER, "slipstream.trackers", "x=strange:Lines"
    )
    with (package / "strange-1.0.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[slipstream.settings]\nx=strange:Table\n")
    monkeypatch.syspath_prepend(package)
    monkeypatch.delitem(sys.modules, "strange", raising=False)


@pytest.mark.usefixtures("package")
async def test_a_tracker_of_another_package_takes_the_rows_as_its_table_says(
    tmp_path,
) -> None:
    table = {"digits": 3}
    config = make_config(
        tmp_path, run__steps=3, tracking__trackers=["x"], extensions__x=table
    )
    summary = await play(config)
    assert (summary["code"], summary["steps"]) == (0, 3)
    message = (config.run_dir / f"{config.run.name}.jsonl").read_text().splitlines()
    expected = [
        [row["step"], round(row["reward_mean"], 3)] for row in rows_of(config.run_dir)
    ]
    assert list(map(json.loads, message)) == expected


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"extensions__x": {"digits": 0}},
            "extensions.x.digits: Input should be greater than or equal to 1",
        ),
        (
            {"extensions__x": {"colour": "red"}},
            "extensions.x.colour: Extra inputs are not permitted",
        ),
        ({"extensions__y": {}}, "extensions.y is a table of no installed package"),
    ],
)
def test_a_wrong_table_of_another_package_is_refused(tmp_path, table, message) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make_config(tmp_path, **table)


STORAGE = """
from fsspec.implementations.local import LocalFileSystem


class Shelf(LocalFileSystem):
    protocol = "shelf"

    def __init__(self, **options):
        super().__init__(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("shelf://"))
"""
READ = """
import sys
import threading
from slipstream.extensions.stored_weights.storage import Storage, Until

storage, until = Storage(sys.argv[1]), Until(20.0, threading.Event())
storage.write("run/a", memoryview(b"weights"), until)
print(storage.read("run/a", until, most=7).decode(), storage.keys("run", until))
"""


def test_a_storage_of_another_package_keeps_versions(
    tmp_path: Path, monkeypatch
) -> None:
    package = other_package(
        tmp_path / "other", STORAGE, "fsspec.specs", "shelf=strange.Shelf"
    )
    monkeypatch.setenv("PYTHONPATH", str(package))
    (tmp_path / "shelf").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", READ, f"shelf://{tmp_path / 'shelf'}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout == "weights ['run/a']\n", done.stderr

"""Folders of the policy that are written beside training, and which of them stay."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from slipstream.core.errors import CheckpointError
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.weights.periodic_export import PeriodicExport
from slipstream.learner.trainer.weights.run_chat import RunChat
from slipstream.protocol.checkpoints import FileEntry, check_files
from support.fakes.small_configs import small_config
from support.ranks.thread_ranks import ThreadRanks, run_ranks
from support.rigs.crashes import crashing_at

NAME = "model.norm.weight"


class OneTensor:
    """A policy of one tensor, which every rank exports, and the memory that holds it."""

    dtype = torch.float32
    vocab_size = 4
    drafts = None

    def __init__(self, ranks: ThreadRanks) -> None:
        self.ranks = ranks
        self.memory = self
        self.bridge = self
        dense = SimpleNamespace(num_moe_experts=None)
        self.chunks = [SimpleNamespace(config=dense)]
        self.weight = torch.zeros(4)

    @contextlib.contextmanager
    def resident(self, *parts: object) -> Iterator[None]:
        yield

    def gather_parameters(self) -> None:
        """All of it is here."""

    def export_hf_weights(
        self,
        *args: object,
        **options: object,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield NAME, self.weight


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    settings = {"num_hidden_layers": 1, "hidden_size": 4}
    text = json.dumps(settings)
    (model / "config.json").write_text(text)
    return small_config(
        model={"path": str(model)},
        run={
            "name": "r",
            "steps": 30,
            "dir": str(tmp_path),
        },
        checkpoint={
            "export_every": 2,
            "keep_exports": 2,
        },
    )


def train(
    config: Config, steps: range, *, num_ranks: int = 2, incarnation: int = 0
) -> None:
    """Exports after each of `steps`, as a trainer of `num_ranks` ranks does; weights are steps."""

    def work(ranks: ThreadRanks) -> None:
        policy = OneTensor(ranks)
        exports = PeriodicExport(config, policy, RunChat())
        for step in steps:
            policy.weight.fill_(step)
            version = PolicyVersion(incarnation, step)
            exports.export(version, bytes([step, incarnation]))
            # The next step changes the weights while they are written.
            policy.weight.fill_(-1)
            exports.poll()
        exports.finish()

    run_ranks(num_ranks, work)


def weights_in(config: Config) -> dict[str, float]:
    """The value of the tensor in each folder there is, by the folder's name."""
    folders = sorted((config.run_dir / "exports").iterdir())
    values = {}
    for folder in folders:
        tensors = load_file(folder / "model.safetensors")
        (value,) = tensors[NAME].unique()
        values[folder.name] = value.item()
    return values


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_due_version_has_a_folder_of_its_own_weights(
    config: Config, num_ranks: int
) -> None:
    train(config, range(6), num_ranks=num_ranks)
    assert weights_in(config) == {"step-000002": 2.0, "step-000004": 4.0}
    folder = config.run_dir / "exports" / "step-000004"
    text = (folder / "slipstream-version.json").read_text()
    assert json.loads(text) == {
        "version": 4,
        "incarnation": 0,
        "weight_digest": "0400",
    }
    text = (folder / "slipstream-manifest.json").read_text()
    entries = json.loads(text)["files"]
    names = {entry["path"] for entry in entries}
    assert names == {"config.json", "model.safetensors", "slipstream-version.json"}


def test_the_newest_versions_stay(config: Config) -> None:
    train(config, range(11))
    assert list(weights_in(config)) == ["step-000008", "step-000010"]


def test_a_run_that_goes_on_writes_no_folder_twice_and_none_is_missing(
    config: Config,
) -> None:
    train(config, range(5))
    exports = config.run_dir / "exports"
    path = exports / "step-000004" / "model.safetensors"
    written = path.stat()
    # A kill while version 6 was written; the run goes on from version 3.
    partial = exports / "step-000006.partial"
    partial.mkdir()
    (partial / "shard-0.safetensors").touch()
    train(config, range(3, 7))
    assert weights_in(config) == {"step-000004": 4.0, "step-000006": 6.0}
    assert path.stat() == written


def test_a_folder_of_weights_that_were_made_again_is_replaced(config: Config) -> None:
    train(config, range(3))
    train(config, range(2, 3), incarnation=1)
    path = config.run_dir / "exports" / "step-000002" / "slipstream-version.json"
    assert json.loads(path.read_text())["incarnation"] == 1


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(
    config: Config,
) -> None:
    (config.run_dir / "exports").mkdir(parents=True)
    (config.run_dir / "exports" / "step-000002").touch()
    with pytest.raises(CheckpointError, match="the disk of .*exports failed"):
        train(config, range(3))


def test_nothing_is_written_unless_it_is_asked_for(config: Config) -> None:
    table = config.model_dump(mode="json", exclude_none=True)
    table["checkpoint"]["export_every"] = 0
    train(Config.model_validate(table), range(5))
    assert not (config.run_dir / "exports").exists()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_whole_folders(config: Config) -> None:
    exports = config.run_dir / "exports"
    # The removal of the oldest folder is the last of them.
    for change in itertools.count():
        shutil.rmtree(exports, ignore_errors=True)
        ended = crashing_at(change, lambda: train(config, range(8), num_ranks=1))
        for path in exports.iterdir() if exports.exists() else ():
            if path.name.endswith(".partial"):
                continue
            manifest = json.loads((path / "slipstream-manifest.json").read_bytes())
            check_files(path, map(FileEntry.model_validate, manifest["files"]))
        train(config, range(8), num_ranks=1)
        values = weights_in(config)
        assert values["step-000006"] == 6.0
        assert len(values) <= 3
        if ended:
            assert values == {"step-000004": 4.0, "step-000006": 6.0}
            assert change >= 3 + 5
            return

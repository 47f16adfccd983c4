"""A run removes batches that no resume needs, and goes on from each checkpoint that it keeps."""

import shutil
from pathlib import Path

from slipstream.client.run_folder import write_config
from slipstream.client.verify import examine, run_verify
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.records.journal import batch_path
from slipstream.protocol.checkpoints import publish_and_retain, read_manifest
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.small_checkpoints import written_checkpoint
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of

STEPS = 6


class SavingTrainer(FakeTrainer):
    """Keeps two checkpoints in the run's folder, with what it needs to begin with one."""

    def __init__(self, config: Config, *, begins_with: Path | None = None) -> None:
        super().__init__(config.controller.address, checkpoint_every=2)
        self._folder = config.run_dir / "checkpoints"
        if begins_with is not None:
            self.version = PolicyVersion(0, int(begins_with.name[-6:]))
            manifest = read_manifest(begins_with)
            self.digest = bytes.fromhex(manifest.weight_digest)

    async def _save(self) -> None:
        step = self.version.step
        partial = written_checkpoint(
            self._folder, step, weight_digest=self.digest.hex()
        )
        publish_and_retain(partial, keep_last=2, keep_every=0)
        await super()._save()


def config_of(folder: Path, *, steps: int = STEPS, **changes) -> Config:
    changes = {"checkpoint__keep_batches": False, "run__steps": steps, **changes}
    return make_config(folder, **changes)


def kept(config: Config) -> list[str]:
    return sorted(
        path.name for path in (config.run_dir / "journal" / "batches").iterdir()
    )


async def test_the_run_goes_on_from_the_oldest_checkpoint_that_it_keeps(
    tmp_path: Path, capsys
):
    config = config_of(tmp_path)
    summary = await play(config, trainer=SavingTrainer(config))
    assert (summary["code"], summary["steps"]) == (0, STEPS)
    assert kept(config) == ["step-000004.pb", "step-000005.pb"]
    message = "batches were removed, which no resume needs (checkpoint.keep_batches)"
    assert [line for line in summary["told"] if message in line] == [f"2 {message}"] * 2
    assert run_verify(config.run_dir) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    message = "not checked: the first 4 batches, which checkpoint.keep_batches = false has removed"
    assert line.endswith(f"; {message}; faults: 0")
    # The newest one is lost.
    checkpoints = config.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "step-000004",
        "step-000006",
    ]
    shutil.rmtree(checkpoints / "step-000006")
    more = config_of(tmp_path, steps=STEPS + 2)
    trainer = SavingTrainer(more, begins_with=checkpoints / "step-000004")
    summary = await play(more, trainer=trainer)
    assert (summary["code"], summary["steps"]) == (0, STEPS + 2)
    versions = [
        tuple(record["version"]) for record in records_of(config.run_dir, "step")
    ]
    assert versions == [(0, step) for step in range(1, STEPS + 3)]


async def test_a_trainer_that_brings_other_weights_than_recorded_needs_no_removed_batch(
    tmp_path,
):
    config = config_of(tmp_path)
    await play(config, trainer=SavingTrainer(config))
    more = config_of(tmp_path, steps=STEPS + 1)
    # A checkpoint that was whole late: other weights than those that the journal has of version 4.
    late = config.run_dir / "checkpoints" / "step-000004"
    trainer = SavingTrainer(more, begins_with=late)
    trainer.digest = bytes(16)
    # The manifests of these checkpoints are all of incarnation 0.
    await play(more, trainer=trainer, is_damaged=True)
    steps = records_of(config.run_dir, "step")
    step = next(record for record in steps if record["digest"] == bytes(16).hex())
    assert (step["step"], step["version"]) == (3, [1, 4])
    assert (
        step["lags"]
        == next(record for record in steps if record["step"] == 3)["lags"]
        != []
    )


async def test_a_batch_that_the_run_did_not_remove_is_a_fault(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    await play(config, trainer=SavingTrainer(config))
    message = "files of {} batches are missing, of the steps [0, 1, 2, 3{}]"
    checkpoint = config.checkpoint.model_copy(update={"keep_batches": True})
    write_config(config.model_copy(update={"checkpoint": checkpoint}), config.run_dir)
    assert examine(config.run_dir).faults == [message.format(4, "")]
    write_config(config, config.run_dir)
    assert examine(config.run_dir).faults == []
    # The run removes the oldest ones, without a gap.
    batch_path(config.run_dir / "journal", 5).unlink()
    assert examine(config.run_dir).faults == [message.format(5, ", 5")]


async def test_a_folder_that_lets_nothing_be_removed_is_told(
    tmp_path: Path, monkeypatch
) -> None:
    config = config_of(tmp_path)

    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".pb":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    summary = await play(config, trainer=SavingTrainer(config))
    assert (summary["code"], summary["steps"], len(kept(config))) == (0, STEPS, STEPS)
    path = batch_path(config.run_dir / "journal", 0)
    assert f"{path} cannot be removed: Permission denied" in summary["told"]

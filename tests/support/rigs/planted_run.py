"""A whole run of fakes, and copies of it in which somebody changes records and files."""

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from slipstream.client.run_folder import write_config
from slipstream.client.verify import examine
from slipstream.learner.controller.records.journal import batch_path, encoded
from slipstream.learner.controller.reporting.file_digests import file_digests
from slipstream.v1 import trainer_pb2

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.batch_messages import stored_batch, write_stored
from support.rigs.controller_runs import make_config, play

STEPS = 6


def make_whole_run(folder: Path) -> Path:
    """The folder of a run that nothing harmed."""
    config = make_config(
        folder,
        {"name": "held", "num_episodes": 4},
        run__steps=STEPS,
        controller__sample_every_steps=1,
    )
    server = FakeServer(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    summary = asyncio.run(play(config, server, trainer=trainer))
    assert summary["state"] == "finished"
    write_config(config, config.run_dir)
    return config.run_dir


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Planted:
    """A copy of a run, in which somebody changes records and files."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(run, folder / "r"))
        self.log = self.folder / "journal" / "journal.log"
        self.records = [
            json.loads(line[9:]) for line in self.log.read_bytes().splitlines()
        ]
        for record in self.records:
            del record["line"]

    def one(self, kind: str, step: int = 2) -> dict:
        return next(
            r
            for r in self.records
            if r["kind"] == kind
            and r.get(
                "step",
                step,
            )
            == step
        )

    def change_batch(
        self, step: int, change: Callable[[trainer_pb2.RecordedBatch], object]
    ) -> None:
        """Changes a batch and its record, as a controller with a bug would have written both."""
        path = batch_path(self.log.parent, step)
        batch = self.batch(step)
        change(batch)
        self.one("batch", step)["crc32"] = write_stored(path, batch)

    def batch(self, step: int) -> trainer_pb2.RecordedBatch:
        return stored_batch(self.log.parent, self.one("batch", step))

    def replace(self, name: str, pattern: str, text: str) -> None:
        """Changes the first match in a file."""
        path = self.folder / name
        changed, number = re.subn(
            pattern,
            text,
            path.read_text(),
            count=1,
        )
        assert number == 1
        path.write_text(changed)

    def write(self) -> None:
        lines = [
            encoded(number, record)
            for number, record in enumerate(
                self.records,
                start=1,
            )
        ]
        self.log.write_bytes(b"".join(lines))

    def sign(self) -> None:
        """Gives the summary the digests of the present files, as the end of the run would."""
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text())
        del summary["digest"]
        summary["files"] = file_digests(self.folder, print)
        content = json.dumps(summary, sort_keys=True).encode()
        summary["digest"] = digest_of(content)
        path.write_text(f"{json.dumps(summary, indent=2)}\n")

    def faults(self) -> list[str]:
        self.write()
        return examine(self.folder).faults

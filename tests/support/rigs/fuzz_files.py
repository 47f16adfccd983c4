"""Readers of files that a run leaves, or that are given to it, to be fuzzed."""

import copy
import functools
import json
import math
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from slipstream.client.page import write_page
from slipstream.client.run_folder import check_run_folder
from slipstream.client.verify import examine
from slipstream.core.configuration.config_file import dump_config, load_config
from slipstream.core.errors import CheckpointError, ConfigError, ProtocolError
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.learner.controller.application import begin
from slipstream.learner.controller.records.journal import (
    Journal,
    batch_path,
    read_batch,
)
from slipstream.learner.controller.run import ControlledRun
from slipstream.protocol.checkpoints import MANIFEST_NAME, read_manifest
from slipstream.v1 import trainer_pb2

from support.fakes.journal_records import batch_record, lease_record
from support.fakes.named_channel import RUN_ID
from support.references.page_data import given_of
from support.rigs.batch_messages import in_one_message
from support.rigs.controller_runs import make_config
from support.rigs.fuzz_calls import honest_trajectory, honest_tree
from support.rigs.fuzz_readers import Reader
from support.rigs.fuzzing import mutated

EMPTY = {
    "crc32": zlib.crc32(trainer_pb2.RecordedBatch().SerializeToString()),
    "trajectories": 0,
}
# Records of a short run, as a controller writes them.
RECORDS = (
    {"kind": "start", "format": 1, "run_id": RUN_ID, "key": "ab" * 32, "unix_s": 1.0},
    {"kind": "queue", "added": 1},
    {"kind": "submitted", "environment": "new", "spec": "{}"},
    *(lease_record(f"g{number:06d}", number, seed=3) for number in range(4)),
    {"kind": "evaluation_lease", "group": "e1-000000", "server": "s", "epoch": 7},
    {
        "kind": "end",
        "id": "g000000.0.0.7",
        "end": "failed",
        "cause": "x",
        "tokens": 5,
        "server": "s",
        "epoch": 7,
    },
    {"kind": "gave_up", "group": "g000003", "members": [1], "cause": "x"},
    {
        "kind": "closed",
        "group": "g000001",
        "how": "filtered",
        "solved": True,
        "reward": 1.0,
    },
    {"kind": "set_aside", "group": "g000002", "task": 2, "cause": "x", "blamed": False},
    batch_record(0, "g000000", "g000003", **EMPTY, tokens=[["s", 7, 9]]),
    {
        "kind": "batch_set_aside",
        "step": 0,
        "batch_id": "b000000",
        "by": "trainer",
        "cause": "x",
        "groups": [["g000000", "e", 0]],
        "put_back": [["g000003", "e", 3, 3]],
        "ids": ["g000000.0.0.7"],
        "tokens": 4,
        "put_back_trajectories": 1,
        "put_back_tokens": [["s", 7, 5]],
    },
    batch_record(0, "g000003", **EMPTY, batch_id="b000000-1", tokens=[["s", 7, 5]]),
    {
        "kind": "step",
        "step": 0,
        "version": [0, 1],
        "digest": "ab",
        "lags": [[0, 9]],
        "several": 0,
    },
    {"kind": "servers", "generated": [["s", 7, 20]]},
    {"kind": "servers", "generated": [["s", 7, 21]], "departed": True},
    {"kind": "checkpoint", "version": [0, 1]},
    {
        "kind": "evaluation",
        "version": 1,
        "episodes": 2,
        "failed": 0,
        "reward_mean": 0.5,
    },
    {"kind": "head_start", "environment": "new", "head_start": 2.5},
    {"kind": "unsubmitted", "environment": "new"},
)
VALUES = (
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "g000009",
    "zz",
    [],
    [1],
    [0, 1],
    {},
    {"a": 1},
)
NUMBERS = (1e308, -1e308, 5e-324, 10**400, math.nan, math.inf, -math.inf)


def journal_bytes(records: list[dict]) -> bytes:
    """A journal whose checksums and line numbers are right."""
    lines = []
    for number, record in enumerate(records, start=1):
        text = json.dumps({"line": number, **record}).encode()
        lines.append(b"%08x %s\n" % (zlib.crc32(text), text))
    return b"".join(lines)


def _journal(honest: bytes, draw: random.Random) -> bytes:
    """Records that are whole and say something else."""
    records = [json.loads(line[9:]) for line in honest.splitlines()]
    for record in records:
        del record["line"]
    for _ in range(draw.choice((1, 1, 2))):
        record = draw.choice(records)
        name = draw.choice(list(record))
        match draw.randrange(4):
            case 0:
                del record[name]
            case 1:
                records.remove(record)
            case 2:
                records.insert(draw.randrange(len(records) + 1), dict(record))
            case _:
                record[name] = copy.copy(draw.choice(VALUES))
        if not records:
            break
        records = [record for record in records if record]
    return journal_bytes(records)


def _read_journal(data: bytes, folder: Path) -> object:
    """What a controller does with the journal of a run that it takes over."""
    journal = folder / "run" / "journal"
    # Logs of earlier readings would fence this one: its records would not be read.
    shutil.rmtree(journal, ignore_errors=True)
    journal.mkdir(parents=True)
    (journal / "journal.log").write_bytes(data)
    with Journal(journal) as opened:
        run = ControlledRun(config_of(folder), "r")
        return begin(opened, journal, run).version


def changed_table(honest: bytes, draw: random.Random) -> bytes:
    """JSON in which values are others, or gone."""
    values = json.loads(honest)
    for _ in range(draw.choice((1, 2))):
        place = values
        while draw.random() < 0.5:
            inner = place.values() if isinstance(place, dict) else place
            below = [part for part in inner if isinstance(part, dict | list) and part]
            if not below:
                break
            place = draw.choice(below)
        names = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not names:
            continue
        name = draw.choice(names)
        if draw.random() < 0.3:
            del place[name]
        else:
            place[name] = copy.copy(draw.choice(VALUES + NUMBERS))
    if draw.random() < 0.05:
        return b"[" * 100_000
    return json.dumps(
        values if draw.random() < 0.9 else copy.copy(draw.choice(VALUES))
    ).encode()


def file_reader(
    name: str, read: Callable[[Path], object]
) -> Callable[[bytes, Path], object]:
    """Writes the bytes to a file of that name and reads its folder."""

    def reading(data: bytes, folder: Path) -> object:
        path = folder / "files" / name
        # A reader may have renamed the files before.
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        return read(path)

    return reading


def shown_page(path: Path) -> object:
    out = path.parent / "page.html"
    write_page([path.parent], out, period_s=0)
    # No browser reads NaN.
    return json.dumps(given_of(out), allow_nan=False)


SETTINGS = "[algorithm]\nmax_staleness = 2\ngroup_size = 4\ngroups_per_step = 2\n"


def examined(path: Path) -> object:
    """What `slipstream verify` finds in a folder with this file, and settings if it is another."""
    if path.name != "config.toml":
        (path.parent / "config.toml").write_text(SETTINGS)
    if path.name == "journal.log":
        (path.parent / "journal").mkdir()
        path = path.rename(path.parent / "journal" / path.name).parent
    return examine(path.parent).faults


@functools.cache
def config_of(folder: Path) -> Config:
    """The settings of a run that lies in the folder where files are read."""
    return make_config(folder, run__name="files")


def _read_batch(data: bytes, folder: Path) -> object:
    path = batch_path(folder, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return in_one_message(read_batch(folder, 0, zlib.crc32(data)))


def _resumed(path: Path) -> object:
    """What the command does with the summary of a run that may have ended."""
    config = config_of(path.parents[1])
    (path.parent / "journal").mkdir(exist_ok=True)
    (path.parent / "journal" / "journal.log").write_bytes(b"x")
    path.with_name("config.toml").write_text(dump_config(config))
    return check_run_folder(config)


def file_readers() -> list[Reader]:
    """Readers of files that a run leaves, or that are given to it."""
    manifest = {
        "format": 1,
        "incarnation": 0,
        "step": 3,
        "weight_digest": "ab",
        "config_digest": "cd",
        "layout": dict.fromkeys(("world_size", "tp", "pp", "cp", "ep", "etp"), 1)
        | {"vpp": None, "distributed_optimizer": False},
        "models": ["policy"],
        "packages": {"torch": "2"},
        "saved_unix_s": 1.0,
        "files": [{"path": "a", "num_bytes": 3, "digest": "ef"}],
    }
    row = {"step": 1.0, "wall_s": 2.0, "reward_mean": None}
    summary = {"state": "finished", "steps": 3, "cause": "x"}
    model = {
        "model_type": "qwen3",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 9,
    }
    read = _read_journal
    plain = (ConfigError,)
    return [
        Reader(
            "journal",
            (journal_bytes(list(RECORDS)),),
            read,
            (ProtocolError, ConfigError),
            _journal,
        ),
        *(
            Reader(f"verify {name}", (text,), file_reader(name, examined), (), make)
            for name, text, make in (
                ("journal.log", journal_bytes(list(RECORDS)), _journal),
                ("metrics.jsonl", json.dumps(row).encode() + b"\n", mutated),
                ("summary.json", json.dumps(summary).encode(), changed_table),
                (
                    "config.toml",
                    dump_config(config_of(Path("somewhere"))).encode(),
                    mutated,
                ),
            )
        ),
        Reader(
            "batch",
            (
                trainer_pb2.RecordedBatch().SerializeToString(),
                honest_trajectory(),
                honest_tree(),
            ),
            _read_batch,
            (ProtocolError,),
        ),
        Reader(
            "manifest",
            (json.dumps(manifest).encode(),),
            file_reader(MANIFEST_NAME, lambda path: read_manifest(path.parent)),
            (CheckpointError,),
            changed_table,
        ),
        Reader(
            "config.toml",
            (dump_config(config_of(Path("somewhere"))).encode(),),
            file_reader("config.toml", load_config),
            plain,
        ),
        Reader(
            "summary of a run",
            (json.dumps(summary).encode(),),
            file_reader("summary.json", _resumed),
            plain,
            changed_table,
        ),
        *(
            Reader(f"page {name}", (text,), file_reader(name, shown_page), (), make)
            for name, text, make in (
                ("summary.json", json.dumps(summary).encode(), changed_table),
                ("metrics.jsonl", json.dumps(row).encode() + b"\n", mutated),
            )
        ),
        Reader(
            "model",
            (json.dumps(model).encode(),),
            file_reader("config.json", lambda path: read_model_sizes(path.parent)),
            plain,
            changed_table,
        ),
    ]

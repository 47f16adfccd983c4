"""Readers of the results that a run leaves, to be fuzzed: rows, episodes, trackers' ids."""

import json
import random
from pathlib import Path

# Not within the time of a reading.
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.trackers import COLUMNS, RunIds, Trackers
from slipstream.v1 import status_pb2

from support.rigs.fuzz_files import changed_table, config_of, file_reader, shown_page
from support.rigs.fuzz_readers import Reader

# Numbers of a step of which the controller adds up, counts or compares something.
OTHER_COLUMNS = (
    "logprob_gap_tokens",
    "logprob_gap_mean",
    "logprob_gap_max",
    "servers_serving",
    "training_s",
    "waiting_s",
    "publish_s",
    "export_s",
    "model_flops",
    "trainer_rss_bytes",
    "e/equal_rewards_fraction",
    "e/reward",
)


def json_lines(*tables: dict) -> bytes:
    """A file with a line for each."""
    return b"".join(json.dumps(table).encode() + b"\n" for table in tables)


def _lines(honest: bytes, draw: random.Random) -> bytes:
    """JSON lines, one or two of which have other values, are gone, or are there twice."""
    lines = honest.splitlines()
    for _ in range(draw.choice((1, 2))):
        number = draw.randrange(len(lines))
        match draw.randrange(6):
            case 0 if len(lines) > 1:
                del lines[number]
            case 1:
                lines.insert(draw.randrange(len(lines) + 1), lines[number])
            case _ if lines[number].startswith(b"{"):
                lines[number] = changed_table(lines[number], draw)
    return b"\n".join(lines) + b"\n" * (draw.random() < 0.8)


def _recorded(path: Path) -> object:
    """What a controller makes of the results of the start before, up to its own summary."""
    config = config_of(path.parents[1])
    events = EventLog()
    recorder = RunRecorder(path.parent, config, Trackers({}, events.add), None, events)
    assert recorder.has_row(1) in (True, False)
    summary = recorder.summary(
        ledger=status_pb2.Ledger(),
        state=RunState(),
        publish={},
        weight_digest="",
        journal_lines=0,
        files={},
        ending={"state": "finished", "cause": "x", "suspended_environments": {}},
    )
    # The part that others read has neither NaN nor infinity.
    json.dumps(summary, allow_nan=False)
    recorder.close()
    assert all("\n" not in event.text for event in events.kept())
    return summary


def _tracked(path: Path) -> object:
    """The ids under which trackers go on, and what the next start finds."""
    messages: list[str] = []
    ids = RunIds(path.parent, messages.append)
    run_ids = [ids.get(name) for name in ("wandb", "mlflow")]
    assert all(run_id.isprintable() for run_id in run_ids)
    ids.keep("wandb", run_ids[0] or "new")
    assert RunIds(path.parent, messages.append).get("wandb") == (run_ids[0] or "new")
    assert all("\n" not in line for line in messages)
    return run_ids


def result_readers() -> list[Reader]:
    """Readers of files that decide nothing: whatever they hold, a run goes on."""
    sampled = {
        "step": 1,
        "trajectory_id": "g000001.0.0.7",
        "environment": "e",
        "task_index": 3,
        "prompt": "a",
        "reply": "b",
        "reward": 0.5,
        "status": "completed",
        "sampled_tokens": 5,
        "versions": [[5, "0"]],
        "metrics": {"right": 1.0},
    }
    numbers = dict.fromkeys((*COLUMNS, *OTHER_COLUMNS), 1.0)
    rows = [
        {**numbers, "step": float(step), "wall_s": 2.0 + step} for step in range(1, 14)
    ]
    rows.insert(
        3,
        {"evaluation_step": 3, "wall_s": 5.0, "num_episodes": 2, "reward_heldout": 0.5},
    )
    episodes = json_lines(sampled, sampled | {"step": 2})
    return [
        Reader(
            "page trajectories.jsonl",
            (episodes,),
            file_reader("trajectories.jsonl", shown_page),
            (),
            _lines,
        ),
        *(
            Reader(f"results {name}", (text,), file_reader(name, _recorded), (), _lines)
            for name, text in (
                ("metrics.jsonl", json_lines(*rows)),
                ("trajectories.jsonl", episodes),
            )
        ),
        Reader(
            "tracking.json",
            (b'{"wandb": "ab", "mlflow": "cd"}\n',),
            file_reader("tracking.json", _tracked),
            (),
            changed_table,
        ),
    ]

"""What a stranger may change in a run's files so that a reader sees other results.

Each change is of one file, as somebody makes it who knows no more than its text. Checksums of lines
and of batches are made right again where that is easy.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slipstream.protocol.checkpoints import write_export_manifest
from support.rigs.planted_run import Planted, make_whole_run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def planted(whole_run: Path, tmp_path: Path) -> Planted:
    return Planted(whole_run, tmp_path)


def change_row(
    planted: Planted, name: str, change: Callable[[dict], object], *, place: int
) -> None:
    """Changes the row at a place of a file of JSON lines."""
    path = planted.folder / name
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[place])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_place(planted: Planted) -> int:
    """The place of the row of step 3."""
    lines = (planted.folder / "metrics.jsonl").read_text().splitlines()
    return next(
        place for place, line in enumerate(lines) if json.loads(line).get("step") == 3
    )


# Columns of metrics.jsonl that follow from the batch of their step.
COLUMNS = (
    "reward_mean",
    "reward_std",
    "reward_min",
    "reward_max",
    "lag_mean",
    "lag_max",
    "trajectories_with_several_versions",
    "num_tokens",
    "prompt_tokens_mean",
    "reply_tokens_mean",
    "reply_tokens_max",
    "episode_tokens_mean",
    "episode_tokens_max",
    "turns_mean",
    "branches_mean",
    "truncated_fraction",
    "generation_s_mean",
    "environment_s_mean",
    "missing_members",
    "equal_rewards_fraction",
)


@pytest.mark.parametrize("column", [*COLUMNS, "e/reward"])
@pytest.mark.parametrize("how", ["raised", "removed"])
def test_a_changed_column_of_a_step_is_found(
    planted: Planted, column: str, how: str
) -> None:
    place = step_place(planted)
    lines = (planted.folder / "metrics.jsonl").read_text().splitlines()
    names = json.loads(lines[place]).keys()
    name = column
    if column == "e/reward":
        name = next(name for name in names if name.endswith("/reward"))
        if how == "removed":
            pytest.skip("the environments of a step are those of its batch")

    def change(row: dict) -> None:
        if how == "removed":
            del row[name]
        else:
            row[name] += 0.5

    change_row(planted, "metrics.jsonl", change, place=place)
    message = "metrics.jsonl has" if how == "raised" else "metrics.jsonl lacks"
    assert [
        text for text in planted.faults() if message in text and "at step 3" in text
    ]


# Values of summary.json that follow from journal, batches and rows, and others in their place.
SUMMARY: dict[str, Any] = {
    "state": "failed",
    "cause": "a fault",
    "steps": 9,
    "reward_first": 0.99,
    "reward_last": 0.99,
    "reward_steps": 99,
    "reward_heldout": 0.99,
    "reward_heldout_first": 0.99,
    "reward_heldout_step": 99,
    "reward_heldout_first_step": 99,
    "evaluations": {},
    "max_staleness": 9,
    "max_lag_seen": 7,
    "tokens_by_lag": {"0": 1},
    "trajectories_with_several_versions": 99,
    "generated_tokens": 1,
    "trained_tokens": 1,
    "filtered_groups": 99,
    "set_aside_batches": 99,
    "gradient_overflows": 99,
    "logprob_gap_tokens": 99.0,
    "logprob_gap_max": 0.5,
    "logprob_gap_mean": 0.5,
    "weight_digest": "00",
    "journal_lines": 10_000,
    "time": {"trainer": {"training": 0.99}},
}


@pytest.mark.parametrize("name", SUMMARY)
def test_a_changed_value_of_the_summary_is_found(planted: Planted, name: str) -> None:
    path = planted.folder / "summary.json"
    summary = json.loads(path.read_text())
    assert name in summary
    assert summary[name] != SUMMARY[name]
    summary[name] = SUMMARY[name]
    path.write_text(json.dumps(summary))
    assert planted.faults()


@pytest.mark.parametrize(
    "fate",
    (
        "generated",
        "trained",
        "filtered",
        "failed",
        "cancelled",
        "quarantined",
        "evaluated",
        "set_aside",
        "queued",
        "in_flight",
        "lost",
        "difference",
    ),
)
def test_a_changed_count_of_the_ledger_is_found(planted: Planted, fate: str) -> None:
    path = planted.folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["ledger"][fate] += 1
    path.write_text(json.dumps(summary))
    assert planted.faults()


EPISODE: dict[str, Any] = {
    "step": 2,
    "trajectory_id": "g000000.9.9.9",
    "environment": "other",
    "task_index": 99,
    "prompt": "other",
    "reply": "a better reply",
    "answer": "other",
    "reward": 0.99,
    "lag": 7.0,
    "status": "failed",
    "sampled_tokens": 99,
    "versions": [[1, "0"]],
    "metrics": {"other": 1.0},
}


@pytest.mark.parametrize("key", EPISODE)
def test_a_changed_field_of_a_kept_episode_is_found(planted: Planted, key: str) -> None:
    change = {key: EPISODE[key]}
    change_row(planted, "trajectories.jsonl", lambda row: row.update(change), place=0)
    assert planted.faults()


GROUP: dict[str, Any] = {
    "step": 2,
    "environment": "other",
    "task_index": 99,
    "rewards": [1.0, 1.0],
    "sampled_tokens": [9, 9],
    "surprisal": [0.1, 0.1],
}


@pytest.mark.parametrize("key", GROUP)
def test_a_changed_field_of_a_group_is_found(planted: Planted, key: str) -> None:
    change = {key: GROUP[key]}
    change_row(planted, "groups.jsonl", lambda row: row.update(change), place=0)
    assert planted.faults()


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


# Changes of a trajectory in a batch, whose checksums of the file are right again.
TRAJECTORY = {
    "a token": lambda message: setattr(message, "token_ids", flip(message.token_ids)),
    "a log-probability": lambda message: setattr(
        message, "behavior_logprobs", flip(message.behavior_logprobs)
    ),
    "a reward": lambda message: setattr(message, "reward", 0.125),
    "an attempt": lambda message: setattr(message, "attempt", 9),
    "a member": lambda message: setattr(message, "member", 1),
    "a reply": lambda message: setattr(message, "reply_text", "a better reply"),
    "turns": lambda message: setattr(message, "num_turns", 9),
    "seconds": lambda message: setattr(message, "generation_s", 99.0),
    "a server": lambda message: setattr(message, "server_epoch", 1),
    "a run": lambda message: setattr(message, "run_id", "other"),
    "a metric": lambda message: message.metrics.update(other=1.0),
    "fewer tokens": lambda message: setattr(
        message, "token_ids", message.token_ids[4:]
    ),
}


@pytest.mark.parametrize("change", TRAJECTORY)
def test_a_changed_trajectory_of_a_batch_is_found(
    planted: Planted, change: str
) -> None:
    planted.change_batch(
        2,
        lambda batch: TRAJECTORY[change](batch.trajectories[0]),
    )
    assert planted.faults()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("evaluation", {"reward_mean": 0.99}),
        ("evaluation", {"episodes": 99}),
        ("step", {"several": 9}),
        ("batch", {"seen": {"e": [0.0, 9.0]}}),
        ("batch", {"crc32": 1}),
        ("lease", {"task": 99}),
        ("lease", {"environment": "other"}),
    ],
)
def test_a_changed_record_with_its_checksum_is_found(
    planted: Planted, kind: str, values: dict
) -> None:
    planted.one(kind).update(values)
    assert planted.faults()


@pytest.mark.parametrize("number", [1, 3])
def test_lines_that_are_gone_from_the_end_of_the_journal_are_found(
    planted: Planted, number: int
) -> None:
    del planted.records[-number:]
    assert planted.faults()


def test_rows_in_another_order_are_found(planted: Planted) -> None:
    path = planted.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    of_steps = [line for line in lines if "step" in json.loads(line)]
    path.write_text(
        "".join(
            [
                *of_steps[1:],
                of_steps[0],
            ]
        )
    )
    assert any("is not in its place" in text for text in planted.faults())


def export(planted: Planted) -> Path:
    """A final model with its manifest."""
    folder = planted.folder / "checkpoints" / "final"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes(name.encode() * 99)
    write_export_manifest(folder)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", ["a bit", "the end", "all of it", "another file"])
def test_a_changed_file_of_the_final_model_is_found(
    planted: Planted, name: str, change: str
) -> None:
    path = export(planted) / name
    assert planted.faults() == []
    data = path.read_bytes()
    match change:
        case "a bit":
            path.write_bytes(flip(data))
        case "the end":
            path.write_bytes(data[:-1])
        case "all of it":
            path.unlink()
        case "another file":
            (path.parent / f"more-{name}").write_bytes(data)
    assert planted.faults()

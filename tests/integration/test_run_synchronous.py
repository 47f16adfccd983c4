"""Without staleness the whole system is the plain synchronous loop, to the last bit."""

from pathlib import Path

import pytest
from slipstream.v1 import trainer_pb2
from support.rigs import run_processes
from support.rigs.valkey import queue_settings

pytestmark = run_processes.LONG_RUN

STEPS = 4
GROUPS = 8
MEMBERS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = run_processes.copy_environments(tmp_path_factory.mktemp("synchronous"))
    with queue_settings(folder / "valkey") as queue:
        run_processes.write_config(
            folder,
            tiny_model,
            run__steps=STEPS,
            evaluations=[],
            algorithm__max_staleness=0,
            algorithm__group_size=MEMBERS,
            algorithm__groups_per_step=GROUPS,
            weights__transport="ipc",
            **queue,
        )
        result = run_processes.succeed("run", "config.toml", cwd=folder, limit_s=250)
    assert result.stderr == ""
    return folder / "run"


@pytest.fixture(scope="module")
def batches(run: Path) -> list[trainer_pb2.RecordedBatch]:
    return run_processes.batches_of(run)


def test_passwords_of_the_queue_stand_in_their_own_files_alone(run: Path) -> None:
    files = set((run.parent / "valkey").glob("*.password"))
    assert {file.name for file in files} == {
        "valkey.controller.password",
        "valkey.rollout.password",
    }
    passwords = [file.read_bytes() for file in files]
    other_files = [
        path for path in run.rglob("*") if path.is_file() and path not in files
    ]
    assert run / "config.toml" in other_files
    assert run / "logs" / "server-0.log" in other_files
    leaks = [
        path
        for path in other_files
        if any(word in path.read_bytes() for word in passwords)
    ]
    assert not leaks


def test_each_batch_holds_the_groups_that_were_leased_for_it(run, batches):
    leased = [r["group"] for r in run_processes.records_of(run, "lease")]
    assert leased == [f"g{number:06d}" for number in range(STEPS * GROUPS)]
    for step, batch in enumerate(batches):
        expected = leased[step * GROUPS : (step + 1) * GROUPS]
        members = [(t.group_id, t.member) for t in batch.trajectories]
        assert members == [
            (group, member) for group in expected for member in range(MEMBERS)
        ]


def test_every_token_is_sampled_by_the_version_that_is_trained(run, batches):
    for step, batch in enumerate(batches):
        spans = [span for t in batch.trajectories for span in t.version_spans]
        assert {span.version.step for span in spans} == {step}
    summary = run_processes.checked(run)
    assert summary["max_lag_seen"] == 0
    assert summary["trajectories_with_several_versions"] == 0
    assert summary["logprob_gap_tokens"] == summary["trained_tokens"]
    assert summary["logprob_gap_mean"] <= 1e-4


def test_a_plain_loop_over_the_same_generations_gives_the_same_run(run, batches):
    plain = run_processes.plain_loop(run / "config.toml")
    assert len(plain) == STEPS
    digests = [r["digest"] for r in run_processes.records_of(run, "step")]
    rows = run_processes.rows_of(run)
    for step, line in enumerate(plain):
        members = [name.split(".")[:2] for name in line["ids"]]
        assert members == [
            [t.group_id, str(t.member)] for t in batches[step].trajectories
        ]
        for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap_mean"):
            assert line["metrics"][name] == rows[step][name], name
        rewards = [t.reward for t in batches[step].trajectories]
        assert rows[step]["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert line["digest"] == digests[step]
    assert plain[-1]["digest"] == run_processes.summary_of(run)["weight_digest"]

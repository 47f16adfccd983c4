"""One short run with all real parts, and everything that it leaves."""

import fcntl
import json
import math
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.learner.controller.receipt import pack, unpack
from slipstream.learner.controller.receipt_checks import check
from slipstream.learner.controller.records.journal import read_batch, read_records
from support.references.documented_metrics import tables
from support.rigs.changed_receipt import changed_receipt, in_journal, in_json
from support.rigs.run_processes import (
    check_ledger,
    copy_environments,
    plain_loop,
    rows_of,
    run_command,
    succeed,
    summary_of,
    write_config,
)

pytestmark = pytest.mark.usefixtures("nothing_survives")

STEPS = 8
GROUPS, MEMBERS = 16, 16
ENVIRONMENTS = [
    {
        "name": "echo",
        "reference": "slipstream.environments.echo:Echo",
        "args": {"num_symbols": 12, "reply_length": 4, "split": "train"},
        "weight": 3.0,
        "timeout_s": 10.0,
    },
    {"name": "repeat", "reference": "user_environments:Repeat", "timeout_s": 10.0},
]
# Our own lines: a time and what happened, or the table at the end.
# An environment's line is there when its process takes three seconds, as on a busy machine.
SHOWN = re.compile(
    r" *\d+\.\d s  \S.*|  [a-z][a-z -]+  \S.*|  \S+/: .*"
    r"|environment [a-z-]+ is (loaded,|checked, each call) within \d+ s|"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_environments(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="module")
def result(folder: Path, tiny_model: Path) -> subprocess.CompletedProcess[str]:
    write_config(
        folder,
        tiny_model,
        run__steps=STEPS,
        environments=ENVIRONMENTS,
        controller__sample_every_steps=5,
        weights__verify_every=4,
    )
    return run_command("run", "config.toml", cwd=folder, limit_s=250)


@pytest.fixture(scope="module")
def run(folder: Path, result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def summary(run: Path) -> dict:
    return summary_of(run)


def test_the_summary_answers_what_people_ask_first(summary: dict) -> None:
    assert summary["steps"] == STEPS
    assert summary["state"] == "finished"
    for name in ("reward_first", "reward_last", "reward_heldout", "reward_heldout_first"):
        assert 0 <= summary[name] <= 1
    # A server that is late on a busy machine is left out of a publish and takes the next one.
    assert summary["publishes"] >= 1
    # The first one, and every fourth after it.
    assert summary["publishes_verified"] >= math.ceil(summary["publishes"] / 4)
    assert summary["probe_gap_max"] <= 1e-3
    assert summary["published_bytes"] > 0
    trainer, servers = summary["time"]["trainer"], summary["time"]["servers"]
    assert sum(trainer.values()) == pytest.approx(1, abs=0.05)
    assert sum(servers.values()) == pytest.approx(1, abs=0.05)
    assert trainer["training"] > 0
    assert servers["sampling"] > 0
    assert summary["wall_s"] > 0
    assert len(summary["weight_digest"]) == 32


def test_every_metric_is_documented_and_every_documented_metric_is_there(run: Path) -> None:
    always, sometimes, times, advice = (
        *tables("A step in metrics.jsonl"),
        *tables("Why is it slow", "guides/watching.md"),
    )
    always, sometimes = always + times, sometimes + advice
    rows = [row for row in rows_of(run) if "step" in row]
    own = {name for row in rows for name in row if name.split("/")[0] in ("echo", "repeat")}
    assert {"echo/reward", "echo/right", "repeat/reward"} <= own
    for row in rows:
        rest = set(row) - own
        assert {name for name in always if "/" not in name} <= rest
        assert rest <= {*always, *sometimes}
        assert rest.isdisjoint({"mfu", "gpu_allocated_bytes", "gpu_reserved_bytes"})


def test_every_number_of_an_evaluation_is_documented(run: Path) -> None:
    shared, own = tables("An evaluation round in metrics.jsonl")
    (row, *_) = (row for row in rows_of(run) if "evaluation_step" in row)
    measured = {name.split("/", 1)[1] for name in row if "/" in name}
    assert {name for name in row if "/" not in name} == set(shared)
    assert {name.replace("_K", "_1") for name in own} <= measured


def test_the_summary_is_documented(summary: dict) -> None:
    (names,) = tables("summary.json")
    assert set(summary) == set(names)
    assert summary["resources"]["trainer_ranks"] == summary["resources"]["rollout_servers"] == 1
    assert 0 < summary["resources"]["training_s"] < summary["wall_s"]
    assert summary["resources"]["rollout_rss_bytes"] > 100e6


def test_no_trained_token_is_older_than_promised(run: Path, summary: dict) -> None:
    assert summary["max_staleness"] == 2
    assert 0 < summary["max_lag_seen"] <= 2
    assert sum(summary["tokens_by_lag"].values()) == summary["trained_tokens"]
    for record in batch_records(run):
        batch = read_batch(run / "journal", record["step"], record["crc32"])
        spans = [span for t in batch.trajectories for span in t.version_spans if span.length]
        assert all(0 <= record["step"] - span.version.step <= 2 for span in spans)


def test_every_generated_token_is_accounted_for(summary: dict) -> None:
    check_ledger(summary)
    assert summary["generated_tokens"] == summary["ledger"]["generated"]
    assert summary["trained_tokens"] == summary["ledger"]["trained"] > 0
    assert summary["ledger"]["evaluated"] > 0


def test_servers_and_learner_agree_on_the_log_probabilities(summary: dict) -> None:
    assert 0 <= summary["logprob_gap_mean"] <= 1e-4
    assert summary["logprob_gap_mean"] <= summary["logprob_gap_max"] <= 1e-3


def test_every_step_has_a_line_of_metrics(run: Path) -> None:
    rows = rows_of(run)
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for name in ("loss", "reward_mean", "grad_norm", "entropy", "lag_max", "queued_tokens"):
        assert all(math.isfinite(row[name]) for row in steps)
    assert all(row["ledger_difference"] == 0 for row in steps)
    held = [row for row in rows if "evaluation_step" in row]
    assert held[-1]["evaluation_step"] == STEPS
    assert all(row["num_episodes"] == 52 and row["num_failed"] == 0 for row in held)


def test_both_environments_are_trained_by_their_weights(run: Path, summary: dict) -> None:
    batches = [read_batch(run / "journal", r["step"], r["crc32"]) for r in batch_records(run)]
    by_step = [[trajectory.environment for trajectory in b.trajectories] for b in batches]
    trained = [name for names in by_step for name in names]
    assert len(trained) == STEPS * GROUPS * MEMBERS
    assert set(trained) == {"echo", "repeat"}
    # Either may load first: all groups are its own then, also those of the steps begun ahead.
    ahead = 1 + summary["max_staleness"]
    until_echo, until_repeat = (
        (sum(name not in names for names in by_step) + ahead) / STEPS for name in ("echo", "repeat")
    )
    share = trained.count("echo") / len(trained)
    assert 1 - max(0.3, until_echo) <= share <= max(0.8, until_repeat)


def test_tensorboard_events_can_be_read(run: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    (path,) = (run / "tensorboard").iterdir()
    data, place, losses = path.read_bytes(), 0, []
    while place < len(data):
        # A record: length, checksum of the length, event, checksum of the event.
        (length,) = struct.unpack_from("<Q", data, place)
        event = event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
        losses += [(event.step, v.simple_value) for v in event.summary.value if v.tag == "loss"]
        place += length + 16
    rows = [row for row in rows_of(run) if "step" in row]
    assert losses == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]


def test_sampled_trajectories_can_be_read(run: Path) -> None:
    lines = [json.loads(x) for x in (run / "trajectories.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 6}
    assert {line["environment"] for line in lines} <= {"echo", "repeat"}
    for line in lines:
        assert line["prompt"]
        assert 0 <= line["reward"] <= 1
        assert sum(length for length, _ in line["versions"]) == line["sampled_tokens"]


def test_the_resolved_settings_are_kept(run: Path) -> None:
    config = load_config(run / "config.toml")
    assert config.run.steps == STEPS
    assert config.run_dir == run
    assert [environment.name for environment in config.environments] == ["echo", "repeat"]
    assert (run / "config.toml").stat().st_mode & 0o077 == 0


def test_the_screen_shows_only_our_own_lines(result: subprocess.CompletedProcess[str], run: Path):
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line for line in lines if SHOWN.fullmatch(line) is None] == []
    steps = [line for line in lines if "  step " in line]
    # A quick step is left out; the first and the last one are not.
    assert 2 <= len(steps) <= STEPS
    assert f"step {STEPS}" in steps[-1]
    assert not [line for line in lines if " ! " in line or "!!" in line]
    assert f"{run}/" in lines[-1]


def test_the_exported_model_is_the_last_version(run: Path, summary: dict) -> None:
    import transformers

    folder = run / "checkpoints" / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**tokens, max_new_tokens=4, do_sample=False)
    assert reply.shape[1] > tokens["input_ids"].shape[1]
    (line,) = plain_loop(run / "config.toml", "--digest", folder)
    assert line["digest"] == summary["weight_digest"]


def test_a_finished_run_is_not_started_again(run: Path) -> None:
    again = run_command("run", "config.toml", cwd=run.parent)
    assert again.returncode == 2
    assert again.stderr == (
        f"slipstream: {run} is finished with {summary_of(run)['steps']} steps; "
        "raise run.steps to go on, or choose another run.name\n"
    )


@pytest.fixture(scope="module")
def packed(run: Path) -> subprocess.CompletedProcess[str]:
    return run_command("receipt", "run", "--out", "run.tar.gz", cwd=run.parent)


@pytest.fixture(scope="module")
def receipt(packed: subprocess.CompletedProcess[str], run: Path) -> Path:
    assert packed.returncode == 0, packed.stdout + packed.stderr
    return run.parent / "run.tar.gz"


def test_a_receipt_says_what_it_shows_and_what_it_lacks(packed, receipt, summary):
    lines = dict(re.findall(r"^ *([a-z ]+?)  (\S.*)$", packed.stdout, re.MULTILINE))
    assert lines["versions"].endswith(summary["weight_digest"])
    assert lines["ledger"].startswith(f"{summary['generated_tokens']:,} generated = ")
    assert lines["packages"] == lines["machine"] == "the same here"
    assert re.fullmatch(r"model\.path .*, digest [0-9a-f]{32}; here", lines["not in it"])
    assert packed.stderr == ""
    (again,) = run_command("receipt", receipt).stdout.splitlines()[:1]
    assert again in packed.stdout


def test_the_same_run_gives_the_same_receipt(receipt: Path, run: Path, tmp_path: Path) -> None:
    pack(run, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == receipt.read_bytes()


def test_a_replay_elsewhere_reaches_every_recorded_digest_up_to_a_step(
    receipt: Path, run: Path, tiny_model: Path, tmp_path: Path, summary: dict
) -> None:
    recorded = [r["digest"] for r in read_records(run / "journal") if r["kind"] == "step"]
    assert len(recorded) == STEPS
    assert recorded[-1] == summary["weight_digest"]
    subprocess.run(["tar", "-xzf", receipt], cwd=tmp_path, check=True)
    shutil.copytree(tiny_model, tmp_path / "copy")
    arguments = ["run", "--step", STEPS - 1, "model.path=copy"]
    replay = succeed("replay", *arguments, cwd=tmp_path, limit_s=100)
    assert replay.stderr == ""
    assert [line.split() for line in replay.stdout.splitlines()] == [
        ["version", str(version), digest, "as", "recorded"]
        for version, digest in enumerate(recorded[:-1], start=1)
    ]


def test_a_receipt_is_of_a_run_that_has_ended(run: Path, tmp_path: Path) -> None:
    with (run / "command.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packed = run_command("receipt", run, "--out", tmp_path / "out")
    assert packed.returncode == 2
    assert packed.stderr == (
        f"slipstream: {run} is written by a run that goes on: a receipt is of one that has ended\n"
    )


def drop(files: Path) -> None:
    path = files / "journal" / "journal.log"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


BATCH = "journal/batches/step-000002.pb"
# What is changed, whether the list of files says so, and a part of the line that tells of it.
CHANGES = {
    "a batch": (lambda files: (files / BATCH).write_bytes(b"x"), True, "step-000002.pb is damaged"),
    "a line of the journal": (drop, True, "lines before it are missing"),
    "the digest of the last weights": (
        in_journal(lambda records: of_kind(records, "step")[-1].update(digest="00" * 16)),
        True,
        "summary.json ends with weights",
    ),
    "a version": (
        in_journal(lambda records: records.remove(of_kind(records, "step")[3])),
        True,
        "version 4 is not in the journal",
    ),
    "the lags": (
        in_journal(lambda records: of_kind(records, "step")[3].update(lags=[[0, 1]])),
        True,
        "the tokens of step 4 have other lags",
    ),
    "the groups": (
        in_journal(lambda records: records.remove(of_kind(records, "lease")[0])),
        True,
        "which is not open",
    ),
    "the bound": (
        lambda files: (files / "config.toml").write_text(
            (files / "config.toml")
            .read_text()
            .partition("\n")[2]
            .replace("max_staleness = 2", "max_staleness = 0")
        ),
        True,
        "0 are allowed",
    ),
    "the ledger": (
        lambda files: (files / "summary.json").write_text(
            re.sub(r'"evaluated": (\d+)', r'"evaluated": 1\1', (files / "summary.json").read_text())
        ),
        True,
        "tokens evaluated, not",
    ),
    "the curve": (
        lambda files: (files / "metrics.jsonl").write_text(
            (files / "metrics.jsonl").read_text().replace('"reward_mean": 0', '"reward_mean": 1', 1)
        ),
        True,
        "metrics.jsonl has reward 1",
    ),
    "a settings file alone": (
        in_json("config.toml", "max_staleness = 2", "max_staleness = 3"),
        True,
        "config.toml is not what the run wrote",
    ),
    "a file that is not listed anew": (
        in_json("config.toml", "max_staleness = 2", "max_staleness = 3"),
        False,
        "config.toml is not what was packed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_receipt_with_another_content_is_refused(change, receipt, tmp_path, capsys):
    what, relist, told = CHANGES[change]
    assert check(changed_receipt(receipt, tmp_path, what, relist=relist)) == 1
    captured = capsys.readouterr().err
    assert told in captured
    assert len(captured.splitlines()) == 1


def without_model(run: Path, folder: Path) -> Path:
    """A copy of a run's folder, to be changed."""
    return shutil.copytree(run, folder / "run", ignore=shutil.ignore_patterns("checkpoints"))


def test_no_secret_comes_into_a_receipt(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (key,) = {r["key"] for r in read_records(run / "journal") if r["kind"] == "start"}
    copy = without_model(run, tmp_path)
    settings = (copy / "config.toml").read_text().partition("\n")[2]
    url = 'redis_url = "rediss://someone:the-password@far:1/0?password=the-password"'
    (copy / "config.toml").write_text(
        re.sub(r'kind = "(grpc|redis)"', rf'kind = "redis"\n{url}', settings)
    )
    pack(copy, tmp_path / "packed")
    (tmp_path / "files").mkdir()
    for entry in unpack(tmp_path / "packed", tmp_path / "files").files:
        data = (tmp_path / "files" / entry.path).read_bytes()
        assert key.encode() not in data
        assert b"the-password" not in data
    assert load_config(tmp_path / "files" / "config.toml").queue.redis_url == "rediss://far:1/0"

    socket = (copy / "config.toml").read_text().replace(url, 'redis_url = "unix://a:b@/run/x"')
    (copy / "config.toml").write_text(socket)
    pack(copy, tmp_path / "local")
    (tmp_path / "of-local").mkdir()
    unpack(tmp_path / "local", tmp_path / "of-local")
    assert load_config(tmp_path / "of-local/config.toml").queue.redis_url == "unix:///run/x"

    monkeypatch.setenv("MY_API_KEY", "echo-heldout")
    with pytest.raises(ConfigError, match=r"\$MY_API_KEY in it: no receipt is made of it"):
        pack(copy, tmp_path / "other")
    monkeypatch.delenv("MY_API_KEY")
    (tmp_path / "token").write_text(f"{'x' * 32}\n{key[:20]}\n")
    held = f'[security]\ntoken_file = "{tmp_path}/token"\n'
    (copy / "config.toml").write_text(settings.replace("[security]\n", held))
    (copy / "metrics.jsonl").write_text((copy / "metrics.jsonl").read_text() + key[:20])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has the value of security\.token_file"):
        pack(copy, tmp_path / "other")
    (copy / "config.toml").write_text(settings.replace("num_symbols", 'api_key = "x"\nnum_symbols'))
    with pytest.raises(ConfigError, match=r"environments\.0\.args\.api_key looks like a secret"):
        pack(copy, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def batch_records(run: Path) -> list[dict]:
    return [record for record in read_records(run / "journal") if record["kind"] == "batch"]

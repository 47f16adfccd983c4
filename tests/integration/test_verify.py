"""`slipstream verify` finds what somebody or an error has changed in the files of a run."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.client.verified_journal import UNCHECKED
from slipstream.client.verify import examine, run_verify
from slipstream.core.errors import ConfigError
from slipstream.core.file_manifest import ManifestedFolder
from slipstream.learner.controller.records.journal import batch_path, encoded
from slipstream.learner.controller.records.kinds import _KINDS
from slipstream.learner.controller.reporting.row_history import open_rows
from slipstream.protocol.checkpoints import write_export_manifest
from slipstream.v1 import trainer_pb2
from support.rigs.planted_run import STEPS, Planted, digest_of, make_whole_run

Change = Callable[[trainer_pb2.RecordedBatch], object]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def planted(whole_run: Path, tmp_path: Path) -> Planted:
    return Planted(whole_run, tmp_path)


def test_a_whole_run_has_no_fault(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted.faults() == []
    assert run_verify(planted.folder) == 0
    unchecked, line = capsys.readouterr().out.splitlines()
    assert unchecked == "not checked: journal/rows"
    assert re.search(
        rf"/r: {STEPS} steps, \d+ trained tokens, at most [12] late; faults: 0$", line
    )


def test_the_end_of_a_run_stores_what_a_start_needs_of_its_rows(
    whole_run: Path,
) -> None:
    history, num_bytes = open_rows(whole_run, pytest.fail)
    assert history.newest_version == STEPS
    assert num_bytes == (whole_run / "metrics.jsonl").stat().st_size


def ended_name(planted: Planted) -> str:
    trajectory = planted.batch(1).trajectories[0]
    return (
        f"{trajectory.group_id}.{trajectory.member}.{trajectory.attempt}."
        f"{trajectory.server_epoch:x}"
    )


def lease_of_nobody(planted: Planted) -> dict:
    lease = dict(planted.one("lease"))
    numbers = [int(r["group"][1:]) for r in planted.records if r["kind"] == "lease"]
    return lease | {"group": f"g{max(numbers) + 1:06d}", "deadline": 1}


def with_span(name: str, value: int) -> Callable[[Planted], None]:
    """Another version of a token of step 4."""
    return in_batch(
        lambda b: setattr(b.trajectories[0].version_spans[0].version, name, value), 4
    )


def in_batch(change: Change, step: int = 2) -> Callable[[Planted], None]:
    return lambda planted: planted.change_batch(step, change)


def in_record(kind: str, **values: object) -> Callable[[Planted], None]:
    return lambda planted: planted.one(kind).update(values)


def more(kind: str, **values: object) -> Callable[[Planted], None]:
    """One more record like the one of step 2."""
    return lambda planted: planted.records.append(planted.one(kind) | values)


def without(kind: str) -> Callable[[Planted], None]:
    return lambda planted: planted.records.remove(planted.one(kind))


def in_file(name: str, pattern: str, text: str) -> Callable[[Planted], None]:
    return lambda planted: planted.replace(name, pattern, text)


def changed_summary(name: str, value: object) -> Callable[[Planted], None]:
    def change(planted: Planted) -> None:
        path = planted.folder / "summary.json"
        summary = json.loads(path.read_text())
        place = summary["ledger"] if name in summary["ledger"] else summary
        assert place[name] != value
        place[name] = value
        path.write_text(f"{json.dumps(summary, indent=2)}\n")

    return change


# The change, and a part of a line that tells of it.
CHANGES: dict[str, tuple[Callable[[Planted], object], str]] = {
    "a member is trained twice": (
        lambda p: p.change_batch(
            2, lambda b: b.trajectories[0].CopyFrom(p.batch(1).trajectories[0])
        ),
        "was trained before",
    ),
    "a trained trajectory had ended": (
        lambda p: p.records.insert(
            -1, {"kind": "end", "id": ended_name(p), "end": "cancelled"}
        ),
        "1 trajectories were trained and ended otherwise behind that",
    ),
    "a trajectory ends twice": (
        lambda p: p.records.extend(
            [{"kind": "end", "id": "g9.0.0.1", "end": "failed"}] * 2
        ),
        "g9.0.0.1 ended twice, as failed",
    ),
    "a member is lost": (
        in_batch(lambda b: b.trajectories.pop()),
        "in step 2: 3 and 4",
    ),
    "a group is lost": (
        lambda p: p.records.append(lease_of_nobody(p)),
        "was to be trained by step 1",
    ),
    "a group's number is missing": (
        lambda p: p.records.append(
            lease_of_nobody(p) | {"group": "g900000", "deadline": 99}
        ),
        "the place of g900000: 900000 and",
    ),
    "a group is leased after its end": (more("lease"), "was leased after its end"),
    "a group is leased with another task": (
        lambda p: p.records.insert(
            p.records.index(p.one("lease")) + 1, p.one("lease") | {"seed": 1}
        ),
        "the task of g000000: ",
    ),
    "a batch has no record": (without("batch"), "step 2 was trained without a batch"),
    "a step has two batches": (more("batch"), "step 2 has two batches"),
    "a batch's file is gone": (
        lambda p: batch_path(p.log.parent, 3).unlink(),
        "files of 1 batches are missing, of the steps [3]",
    ),
    "old batches were removed": (
        lambda p: [batch_path(p.log.parent, step).unlink() for step in range(3)],
        "files of 3 batches are missing, of the steps [0, 1, 2]",
    ),
    "a batch is another": (
        in_record("batch", crc32=7),
        "the batch of step 2 is not what a run writes: ValueError by its checksum",
    ),
    "a batch has another number": (
        in_batch(lambda b: setattr(b.header, "step", 3)),
        "batch 2: (3, 'b000002') and (2, 'b000002')",
    ),
    "a batch has other groups": (
        lambda p: p.one("batch")["groups"].pop(),
        "groups of step 2: [",
    ),
    "a batch has too few groups": (
        in_file("config.toml", r"(?s)^.*?\n(.*groups_per_step = )\d+", r"\g<1>9"),
        "number of groups of step 0: ",
    ),
    "a token is too old": (with_span("step", 1), "of step 4 has lag 3"),
    "a token is of no version": (
        with_span("incarnation", 3),
        "no step made version (3, ",
    ),
    "a trajectory is of another run": (
        in_batch(lambda b: setattr(b.trajectories[0], "run_id", "other")),
        ": other and ",
    ),
    "a trajectory is of another task": (
        in_batch(lambda b: setattr(b.trajectories[0], "seed", 5)),
        "task and lease of ",
    ),
    "spans are shorter than tokens": (
        in_batch(lambda b: b.trajectories[0].run_lengths.extend([0, 1])),
        "tokens and versions of ",
    ),
    "a step is gone": (without("step"), "trained steps: without [2], beyond [5]"),
    "another version": (
        in_record("step", version=[0, 9]),
        "the version of step 2: 9 and 3",
    ),
    "other weights": (
        more("step", digest="00"),
        "weights of version (0, 3) in step 2: 00 and ",
    ),
    "a checkpoint has other weights": (
        lambda p: p.records.append(
            {"kind": "checkpoint", "version": [0, 3], "digest": "00"}
        ),
        "weights of version (0, 3) in a checkpoint: 00 and ",
    ),
    "lags of a step": (in_record("step", lags=[[0, 1]]), "lags of step 2: Counter"),
    "tokens of a batch": (
        lambda p: p.one("batch")["tokens"][0].__setitem__(2, 1),
        "tokens of step 2: ",
    ),
    "the last weights": (
        changed_summary("weight_digest", "00"),
        "the last weights: 00 and ",
    ),
    "the difference": (
        changed_summary("difference", 5),
        "the ledger's difference: 5 and 0",
    ),
    "the gaps": (changed_summary("gaps", ["x"]), "the ledger's gaps: ['x'] and []"),
    "the sum": (changed_summary("generated", 1), "the ledger's tokens: 1 and "),
    "the ends": (
        changed_summary("evaluated", 99),
        "the ledger's evaluated tokens: 99 and ",
    ),
    "the trained tokens": (
        changed_summary("trained_tokens", 1),
        "the trained tokens: 1 and ",
    ),
    "the ledger's trained tokens": (
        changed_summary("trained", 1),
        "the trained tokens: 1 and ",
    ),
    "the lags": (
        changed_summary("tokens_by_lag", {"0": 1}),
        "the tokens by lag: {0: 1} and ",
    ),
    "the number of steps": (changed_summary("steps", 9), f"the steps: 9 and {STEPS}"),
    "no summary": (
        lambda p: (p.folder / "summary.json").unlink(),
        "summary.json cannot be read",
    ),
    "records of another run": (
        more("start", run_id="other"),
        "the runs of the journal: 2 and 1",
    ),
    "a record of another release": (
        lambda p: p.records.append({"kind": "weather", "rain": True}),
        "of the journal is of another release: a record 'weather' is not known to slipstream-rl ",
    ),
    "no start": (without("start"), "before a start"),
    "the curve": (
        in_file("metrics.jsonl", r'"reward_mean": [\d.]+', '"reward_mean": 7'),
        "metrics.jsonl has reward 7 at step 1",
    ),
    "a row of the curve": (
        in_file("metrics.jsonl", r'.*"step": 2.0.*\n', ""),
        "steps of metrics.jsonl: without [2]",
    ),
    "a round": (
        in_file("metrics.jsonl", r'"reward_heldout": [^,]+', '"reward_heldout": 7'),
        "reward_heldout of version 0 in metrics.jsonl: 7 and ",
    ),
    "a held-out reply": (
        in_file("heldout.jsonl", r'"reply": "', '"reply": "!'),
        "replies of version 0 in heldout.jsonl are not those of its round",
    ),
    "a held-out reply is gone": (
        in_file("heldout.jsonl", r".*\n", ""),
        "replies of version 0 in heldout.jsonl are not those of its round",
    ),
    "all held-out replies of a round": (
        in_file("heldout.jsonl", r'(?s)^.*?(\{"evaluation_step": [^0])', r"\1"),
        "the replies of version 0 are not in heldout.jsonl",
    ),
    "held-out replies of no round": (
        in_file("heldout.jsonl", r'"evaluation_step": 0', '"evaluation_step": 3'),
        "heldout.jsonl has replies of version 3, whose round is not in the journal",
    ),
    "a clock's number in the curve": (
        in_file("metrics.jsonl", r'"wall_s": ', '"wall_s": 1'),
        "metrics.jsonl is not what it was when summary.json was written",
    ),
    "a row behind the end": (
        lambda p: (p.folder / "groups.jsonl").open("a").write('{"step": 1}\n'),
        "groups.jsonl is not what it was when summary.json was written",
    ),
    "a number of the summary that no other file has": (
        changed_summary("wall_s", 1),
        "summary.json is not what the run wrote, by its digest",
    ),
    "the name of a package in the journal": (
        in_record("start", packages={}),
        "journal/journal.log is not what it was when summary.json was written",
    ),
    "a rate that is none of its tokens": (
        in_file(
            "metrics.jsonl", r'"trained_tokens_per_s": ', '"trained_tokens_per_s": 1'
        ),
        "metrics.jsonl has trained_tokens_per_s 1",
    ),
    "groups of an environment with equal rewards": (
        in_file(
            "metrics.jsonl",
            r'"e/equal_rewards_fraction": ',
            '"e/equal_rewards_fraction": 1',
        ),
        "metrics.jsonl has e/equal_rewards_fraction 1",
    ),
    "the bytes of a batch": (in_record("batch", num_bytes=7), "bytes of batch 2: "),
    "the trajectories of a batch": (
        in_record("batch", trajectories=7),
        "trajectories of step 2: ",
    ),
    "a kept episode": (
        in_file("trajectories.jsonl", r'"reward": [^,]+', '"reward": 7'),
        "step 1 in trajectories.jsonl: 7 and ",
    ),
    "a kept episode twice": (
        in_file("trajectories.jsonl", r"(?s)(.*)", r"\1\1"),
        "trajectories.jsonl has g",
    ),
    "a kept episode of no step": (
        in_file("trajectories.jsonl", r'"step": 1,', '"step": 99,'),
        "step 99 in trajectories.jsonl",
    ),
    "a group's line": (
        in_file("groups.jsonl", r'"task_index": \d+', '"task_index": 99'),
        "groups.jsonl has other groups than step 1",
    ),
    "a group's line is gone": (
        in_file("groups.jsonl", r".*\n", ""),
        "groups.jsonl lacks 1 of the 4 groups of step 1",
    ),
    "settings": (
        in_file("config.toml", "max_staleness = 2", "max_staleness = 3"),
        "is not what the run wrote, by the digest in its first line",
    ),
    "the bound": (
        in_file("config.toml", r"(?s)^.*?\n(.*max_staleness = )2", r"\g<1>0"),
        "has lag 1",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found(planted: Planted, change: str) -> None:
    changed, messages = CHANGES[change]
    changed(planted)
    assert [text for text in planted.faults() if messages in text], planted.faults()


def changed_file(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def added(name: str, content: bytes = b"\n") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(content)

    return change


# Changes of files whose digests the summary, or a manifest that it names, has; part of a line that
# tells of each.
FILE_CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of a stored operation": (
        changed_file("operations/1.request", b"firsT"),
        "bytes and digest of operations/1.request: (5, ",
    ),
    "a byte more in a stored operation": (
        added("operations/1.request"),
        "bytes and digest of operations/1.request: (6, ",
    ),
    "no stored operation": (
        gone("operations/1.request"),
        "operations/1.request is missing",
    ),
    "not the newest stored operation": (
        gone("operations/2.request"),
        "operations/2.request is missing",
    ),
    "the newest stored operation as it was before": (
        changed_file("operations/2.request", b"second"),
        "bytes and digest of operations/2.request: (6, ",
    ),
    "one more stored operation": (
        changed_file("operations/3.request", b""),
        "operations/3.request is a file that manifest.jsonl does not name",
    ),
    "a spent operation again": (
        changed_file("operations/0.request", b"spent"),
        "operations/0.request is a file that manifest.jsonl does not name",
    ),
    "a line of the manifest of operations": (
        added("operations/manifest.jsonl", b'{"removed": ["1.request"]}\n'),
        "operations/manifest.jsonl is not what it was when summary.json was written",
    ),
    "no manifest of operations": (
        gone("operations/manifest.jsonl"),
        "operations/manifest.jsonl cannot be read",
    ),
    "a space in the manifest of a model": (
        added("checkpoints/final/slipstream-manifest.json"),
        "checkpoints/final/slipstream-manifest.json is not what it was when summary.json was",
    ),
    "no manifest of a model": (
        gone("checkpoints/final/slipstream-manifest.json"),
        "checkpoints/final/slipstream-manifest.json cannot be read",
    ),
    "no manifest of a checkpoint": (
        lambda folder: (folder / "checkpoints" / "step-000009").mkdir(),
        "step-000009 has no manifest.json",
    ),
    "a line end behind the summary": (
        added("summary.json"),
        "summary.json is not what the run wrote, by its digest",
    ),
    "a log that replaces another one": (
        lambda folder: shutil.copy(
            folder / "journal" / "journal.log", folder / "journal" / "journal-2.log"
        ),
        "journal/journal-2.log was not there when summary.json was written",
    ),
}


@pytest.fixture
def folder_with_operations(planted: Planted) -> Path:
    """A run with operations and a final model, of which its summary knows."""
    files = ManifestedFolder(planted.folder / "operations")
    for name, content in [
        ("0", "spent"),
        ("1", "first"),
        ("2", "second"),
        ("2", "second again"),
    ]:
        files.write(f"{name}.request", content.encode())
    files.remove(["0.request"])
    files.write("2.request", b"second at last")
    files.close()
    final = planted.folder / "checkpoints" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    write_export_manifest(final)
    planted.write()
    planted.sign()
    assert examine(planted.folder).faults == []
    return planted.folder


@pytest.mark.parametrize("change", FILE_CHANGES)
def test_a_change_of_a_file_with_a_digest_is_found(
    folder_with_operations: Path, change: str
) -> None:
    changed, message = FILE_CHANGES[change]
    changed(folder_with_operations)
    faults = examine(folder_with_operations).faults
    assert [text for text in faults if message in text], faults


def test_what_has_no_digest_is_named(
    folder_with_operations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_operations
    shutil.rmtree(folder / "checkpoints" / "final")
    for name in ("page.html", "logs/a.log", "logs/b.log", "checkpoints/kept.json"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (folder / "journal" / "batches" / "step-000099.pb").touch()
    (folder / "link").symlink_to("/etc/passwd")
    assert run_verify(folder) == 0
    line, _ = capsys.readouterr().out.splitlines()
    assert line == (
        "not checked: checkpoints/final (absent), checkpoints/kept.json, journal/batches/ "
        "(1 file), journal/rows, link, logs/ (2 files), page.html"
    )


def test_operations_of_an_earlier_release_are_read_and_named(planted: Planted) -> None:
    folder = planted.folder / "operations"
    folder.mkdir()
    (folder / "000000001.request").write_bytes(b"x")
    planted.write()
    planted.sign()
    findings = examine(planted.folder)
    assert findings.faults == []
    assert findings.unchecked == ["journal/rows", "operations/ (1 file)"]


def test_a_start_behind_the_summary_is_told(planted: Planted) -> None:
    (planted.folder / "journal" / "journal-2.log").touch()
    planted.write()
    planted.sign()
    summary_path = planted.folder / "summary.json"
    summary = json.loads(summary_path.read_text())
    del summary["files"]["journal/journal-2.log"], summary["digest"]
    summary["digest"] = digest_of(json.dumps(summary, sort_keys=True).encode())
    summary_path.write_text(f"{json.dumps(summary, indent=2)}\n")
    findings = examine(planted.folder)
    assert findings.faults == []
    assert findings.losses == [
        "journal/journal-2.log is of a start behind summary.json"
    ]


def test_what_a_kill_leaves_among_operations_is_no_fault(planted: Planted) -> None:
    files = ManifestedFolder(planted.folder / "operations")
    files.write("1", b"first")
    files.write("2", b"second")
    files.close()
    folder = planted.folder / "operations"
    (folder / "2").unlink()
    (folder / ".2.77.partial").write_bytes(b"sec")
    with (folder / "manifest.jsonl").open("ab") as file:
        file.write(b'{"removed": ["1')
    planted.write()
    (planted.folder / "summary.json").unlink()
    findings = examine(planted.folder)
    assert findings.faults == ["summary.json cannot be read: No such file or directory"]
    assert findings.losses == [
        "the last line of operations/manifest.jsonl was cut off",
        "operations/.2.77.partial is what a kill has left of a file",
    ]


def test_every_kind_of_record_is_known(planted: Planted) -> None:
    for name in UNCHECKED:
        assert name in _KINDS
    planted.records += [{"kind": kind} for kind in _KINDS]
    assert not [text for text in planted.faults() if "is of another release" in text]


def test_a_flipped_bit_is_found_and_a_torn_end_is_none(planted: Planted) -> None:
    data = planted.log.read_bytes()
    planted.log.write_bytes(data + data[:20])
    assert examine(planted.folder).faults == []
    planted.log.write_bytes(data.replace(b'"kind":"step"', b'"kind":"stop"', 1))
    assert any("is damaged" in text for text in examine(planted.folder).faults)
    lines = data.splitlines(keepends=True)
    planted.log.write_bytes(b"".join(lines[:5] + lines[6:]))
    assert "journal.log: line 7 is in place 6" in examine(planted.folder).faults


def test_lines_of_a_fenced_controller_do_not_count(planted: Planted) -> None:
    planted.write()
    lines = planted.log.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    (planted.log.parent / "journal-2.log").write_bytes(b"".join(lines[middle:]))
    # A line that the first controller wrote when the second one had begun is its own.
    other = encoded(middle + 1, {"kind": "closed", "group": "g9"})
    planted.log.write_bytes(b"".join([*lines[:middle], other]))
    planted.sign()
    assert examine(planted.folder).faults == []


def manifest(planted: Planted, **changes: object) -> None:
    path = planted.folder / "checkpoints" / "step-000003"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"abc")
    digest = hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    files = [{"path": "weights", "num_bytes": 3, "digest": digest}]
    table = {"incarnation": 0, "step": 3, "files": files}
    table["weight_digest"] = planted.one("step")["digest"]
    (path / "manifest.json").write_text(json.dumps(table | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"step": 4}, "a checkpoint: step-000003 and step-000004"),
        ({"weight_digest": "00"}, "weights of version (0, 3) in step-000003: 00 and "),
        (
            {"files": [{"path": "weights", "num_bytes": 4}]},
            "step-000003/weights: 3 and 4",
        ),
        (
            {"files": [{"path": "../../summary.json", "num_bytes": 4}]},
            "summary.json: None and 4",
        ),
        (
            {"files": [{"path": "/etc/passwd", "num_bytes": 4}]},
            "/etc/passwd: None and 4",
        ),
        (
            {"files": [{"path": "weights", "num_bytes": 3, "digest": "00"}]},
            "the digest of step-000003/weights: ",
        ),
        (
            {"files": []},
            "step-000003 has a file that its manifest does not name: weights",
        ),
        (
            {"files": None},
            "the manifest of step-000003 is not what a run writes: TypeError",
        ),
    ],
)
def test_a_checkpoint_is_of_a_version_of_the_journal(
    planted: Planted, changes, told
) -> None:
    manifest(planted, **changes)
    faults = planted.faults()
    assert any(told in text for text in faults) if told else not faults


FILES = (
    "config.toml",
    "journal/journal.log",
    "journal/batches/step-000002.pb",
    "metrics.jsonl",
)


def exported(planted: Planted, **changes: object) -> Path:
    """A folder of version 3 as `checkpoint.export_every` writes it."""
    folder = planted.folder / "exports" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    version = {
        "version": 3,
        "incarnation": 0,
        "weight_digest": planted.one("step")["digest"],
    }
    (folder / "slipstream-version.json").write_text(json.dumps(version | changes))
    write_export_manifest(folder)
    return folder


def test_a_folder_beside_training_is_of_a_version_of_the_journal(
    planted: Planted,
) -> None:
    exported(planted)
    assert planted.faults() == []


def test_a_folder_beside_training_with_other_weights_is_a_fault(
    planted: Planted,
) -> None:
    folder = exported(planted, weight_digest="00")
    (folder / "config.json").write_text("[]")
    told = " ".join(planted.faults())
    assert "weights of version (0, 3) in step-000003: 00 and " in told
    assert "the digest of step-000003/config.json: " in told


@pytest.mark.parametrize(
    "name", (*FILES, "trajectories.jsonl", "groups.jsonl", "summary.json")
)
def test_a_pipe_into_which_nobody_writes_is_a_fault(
    planted: Planted, name: str
) -> None:
    (planted.folder / name).unlink()
    os.mkfifo(planted.folder / name)
    assert examine(planted.folder).faults


def test_a_line_without_an_end_is_read_in_parts(planted: Planted, monkeypatch) -> None:
    monkeypatch.setattr("slipstream.client.run_folder.LINE_BYTES", 1000)
    with planted.log.open("ab") as log:
        log.write(b"x" * 10_000 + b"\n")
    assert any("is damaged" in text for text in examine(planted.folder).faults)


def test_codes_and_texts_of_the_command(planted: Planted, capsys) -> None:
    changed_summary("weight_digest", "\x1b]0;pwned\x07")(planted)
    planted.sign()
    assert run_verify(planted.folder) == 1
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert output.endswith("faults: 1\n")
    with pytest.raises(ConfigError, match="no such folder"):
        run_verify(planted.folder / "nowhere")
    with (planted.folder / "command.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            ConfigError, match="is written by a run that goes on; end it first"
        ):
            run_verify(planted.folder)


def remove_groups_of(planted: Planted, step: int, *, but: int) -> None:
    """Removes all rows of groups of a step but the first ones."""
    path = planted.folder / "groups.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    of_step = [line for line in lines if json.loads(line)["step"] == step]
    path.write_text("".join(line for line in lines if line not in of_step[but:]))


@pytest.mark.parametrize("starts_again", [True, False])
def test_rows_that_a_crash_cut_off_are_no_fault(
    planted: Planted, capsys: pytest.CaptureFixture[str], *, starts_again: bool
) -> None:
    remove_groups_of(planted, 3, but=1)
    if starts_again:
        trained = planted.records.index(planted.one("step", 2))
        planted.records.insert(trained + 1, dict(planted.one("start")))
    planted.write()
    planted.sign()
    text = "groups.jsonl lacks 3 of the 4 groups of step 3"
    assert run_verify(planted.folder) == (0 if starts_again else 1), examine(
        planted.folder
    )
    line, _, end = capsys.readouterr().out.splitlines()
    assert line == (f"{text}, lost in a crash" if starts_again else text)
    assert end.endswith(f"faults: {0 if starts_again else 1}")

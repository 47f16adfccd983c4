"""Pipes and devices in the place of a run's files: refused in one line, and nobody waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.models.model_files import read_header
from slipstream.core.regular_files import open_regular, read_regular
from slipstream.core.run_folder import journaled_run_id
from slipstream.environments.question_files import named_rows
from slipstream.learner.controller.records.journal import Journal, read_batch
from slipstream.learner.controller.reporting.trackers import ResultFile, read_rows
from slipstream.protocol.access.tokens import read_tokens
from slipstream.protocol.checkpoints import read_manifest

ODD = "it is a pipe or a device, no regular file"
MAKERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def odd(request, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a file of a name that is no regular file."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        request.param(path)
        return path

    return make


@pytest.mark.parametrize("mode", ["rb", "r+b", "ab"])
def test_only_a_regular_file_is_opened(odd, tmp_path: Path, mode: str) -> None:
    with pytest.raises(OSError, match=ODD):
        open_regular(odd("file"), mode)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path, mode)
    with open_regular(tmp_path / "new", "ab") as file:
        file.write(b"abc")
    assert read_regular(tmp_path / "new") == b"abc"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "settings": ("run.toml", load_config),
    "a token file": ("token", read_tokens),
    "a log": ("journal/journal.log", lambda path: Journal(path.parent)),
    "a later log": ("journal/journal-50.log", lambda path: Journal(path.parent)),
    "the run's id": ("journal/journal.log", lambda path: journaled_run_id(path.parents[1])),
    "a batch": ("batches/step-000003.pb", lambda path: read_batch(path.parents[1], 3, 0)),
    "a manifest": ("step-000003/manifest.json", lambda path: read_manifest(path.parent)),
    "questions": ("questions.jsonl", lambda path: list(named_rows(path))),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_reader_refuses_what_never_ends_in_one_line(odd, name, read) -> None:
    path = odd(name)
    with pytest.raises((SlipstreamError, ConfigError)) as caught:
        read(path)
    assert "a pipe or a device, no regular file" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert name.partition("/")[0] in str(caught.value)


def test_rows_and_weights_of_what_never_ends_are_no_rows_and_no_weights(odd) -> None:
    told: list[str] = []
    path = odd("metrics.jsonl")
    assert list(read_rows(path, told.append)) == []
    rows = ResultFile(path, told.append)
    rows.append(b"{}\n")
    rows.close()
    assert [*dict.fromkeys(told)] == [
        f"{path} cannot be written: {ODD}; what comes is lost until it can",
        f"{path}: the last 1 records were lost",
    ]
    with pytest.raises(OSError, match=ODD):
        read_header(odd("model.safetensors"))

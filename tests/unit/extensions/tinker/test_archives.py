"""The REST calls about training runs, checkpoints and their files."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import archives
from slipstream.extensions.tinker.archives import Archives
from slipstream.extensions.tinker.operation_store import OperationStore
from slipstream.extensions.tinker.owners import new_session, owner_of_key
from slipstream.extensions.tinker.request_fields import Refused
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import trainer_pb2
from support.fakes.small_checkpoints import save_checkpoint
from support.fakes.small_configs import small_config

OWNER = owner_of_key(b"tml-own", "r")
SESSION = new_session(OWNER)
RUN = f"{SESSION}:train:0"
ADDRESS = "http://127.0.0.1:8000/api/v1"


def named(kind: str, name: str) -> str:
    return f"tinker://{RUN}/{kind}/{name}"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run with states of versions 1 and 2, of which that of 1 was removed, and two publishes."""
    config = small_config(run={"name": "r", "dir": str(tmp_path)})
    save_checkpoint(config.run_dir / "checkpoints", 2)
    store = OperationStore(config.run_dir / "operations")

    def end(operation: pb.Operation, **result: Any) -> None:
        store.write(operation.number, operation)
        store.end(operation.number, pb.OperationResult(is_done=True, **result))

    metadata = {"renderer_name": "own"}
    begin = pb.Operation(stream=RUN, begin=pb.Begin(), user_metadata=metadata)
    end(begin, adapter=trainer_pb2.Adapter(name="a", rank=4))
    ended = [
        ("weights", "old", 1),
        ("sampler_weights", "old", 1),
        ("external_weights", "old", 1),
    ]
    ended += [
        ("weights", "x", 2),
        ("external_weights", "x", 2),
        ("sampler_weights", "x", 2),
    ]
    for number, (kind, path, step) in enumerate([*ended, ("weights", "bad", 2)], 1):
        name = named(kind, path)
        settings: dict[str, Any] = {"save": pb.Save(name=name)}
        if kind == "sampler_weights":
            settings = {"publish": pb.Publish(name=name)}
        error = "it failed" if path == "bad" else ""
        end(
            pb.Operation(stream=RUN, number=number, **settings),
            name=name,
            step=step,
            error=error,
        )
    end(pb.Operation(stream=SESSION, number=8, finish=pb.Finish()))
    store.write(
        9, pb.Operation(stream=RUN, number=9, save=pb.Save(name=named("weights", "y")))
    )
    return config


async def asked(served: Archives, path: str, **query: str) -> Any:
    return await served.answer(path, query, ADDRESS, OWNER)


async def test_runs_have_the_checkpoints_that_can_be_loaded_and_sampled(
    config: Config,
) -> None:
    served = Archives(config)
    listed = await asked(served, f"training_runs/{RUN}/checkpoints")
    checkpoints = [
        (checkpoint["checkpoint_id"], checkpoint["checkpoint_type"])
        for checkpoint in listed["checkpoints"]
    ]
    assert checkpoints == [
        ("weights/x", "training"),
        ("external_weights/x", "external"),
        ("sampler_weights/x", "sampler"),
    ]
    run = await asked(served, f"training_runs/{RUN}")
    assert (run["lora_rank"], run["base_model"]) == (4, str(config.model.path))
    assert run["user_metadata"] == {"renderer_name": "own"}
    assert run["last_checkpoint"]["tinker_path"] == named("weights", "x")
    assert run["last_sampler_checkpoint"]["tinker_path"] == named(
        "sampler_weights", "x"
    )
    info = await asked(served, "weights_info", tinker_path=named("weights", "x"))
    assert info == {key: run[key] for key in ("base_model", "is_lora", "lora_rank")}
    for path in (named("weights", "old"), "tinker://other/weights/x"):
        assert await asked(served, "weights_info", tinker_path=path) is None
    runs = await asked(served, "training_runs")
    cursor = {"offset": 0, "limit": 100, "total_count": 1}
    assert runs == {"training_runs": [run], "cursor": cursor}
    page = await asked(served, "checkpoints", limit="1", offset="1")
    assert (page["checkpoints"], page["cursor"]["total_count"]) == (
        listed["checkpoints"][1:2],
        3,
    )
    for nothing in (
        "training_runs/other",
        f"training_runs/{RUN}/checkpoints/weights/x",
        "x",
    ):
        assert await asked(served, nothing) is None


async def test_lists_show_nobody_the_runs_of_another_key(config: Config) -> None:
    served = Archives(config)
    other = owner_of_key(b"tml-other", "r")
    for path in ("training_runs", "checkpoints"):
        assert (await served.answer(path, {}, ADDRESS, other))[path] == []
    for path in (
        f"training_runs/{RUN}",
        f"training_runs/{RUN}/checkpoints",
        files_of("x"),
    ):
        assert await served.answer(path, {}, ADDRESS, other) is None
    named_state = {"tinker_path": named("weights", "x")}
    assert await served.answer("weights_info", named_state, ADDRESS, other) is None


@pytest.mark.parametrize("query", [{"limit": "-1"}, {"offset": "-2"}, {"limit": "x"}])
async def test_a_page_is_of_whole_numbers(
    config: Config, query: dict[str, str]
) -> None:
    with pytest.raises(Refused, match="is a whole number from 0, got"):
        await asked(Archives(config), "training_runs", **query)


def files_of(name: str) -> str:
    return (
        f"training_runs/{RUN}/checkpoints/external_weights/{name}/external_weights_urls"
    )


async def test_files_of_a_checkpoint_have_secret_addresses(config: Config) -> None:
    folder = config.run_dir / "checkpoints" / "hf-000002"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights").write_bytes(b"w")
    (config.run_dir / "secret").write_text("no")
    served = Archives(config)
    urls = (await asked(served, files_of("x")))["urls"]
    assert list(urls) == ["sub/weights"]
    path = urls["sub/weights"].removeprefix(f"{ADDRESS}/")
    file = served.file(path)
    assert file.read_bytes() == b"w"
    assert (await asked(served, files_of("x")))["urls"] == urls
    secret = path.split("/")[1]
    for other in (
        f"files/{secret}/../../secret",
        f"files/{secret}/sub",
        "files/x/sub/weights",
    ):
        assert served.file(other) is None


async def test_files_that_are_exported_outlive_their_checkpoint(config: Config) -> None:
    served = Archives(config)
    assert await asked(served, files_of("old")) is None
    (config.run_dir / "checkpoints" / "hf-000001").mkdir()
    assert await asked(served, files_of("old")) is not None


async def test_an_export_that_fails_later_is_told_and_then_tried_again(
    config, monkeypatch
) -> None:
    started: list[int] = []
    fails = asyncio.Event()

    async def export(*_: object) -> int:
        started.append(1)
        await fails.wait()
        raise RunFailed("the disk is full")

    monkeypatch.setattr(archives, "run_export", export)
    monkeypatch.setattr(archives, "HOLD_S", 0)
    served = Archives(config)
    with pytest.raises(Refused, match="version 2 is exported"):
        await asked(served, files_of("x"))
    (task,) = served._exports.values()
    fails.set()
    await asyncio.wait([task])
    with pytest.raises(Refused, match="the disk is full"):
        await asked(served, files_of("x"))
    with pytest.raises(Refused, match="version 2 is exported"):
        await asked(served, files_of("x"))
    assert len(started) == 2

"""The REST calls about training runs, checkpoints and their files."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import archives
from slipstream.extensions.tinker.archives import Archives, NotReady
from slipstream.extensions.tinker.operations import Refused
from slipstream.extensions.tinker.store import OperationStore
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import trainer_pb2
from support.fakes.small_checkpoints import save_checkpoint
from support.fakes.small_configs import small_config

RUN = "s1:train:0"
ADDRESS = "http://127.0.0.1:8000/api/v1"


def named(kind: str, name: str) -> str:
    return f"tinker://{RUN}/{kind}/{name}"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run with states of versions 1 and 2, of which that of 1 was removed, and two publishes."""
    config = small_config(run={"name": "r", "dir": str(tmp_path)})
    save_checkpoint(config.run_dir / "checkpoints", 2)
    store = OperationStore(config.run_dir / "operations")
    adapter = trainer_pb2.Adapter(name="a", rank=4)
    ended: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"begin": pb.Begin()}, {"adapter": adapter}),
        ({"save": pb.Save(name=named("weights", "old"))}, {"step": 1}),
        ({"publish": pb.Publish(name=named("sampler_weights", "old"))}, {"step": 1}),
        ({"save": pb.Save(name=named("external_weights", "old"))}, {"step": 1}),
        ({"save": pb.Save(name=named("weights", "x"))}, {"step": 2}),
        ({"save": pb.Save(name=named("external_weights", "x"))}, {"step": 2}),
        ({"publish": pb.Publish(name=named("sampler_weights", "x"))}, {"step": 2}),
        ({"save": pb.Save(name=named("weights", "bad"))}, {"step": 2, "error": "it failed"}),
    ]
    for number, (operation, result) in enumerate(ended):
        told_of = {"user_metadata": {"renderer_name": "own"}} if number == 0 else {}
        store.write(number, pb.Operation(stream=RUN, number=number, **operation, **told_of))
        name = next(iter(operation.values()))
        told = {} if isinstance(name, pb.Begin) else {"name": name.name}
        store.end(number, pb.OperationResult(is_done=True, **told, **result))
    finish = pb.Operation(stream="s1", finish=pb.Finish())
    store.write(8, finish)
    store.end(8, pb.OperationResult(is_done=True))
    store.write(9, pb.Operation(stream=RUN, number=8, save=pb.Save(name=named("weights", "y"))))
    return config


async def test_runs_have_the_checkpoints_that_can_be_loaded_and_sampled(config: Config) -> None:
    served = Archives(config)
    listed = await served.answer(f"training_runs/{RUN}/checkpoints", {}, ADDRESS)
    assert listed is not None
    told = [(one["checkpoint_id"], one["checkpoint_type"]) for one in listed["checkpoints"]]
    assert told == [
        ("weights/x", "training"),
        ("external_weights/x", "external"),
        ("sampler_weights/x", "sampler"),
    ]
    run = await served.answer(f"training_runs/{RUN}", {}, ADDRESS)
    assert run is not None
    assert (run["lora_rank"], run["base_model"]) == (4, str(config.model.path))
    assert run["user_metadata"] == {"renderer_name": "own"}
    info = await served.answer("weights_info", {"tinker_path": named("weights", "x")}, ADDRESS)
    assert info == {key: run[key] for key in ("base_model", "is_lora", "lora_rank")}
    for path in (named("weights", "old"), "tinker://other/weights/x"):
        assert await served.answer("weights_info", {"tinker_path": path}, ADDRESS) is None
    assert run["last_checkpoint"]["tinker_path"] == named("weights", "x")
    assert run["last_sampler_checkpoint"]["tinker_path"] == named("sampler_weights", "x")
    runs = await served.answer("training_runs", {}, ADDRESS)
    assert runs == {
        "training_runs": [run],
        "cursor": {"offset": 0, "limit": 100, "total_count": 1},
    }
    page = await served.answer("checkpoints", {"limit": "1", "offset": "1"}, ADDRESS)
    assert page is not None
    assert (page["checkpoints"], page["cursor"]["total_count"]) == (listed["checkpoints"][1:2], 3)
    for nothing in ("training_runs/other", f"training_runs/{RUN}/checkpoints/weights/x", "x"):
        assert await served.answer(nothing, {}, ADDRESS) is None


async def test_what_has_ended_is_read_once_and_what_is_removed_goes(config: Config) -> None:
    served, folder = Archives(config), config.run_dir / "operations"
    before = await served.answer("checkpoints", {}, ADDRESS)
    for path in folder.glob("*.result"):
        path.write_bytes(b"another reader would fail")
    assert await served.answer("checkpoints", {}, ADDRESS) == before
    for path in folder.glob("*.result"):
        path.unlink()
    gone = await served.answer("checkpoints", {}, ADDRESS)
    assert gone is not None
    assert gone["checkpoints"] == []


@pytest.mark.parametrize("query", [{"limit": "-1"}, {"offset": "-2"}, {"limit": "x"}])
async def test_a_page_is_of_whole_numbers(config: Config, query: dict[str, str]) -> None:
    with pytest.raises(Refused, match="is a whole number from 0, got"):
        await Archives(config).answer("training_runs", query, ADDRESS)


async def test_files_of_a_checkpoint_have_secret_addresses(config: Config) -> None:
    folder = config.run_dir / "checkpoints" / "hf-000002"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights").write_bytes(b"w")
    (config.run_dir / "secret").write_text("no")
    served = Archives(config)
    asked = f"training_runs/{RUN}/checkpoints/external_weights/x/external_weights_urls"
    found = await served.answer(asked, {}, ADDRESS)
    assert found is not None
    assert list(found["urls"]) == ["sub/weights"]
    path = found["urls"]["sub/weights"].removeprefix(f"{ADDRESS}/")
    file = served.file(path)
    assert file is not None
    assert file.read_bytes() == b"w"
    again = await served.answer(asked, {}, ADDRESS)
    assert again is not None
    assert again["urls"] == found["urls"]
    secret = path.split("/")[1]
    for other in (f"files/{secret}/../../secret", f"files/{secret}/sub", "files/x/sub/weights"):
        assert served.file(other) is None


async def test_files_that_are_exported_outlive_their_checkpoint(config: Config) -> None:
    asked = f"training_runs/{RUN}/checkpoints/external_weights/old/external_weights_urls"
    served = Archives(config)
    assert await served.answer(asked, {}, ADDRESS) is None
    (config.run_dir / "checkpoints" / "hf-000001").mkdir()
    assert await served.answer(asked, {}, ADDRESS) is not None


async def test_an_export_that_fails_later_is_told_and_then_tried_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = f"training_runs/{RUN}/checkpoints/external_weights/x/external_weights_urls"
    started: list[int] = []
    fails = asyncio.Event()

    async def export(*_: object) -> int:
        started.append(1)
        await fails.wait()
        raise RunFailed("the disk is full")

    monkeypatch.setattr(archives, "run_export", export)
    monkeypatch.setattr(archives, "HOLD_S", 0)
    served = Archives(config)
    with pytest.raises(NotReady):
        await served.answer(asked, {}, ADDRESS)
    (task,) = served._exports.values()
    fails.set()
    await asyncio.wait([task])
    with pytest.raises(Refused, match="the disk is full"):
        await served.answer(asked, {}, ADDRESS)
    with pytest.raises(NotReady):
        await served.answer(asked, {}, ADDRESS)
    assert len(started) == 2

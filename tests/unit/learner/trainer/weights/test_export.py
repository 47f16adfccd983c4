import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.learner.trainer.weights.export import HfFolderWriter


def write(source: Path, folder: Path, max_shard_bytes: int) -> dict[str, torch.Tensor]:
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float32", "hidden_size": 4}))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("old weights")
    (source / "model.safetensors.index.json").write_text("old index")
    tensors = {name: torch.full((4,), float(place)) for place, name in enumerate("abcde")}
    moved: list[int] = []
    partial = folder.with_name("out.partial")
    writer = HfFolderWriter(partial, moved.append, max_shard_bytes=max_shard_bytes)
    writer.begin(source)
    for name, tensor in tensors.items():
        if not writer.has_room(tensor):
            writer.flush()
        writer.add(name, tensor)
    assert not folder.exists()
    writer.finish("bfloat16", folder)
    assert not partial.exists()
    assert sum(moved) == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return tensors


def test_small_model_is_one_file_beside_configuration_and_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tensors = write(tmp_path / "in", folder, 1 << 20)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    assert json.loads((folder / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "hidden_size": 4,
    }


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "in", tmp_path / "out", 1 << 20)
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == (tmp_path / "other").stat().st_mode & 0o777 == 0o640


def test_large_model_is_several_files_with_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tensors = write(tmp_path / "in", folder, 32)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80}
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{place}-of-00003.safetensors" for place in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], tensors[name])
    assert len(list(folder.glob("*.safetensors"))) == 3


def test_layers_that_predict_further_tokens_are_copied_as_they_are(tmp_path: Path) -> None:
    source, folder = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    names = ["model.layers.1.a", "model.layers.2.a", "model.layers.10.eh_proj.weight", "mtp.fc"]
    kept = {name: torch.full((4,), float(place)) for place, name in enumerate(names)}
    save_file({name: kept[name] for name in names[:2]}, source / "one.safetensors")
    save_file({name: kept[name] for name in names[2:]}, source / "two.safetensors")
    trained = torch.ones(4)
    # A file for each tensor.
    writer = HfFolderWriter(tmp_path / "out.partial", lambda _: None, max_shard_bytes=16)
    writer.begin(source)
    writer.add("model.layers.1.a", trained)
    writer.copy_untrained(source)
    writer.finish("float32", folder)
    paths = list(folder.glob("*.safetensors"))
    assert len(paths) == 4
    found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert set(found) == set(names)
    assert torch.equal(found["model.layers.1.a"], trained)
    assert all(torch.equal(found[name], kept[name]) for name in names[1:])


def test_a_file_that_the_index_does_not_name_is_not_copied(tmp_path: Path) -> None:
    source, folder = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    save_file({"mtp.fc": torch.zeros(4), "mtp.old": torch.zeros(4)}, source / "a.safetensors")
    save_file({"mtp.fc": torch.ones(4)}, source / "b.safetensors")
    index = {"weight_map": {"mtp.fc": "b.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    writer = HfFolderWriter(tmp_path / "out.partial", lambda _: None)
    writer.begin(source)
    writer.copy_untrained(source)
    writer.finish("float32", folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == {"mtp.fc"}
    assert torch.equal(found["mtp.fc"], torch.ones(4))


@pytest.mark.parametrize("moment", ["begin", "write"])
def test_a_folder_for_which_the_disk_has_no_room_is_removed(moment: str, tmp_path: Path) -> None:
    """What is left of it would keep the disk full."""
    partial = tmp_path / "out.partial"

    def full(num_bytes: int) -> None:
        assert partial.is_dir()
        raise OSError(28, "No space left on device")

    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text("{}")
    writer = HfFolderWriter(partial, full)
    if moment == "begin":
        (source / "tokenizer.json").symlink_to("missing")
    else:
        writer.begin(source)
        writer.add("a", torch.zeros(4))
    with pytest.raises(OSError):
        writer.begin(source) if moment == "begin" else writer.finish("float32", tmp_path / "out")
    assert not partial.exists()

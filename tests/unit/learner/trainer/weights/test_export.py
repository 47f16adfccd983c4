import importlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import EXPORT_MANIFEST
from slipstream.learner.trainer.weights import export
from slipstream.learner.trainer.weights.export import (
    HfFolderWriter,
    save_adapters,
    write_adapter,
)
from slipstream.learner.trainer.weights.export_plan import peft_name
from slipstream.learner.trainer.weights.run_chat import RunChat
from support.fakes.chat_models import make_chat_tokenizer
from support.fakes.small_configs import small_config
from support.ranks.thread_ranks import run_ranks


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {
        n: t
        for path in folder.glob("*.safetensors")
        for n, t in load_file(path).items()
    }


def exported(
    source: Path,
    folder: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    chat: RunChat = RunChat(),  # noqa: B008
    dtype: str = "float32",
    further: bool = False,
    moved: Callable[[int], None] = lambda _: None,
) -> Path:
    """Writes `tensors` and, with `further`, what is not trained, as `save_hf_folder` does."""
    partial = folder.with_name("partial")
    writer = HfFolderWriter(partial, moved)
    writer.begin(source, chat)
    for name, tensor in ({"a": torch.zeros(4)} if tensors is None else tensors).items():
        if not writer.has_room(tensor):
            writer.flush()
        writer.add(name, tensor)
    if further:
        writer.copy_untrained(source)
    assert not folder.exists()
    writer.finish(dtype, folder)
    assert not partial.exists()
    return folder


def write(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps({"torch_dtype": "float32", "hidden_size": 4})
    )
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("old weights")
    (source / "model.safetensors.index.json").write_text("old index")
    tensors = {
        name: torch.full((4,), float(place)) for place, name in enumerate("abcde")
    }
    moved: list[int] = []
    exported(source, folder, tensors, dtype="bfloat16", moved=moved.append)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    written = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    # Every file in the folder is read once more, for its digests.
    assert sum(moved) == written + sum(sizes.values()) - sizes[EXPORT_MANIFEST]
    return tensors


def further_layers(
    source: Path, num_layers: int, **files: dict[str, torch.Tensor]
) -> None:
    """Makes a model's folder of `num_layers` trained layers, and others."""
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers}))
    for name, tensors in files.items():
        save_file(tensors, source / f"{name}.safetensors")


def test_small_model_is_one_file_beside_configuration_and_tokenizer(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "out"
    tensors = write(tmp_path / "in", folder)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        EXPORT_MANIFEST,
    }
    stored = read(folder)
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    assert json.loads((folder / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "hidden_size": 4,
    }


def test_whoever_may_read_the_configuration_may_read_the_weights(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "in", tmp_path / "out")
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()
    }
    assert (
        modes["model.safetensors"]
        == (tmp_path / "other").stat().st_mode & 0o777
        == 0o640
    )


def test_large_model_is_several_files_with_an_index(
    tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "out"
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 32)
    tensors = write(tmp_path / "in", folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80}
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{place}-of-00003.safetensors" for place in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], tensors[name])
    assert len(list(folder.glob("*.safetensors"))) == 3


def test_layers_that_predict_further_tokens_are_copied_as_they_are(
    tmp_path, monkeypatch
) -> None:
    names = [
        "model.layers.1.a",
        "model.layers.2.a",
        "model.layers.10.eh_proj.weight",
        "mtp.fc",
    ]
    tensors = {name: torch.full((4,), float(place)) for place, name in enumerate(names)}
    first_tensors, two = (
        {name: tensors[name] for name in some} for some in (names[:2], names[2:])
    )
    further_layers(tmp_path / "in", 2, one=first_tensors, two=two)
    trained = {names[0]: torch.ones(4)}
    # A file for each tensor.
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 16)
    folder = exported(tmp_path / "in", tmp_path / "out", trained, further=True)
    assert len(list(folder.glob("*.safetensors"))) == 4
    stored = read(folder)
    assert set(stored) == set(names)
    assert all(torch.equal(stored[name], (tensors | trained)[name]) for name in names)


@pytest.mark.parametrize("max_shard_bytes", [16, 1 << 20])
def test_copies_of_trained_tensors_in_further_layers_are_those_of_the_trained(
    max_shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM and SGLang draft with them, in which the model's own would be stale."""
    values = {
        "model.embed_tokens.weight": 1.0,
        "lm_head.weight": 2.0,
        "model.layers.1.embed_tokens.weight": 1.0,
        "model.layers.1.shared_head.head.weight": 2.0,
        "model.layers.2.shared_head.head.weight": 3.0,
        "model.layers.1.shared_head.norm.weight": 3.0,
    }
    before = {name: torch.full((4,), value) for name, value in values.items()}
    further_layers(tmp_path / "in", 1, a=before)
    trained = {name: before[name] * 10 for name in list(values)[:2]}
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", max_shard_bytes)
    stored = read(exported(tmp_path / "in", tmp_path / "out", trained, further=True))
    assert {name: stored[name][0].item() for name in values} == {
        name: value if value == 3.0 else 10 * value for name, value in values.items()
    }


def test_a_file_that_the_index_does_not_name_is_not_copied(tmp_path: Path) -> None:
    old = {"mtp.fc": torch.zeros(4), "mtp.old": torch.zeros(4)}
    further_layers(tmp_path / "in", 2, a=old, b={"mtp.fc": torch.ones(4)})
    index = {"weight_map": {"mtp.fc": "b.safetensors"}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = read(exported(tmp_path / "in", tmp_path / "out", {}, further=True))
    assert stored.keys() == {"mtp.fc"}
    assert torch.equal(stored["mtp.fc"], torch.ones(4))


def test_a_tower_that_is_not_trained_is_exported_as_it_is(tmp_path: Path) -> None:
    tower = {
        "vision_tower.a": torch.randn(4),
        "mm_projector.b": torch.randn(4),
    }
    norm = "language_model.model.norm.weight"
    decoder = {norm: torch.zeros(4)}
    further_layers(tmp_path / "in", 1, a=tower | decoder)
    values = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "tie_word_embeddings": False,
    }
    config = tmp_path / "in" / "config.json"
    config.write_text(json.dumps(values))
    trained = {norm: torch.ones(4)}
    folder = exported(
        tmp_path / "in",
        tmp_path / "out",
        trained,
        further=True,
    )
    stored = read(folder)
    expected = tower | trained
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name


def test_adapters_are_named_by_transformers_modules_of_the_decoder() -> None:
    name = "layers.3.self_attn.q_a_proj.weight"
    end = "layers.3.self_attn.q_a_proj.lora_A.weight"
    beside_a_tower = f"base_model.model.model.language_model.{end}"
    beside_idle = peft_name(
        f"language_model.model.{name}",
        "lora_A",
        has_vision=False,
    )
    assert beside_idle == beside_a_tower
    beside_trained = peft_name(
        f"model.language_model.{name}",
        "lora_A",
        has_vision=True,
    )
    assert beside_trained == beside_a_tower
    alone = peft_name(f"model.{name}", "lora_A", has_vision=False)
    assert alone == f"base_model.model.model.{end}"


@pytest.mark.parametrize("moment", ["begin", "write"])
def test_a_folder_for_which_the_disk_has_no_room_is_removed(
    moment: str, tmp_path: Path
) -> None:
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
        writer.begin(source, RunChat())
        writer.add("a", torch.zeros(4))
    with pytest.raises(OSError):
        writer.begin(source, RunChat()) if moment == "begin" else writer.finish(
            "float32", tmp_path / "out"
        )
    assert not partial.exists()


def test_a_folder_has_the_runs_template_in_place_of_the_models(tmp_path: Path) -> None:
    """transformers reads it, and no other place of the folder keeps another one."""
    from transformers import AutoTokenizer

    source = tmp_path / "in"
    make_chat_tokenizer(source, "{{ 'the model' }}")
    (source / "config.json").write_text("{}")
    text = (source / "chat_template.jinja").read_text()
    for name in ("tokenizer_config.json", "processor_config.json"):
        path = source / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(settings | {"chat_template": text}))
    (source / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(text)
    chat = RunChat("{{ 'the run' }}", {"enable_thinking": False})
    folder = exported(source, tmp_path / "out", chat=chat)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "the run"
    texts = [path.read_text() for path in folder.rglob("*.json*")]
    assert not [text for text in texts if "the model" in text]
    # The values of a template cannot be part of it: people are told.
    assert '`{"enable_thinking": false}`' in (folder / "README.md").read_text()
    as_it_was = exported(source, tmp_path / "other")
    assert (as_it_was / "chat_template.jinja").read_text() == text
    assert not (as_it_was / "README.md").exists()


def test_files_that_training_makes_stale_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "in"
    stale = [
        "m.Q4_K_M.gguf",
        "draft/config.json",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "original/consolidated.pth",
    ]
    stale += [
        "adapter_config.json",
        "tf_model.h5",
        "flax_model.msgpack",
        "rust_model.ot",
        "m.bin",
    ]
    for name in (
        "config.json",
        "tokenizer.json",
        "README.md",
        "modeling_own.py",
        *stale,
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    folder = exported(source, tmp_path / "out")
    names = {
        "README.md",
        "config.json",
        "model.safetensors",
        "modeling_own.py",
        "tokenizer.json",
    }
    assert {path.name for path in folder.rglob("*")} == {*names, EXPORT_MANIFEST}
    manifest = json.loads((folder / EXPORT_MANIFEST).read_text())
    assert {entry["path"] for entry in manifest["files"]} == names


def test_a_read_only_model_s_export_can_be_written(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "inner").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "inner/more.json"):
        (source / name).write_text("{}")
    for path in (*source.rglob("*"), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder = exported(source, tmp_path / "out")
    assert all(
        path.stat().st_mode & stat.S_IWUSR for path in (folder, *folder.rglob("*"))
    )


def test_a_template_that_cannot_be_read_is_named_before_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = {
        "chat_template": str(tmp_path / "no.jinja"),
        "chat_template_kwargs": {"a": 1},
    }
    config = small_config(model={"path": str(tmp_path)}, rollout_server=server)
    with pytest.raises(ConfigError, match="rollout_server.chat_template: .*no.jinja"):
        RunChat.of(config)
    (tmp_path / "no.jinja").write_text("a")
    assert RunChat.of(config) == RunChat("a", {"a": 1})


def adapter_settings(
    folder: Path, model_type: str, *matrices: str
) -> dict[str, object]:
    """The settings of an exported folder with adapters on `matrices`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = small_config(model={"path": str(folder)}, lora={"rank": 4, "alpha": 8})
    paths = [f"base_model.model.model.layers.0.{name}" for name in matrices]
    tensors = {
        f"{path}.lora_{factor}.weight": torch.zeros(1)
        for path in paths
        for factor in "AB"
    }
    write_adapter(tensors, config, folder / "out", lambda _: None)
    parsed = json.loads((folder / "out" / "adapter_config.json").read_text())
    names = ("target_modules", "target_parameters")
    return {name: parsed[name] for name in names if name in parsed}


def test_adapters_name_their_matrices_as_peft_finds_them(tmp_path: Path) -> None:
    """PEFT itself reads such folders in tests/integration/test_peft.py."""
    dense = adapter_settings(
        tmp_path / "dense", "llama", "self_attn.q_proj", "mlp.up_proj"
    )
    assert dense == {"target_modules": ["q_proj", "up_proj"]}
    names = ("mlp.up_proj", "mlp.experts.3.up_proj", "mlp.shared_experts.up_proj")
    mixture = adapter_settings(tmp_path / "glm", "glm4_moe", "self_attn.q_proj", *names)
    assert mixture == {
        "target_modules": ["q_proj", "up_proj"],
        "target_parameters": ["mlp.up_proj.weight", "shared_experts.up_proj.weight"],
    }
    # The trainer registers this kind with transformers.
    importlib.import_module("slipstream.core.models.registered_kinds")
    own_code = adapter_settings(tmp_path / "kimi", "kimi_k2", *names)
    assert own_code == {"target_modules": ["up_proj"]}
    names = tuple(f"block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3"))
    minimax = adapter_settings(tmp_path / "minimax", "minimax_m2", *names)
    assert minimax["target_modules"] == ["w1", "w2", "w3"]


def test_adapters_that_no_client_has_used_are_an_empty_folder(tmp_path: Path) -> None:
    target = tmp_path / "adapters"
    for _ in range(2):
        adapters = SimpleNamespace(sizes={}, are_clients=True)
        run_ranks(
            1,
            lambda ranks: save_adapters(
                SimpleNamespace(adapters=adapters, ranks=ranks),  # noqa: B023
                small_config(),
                target,
                RunChat(),
            ),
        )
        assert not list(target.iterdir())

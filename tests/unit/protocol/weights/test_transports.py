"""Which transport joins which places."""

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import ParallelSection
from slipstream.protocol.weights.transports import choose_transport
from support.rigs.publishing_scene import place

CPU = place("here")
GPU_0, GPU_1, GPU_2 = (place("here", f"GPU-{n}") for n in range(3))
ELSEWHERE = place("there", "GPU-9")
PLAIN = ParallelSection()


@pytest.mark.parametrize(
    ("learner", "servers", "chosen"),
    [
        ([CPU], {"a": CPU}, "gloo"),
        ([CPU], {"a": CPU, "b": place("there")}, "gloo"),
        ([GPU_0], {"a": CPU}, "gloo"),
        ([GPU_0], {"a": GPU_1}, "nccl"),
        ([GPU_0, GPU_1], {"a": GPU_2, "b": ELSEWHERE}, "nccl"),
        ([GPU_0], {"a": GPU_0}, "ipc"),
        ([GPU_0], {"a": GPU_0, "b": GPU_1}, "ipc"),
        ([GPU_0], {"a": GPU_1, "b": GPU_1}, "ipc"),
        ([GPU_0], {"a": place("here", "GPU-1", "GPU-0")}, "ipc"),
    ],
)
def test_auto_is_what_joins_them(learner, servers, chosen):
    assert choose_transport("auto", learner, servers, parallel=PLAIN) == chosen
    assert choose_transport(chosen, learner, servers, parallel=PLAIN) == chosen


@pytest.mark.parametrize(
    ("setting", "learner", "servers", "said"),
    [
        (
            "nccl",
            [GPU_0],
            {"a": GPU_0},
            "but trainer rank 0 and a share GPU-0: set ipc or auto",
        ),
        (
            "nccl",
            [GPU_0],
            {"a": CPU},
            "nccl joins GPUs only, but a computes on the CPU",
        ),
        ("nccl", [CPU], {"a": CPU}, "but trainer rank 0 computes on the CPU: set gloo"),
        (
            "ipc",
            [GPU_0],
            {"a": ELSEWHERE},
            "but a runs on another one than trainer rank 0",
        ),
        ("ipc", [CPU], {"a": place("there")}, "ipc works within one host"),
        (
            "ipc",
            [GPU_0],
            {"a": CPU},
            "ipc joins either GPUs or CPUs, but a computes on the CPU",
        ),
        ("auto", [GPU_0], {"a": GPU_0, "b": ELSEWHERE}, "but b runs on another one"),
    ],
)
def test_what_cannot_join_them_is_refused_with_value_and_rule(
    setting, learner, servers, said
):
    with pytest.raises(ConfigError, match=said):
        choose_transport(setting, learner, servers, parallel=PLAIN)


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (
            {"NCCL_PROTO": "Simple"},
            {},
            "NCCL_PROTO is Simple in trainer rank 0 and not set in b",
        ),
        (
            {},
            {"NCCL_ALGO": "Ring"},
            "NCCL_ALGO is not set in trainer rank 0 and Ring in b",
        ),
        (
            {"NCCL_ALGO": "tree"},
            {"NCCL_ALGO": "ring"},
            "NCCL_ALGO is tree in .* and ring in b",
        ),
    ],
)
def test_nccl_joins_members_that_are_told_the_same(mine, theirs, said):
    places = {
        "a": place("here", "GPU-1", **mine),
        "b": place("here", "GPU-2", **theirs),
    }
    learner = [place("here", "GPU-0", **mine)]
    with pytest.raises(ConfigError, match=said):
        choose_transport("auto", learner, places, parallel=PLAIN)
    del places["b"]
    assert choose_transport("auto", learner, places, parallel=PLAIN) == "nccl"
    # Other transports do not need it.
    shared = {"b": place("here", "GPU-0", **theirs)}
    assert choose_transport("auto", learner, shared, parallel=PLAIN) == "ipc"


def test_ipc_takes_the_weights_of_one_rank() -> None:
    for parallel in (ParallelSection(pp=2), ParallelSection(ep=2)):
        assert (
            choose_transport("auto", [GPU_0], {"a": GPU_1}, parallel=parallel) == "nccl"
        )
        with pytest.raises(ConfigError, match="pp and ep must be 1, got"):
            choose_transport("auto", [GPU_0], {"a": GPU_0}, parallel=parallel)


def test_ipc_and_gloo_may_be_chosen_where_nccl_would_be() -> None:
    for setting in ("ipc", "gloo"):
        assert (
            choose_transport(setting, [GPU_0], {"a": GPU_1}, parallel=PLAIN) == setting
        )
    assert choose_transport("ipc", [CPU], {"a": CPU}, parallel=PLAIN) == "ipc"

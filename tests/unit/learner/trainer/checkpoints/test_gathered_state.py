"""What one rank gathers of the distributed optimizer, and which files it does not read."""

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints import distributed_files  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402


def test_a_parameter_lies_where_it_is_in_the_buffer() -> None:
    # Begin and end in its bucket; nothing fills the first bucket between its parameters.
    ranges = [{"a": (0, 6), "b": (6, 9)}, {"c": (0, 5)}]
    offsets, sizes = [0, 12], [12, 8]
    states = {
        name: {key: torch.randn(end - begin) for key in distributed_files.KEYS}
        for bucket in ranges
        for name, (begin, end) in bucket.items()
    }
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(size), offset=offset)
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    maps = [
        {
            name: {"gbuf_local": SimpleNamespace(start=begin, end=end)}
            for name, (begin, end) in bucket.items()
        }
        for bucket in ranges
    ]
    part = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        buffers=[SimpleNamespace(numel=20, numel_unpadded=14, buckets=buckets)],
        gbuf_ranges=[{"float32": [{"param_map": its} for its in maps]}],
        _get_main_param_and_optimizer_states=states.__getitem__,
    )
    host = HostCopies(torch.device("cpu"), part_elements=4)
    found = distributed_files._gather(part, host, use_gloo_comm=True)
    assert found is not None
    (whole,) = found[0].values()
    assert whole["numel_unpadded"] == 14
    for key in distributed_files.KEYS:
        assert len(whole[key]) == 20
        for offset, bucket in zip(offsets, ranges, strict=True):
            for name, (begin, end) in bucket.items():
                assert torch.equal(whole[key][offset + begin : offset + end], states[name][key])


def test_a_folder_without_its_common_state_is_refused_before_its_index_is_read(
    tmp_path: Path,
) -> None:
    canary = tmp_path / "canary"
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    (tmp_path / ".metadata").write_bytes(f"cos\nsystem\n(Vtouch {canary}\ntR.".encode())
    with pytest.raises(CheckpointError, match=r"does not hold this model: common\.pt is missing"):
        distributed_files.load_models([], tmp_path, disk=None)
    assert not canary.exists()

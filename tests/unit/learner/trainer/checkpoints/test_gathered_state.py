"""What one rank gathers of the distributed optimizer, where a buffer has several buckets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.learner.trainer.checkpoints import gathered_state  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402


def test_buckets_follow_each_other_without_what_fills_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered_state, "PART_ELEMENTS", 4)
    # Begin and end in its bucket; nothing fills the first bucket between its parameters.
    ranges = [{"a": (0, 6), "b": (6, 9)}, {"c": (0, 5)}]
    filled_up, unpadded = [12, 8], [9, 5]
    states = {
        name: {key: torch.randn(end - begin) for key in gathered_state.KEYS}
        for bucket in ranges
        for name, (begin, end) in bucket.items()
    }
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(size), numel_unpadded=count)
        for size, count in zip(filled_up, unpadded, strict=True)
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
        buffers=[SimpleNamespace(numel_unpadded=14, buckets=buckets)],
        gbuf_ranges=[{"float32": [{"param_map": its} for its in maps]}],
        _get_main_param_and_optimizer_states=states.__getitem__,
    )
    found = gathered_state._gather(part, HostCopies(torch.device("cpu")), use_gloo_comm=True)
    assert found is not None
    (whole,) = found[0].values()
    assert whole["numel_unpadded"] == 14
    for key in gathered_state.KEYS:
        expected = torch.cat([states[name][key] for name in "abc"])
        assert torch.equal(whole[key], expected)

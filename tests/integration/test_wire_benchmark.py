"""Both ends of the wire agree on every bit, over gloo, as the benchmark starts them."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from benchmarks.weights import delta, wire


def test_receivers_hold_what_the_sender_made_up(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        device="cpu", shape="tiny", servers=2, repeats=2, bucket_mib=1, name="wire", delta="off"
    )
    # RuntimeError where a digest or a parameter differs.
    found: dict[str, Any] = {"ours": [], "raw": []}
    asyncio.run(wire.measure(arguments, tmp_path, found))
    assert len(found["ours"]) == 2
    lines, ratios = wire.summary(found)
    assert lines[-2].startswith("| ours | ")
    assert lines[-1].startswith("Before a publish: the pass for the digests ")
    assert not ratios


def test_receivers_hold_what_the_steps_of_the_sender_changed(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        device="cpu",
        shape="tiny",
        servers=2,
        repeats=2,
        bucket_mib=1,
        name="delta",
        delta="host",
        learning_rate=1e-6,
    )
    # RuntimeError where a digest or a parameter differs.
    found = asyncio.run(delta.measure(arguments, tmp_path))
    whole, changes = found["whole"], found["delta"]
    assert len(whole) == len(changes) == 2
    for row, other in zip(changes, whole, strict=True):
        # A step of 1e-6 changes less than two of a hundred weights of this size.
        assert 0.002 < row["changed"] < 0.02
        assert 10 * row["num_bytes"] < other["num_bytes"]
    lines, ratios = delta.summary(found)
    assert any(line.startswith("| changes | ") for line in lines)
    assert ratios["bytes of a whole publish"] < 0.1

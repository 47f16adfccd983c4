"""Both ends of the wire agree on every bit, over gloo, as the benchmark starts them."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weights import wire


@pytest.mark.long
def test_receivers_hold_what_the_sender_made_up(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        device="cpu", shape="tiny", servers=2, repeats=2, bucket_mib=1, name="wire"
    )
    # RuntimeError where a digest or a parameter differs.
    found: dict[str, Any] = {"ours": [], "raw": []}
    asyncio.run(wire.measure(arguments, tmp_path, found))
    assert len(found["ours"]) == 2
    lines, ratios = wire.summary(found)
    assert lines[-2].startswith("| ours | ")
    assert lines[-1].startswith("Before a publish: the pass for the digests ")
    assert not ratios

"""Requests of a process to the system and to its interpreter."""

from __future__ import annotations

import gc

import pytest
from slipstream.protocol.machine.process import without_collections


def test_objects_made_without_collections_stay_and_the_collector_is_as_before() -> None:
    frozen = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            kept = [[] for _ in range(1000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_the_collector_is_on_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()

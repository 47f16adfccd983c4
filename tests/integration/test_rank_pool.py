"""The pool of ranks that other tests use: what it gives a rank, and how it ends when one fails."""

import ipaddress
import os
import sys
import threading
from pathlib import Path

import pytest
from support.ranks.rank_pool import RankPool

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_rank(folder: Path, job: str) -> None:
    """This file is a program of ranks, too."""
    rank = os.environ["RANK"]
    # In the name: a rank that is ended may have made a file and not filled it.
    (folder / f"{job}-pid-{os.getpid()}").touch()
    if job == "environment":
        values = " ".join(os.environ[name] for name in NAMES)
        (folder / f"{job}-{rank}").write_text(f"{values} {'megatron.core' in sys.modules}")
    elif rank == "1" and job != "hang":
        print("the last words of a rank", flush=True)
        os._exit(3)
    else:
        threading.Event().wait()


def test_every_rank_gets_its_place_and_what_is_imported(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(Path(__file__), ["environment"], world_size=2, folder=tmp_path)
    first, second = ((tmp_path / f"environment-{rank}").read_text().split() for rank in (0, 1))
    assert first[:4] == ["0", "2", "0", "2"]
    assert second[:4] == ["1", "2", "1", "2"]
    assert first[4] == second[4]
    assert ipaddress.ip_address(first[4]).is_loopback
    assert first[5] == second[5]
    assert first[6] == second[6] == "True"


def test_first_rank_that_dies_ends_the_others_and_its_output_is_shown(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 of 3: exit code 3.*last words"):
        rank_pool.run(Path(__file__), ["die"], world_size=3, folder=tmp_path)
    check_gone(tmp_path, "die")


def test_ranks_that_wait_for_ever_are_ended_at_the_limit(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no end after 3 s"):
        rank_pool.run(Path(__file__), ["hang"], world_size=2, folder=tmp_path, limit_s=3)
    check_gone(tmp_path, "hang")


def check_gone(folder: Path, job: str) -> None:
    files = list(folder.glob(f"{job}-pid-*"))
    assert files
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name.rpartition("-")[2]), 0)

"""The program of the ranks that hold models of several layouts; results lie in FOLDER/JOB.pt."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from slipstream.protocol.config import LearnerSection, ParallelSection


def run_rank(folder: Path, job: str) -> None:
    """What every rank of a job does."""
    JOBS[job](folder)


def groups(folder: Path) -> None:
    """Two ranks, the policy in tp 2, others in dp 2 and pp 2; without any model."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from slipstream.learner.trainer.grid import known_globals
    from slipstream.learner.trainer.parallel import Launch, Ranks

    learner = LearnerSection(world_size=2, parallel=ParallelSection(tp=2))
    ranks = Ranks(Launch.from_environment(), learner, seed=1)
    replicas = ranks.placed(ParallelSection())
    stages = ranks.placed(ParallelSection(pp=2))
    before = dict(vars(parallel_state))
    made = len(parallel_state._global_process_group_list)
    again = ranks.placed(ParallelSection(tp=2, sequence_parallel=True))
    found = {
        "unknown_globals": sorted(_assigned_globals(parallel_state) - known_globals()),
        "sizes_outside": (ranks.tp_size, ranks.dp_size),
        "refused_outside": refused(lambda: replicas.dp_size),
        "groups_again": len(parallel_state._global_process_group_list) - made,
    }
    found["tp_of_same_groups"] = again.tp_size
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    tracked = get_cuda_rng_tracker().get_states()
    with replicas.in_force():
        found["sizes_inside"] = (replicas.tp_size, replicas.dp_size)
        found["refused_inside"] = refused(lambda: ranks.tp_size)
        found["refused_nested"] = refused(stages.in_force)
        parallel_state._HYBRID_DP_CP_GROUPS[0] = "filled in place"
        torch.rand(9)
        with get_cuda_rng_tracker().fork():
            torch.rand(9)
    with stages.in_force(), stages.in_force():
        found["is_last_stage"] = stages.is_last_stage
        one = torch.ones(1)
        dist.all_reduce(one, group=stages.tp_group)
        found["sum_inside"] = float(one)
    try:
        with replicas.in_force():
            raise KeyError
    except KeyError:
        found["sizes_after"] = (ranks.tp_size, ranks.dp_size)
    one = torch.ones(1)
    dist.all_reduce(one, group=ranks.tp_group)
    found["sum_after"] = float(one)
    found["changed"] = [
        name for name, value in before.items() if vars(parallel_state)[name] is not value
    ]
    found["filled"] = dict(parallel_state._HYBRID_DP_CP_GROUPS)
    found["is_same_draw"] = torch.equal(torch.rand(4), expected)
    states = get_cuda_rng_tracker().get_states()
    found["is_same_tracked"] = all(torch.equal(states[name], tracked[name]) for name in tracked)
    torch.save(found, folder / f"groups-{ranks.rank}.pt")
    ranks.close()


def refused(action: Callable[[], object]) -> bool:
    """Whether it raises RuntimeError, or does when it is entered."""
    try:
        result = action()
        if isinstance(result, AbstractContextManager):
            with result:
                pass
    except RuntimeError:
        return True
    return False


def _assigned_globals(module: object) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


JOBS = {"groups": groups}

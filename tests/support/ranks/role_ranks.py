"""The program of the ranks that hold models of several layouts; results lie in FOLDER/JOB.pt.

In each job of `LAYOUTS` policy, reference and critic have other layouts, and all see the same.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import LearnerSection, ParallelSection
from slipstream.core.types import LogprobArray, ReferenceLogprobs
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import (
    TokenEstimates,
    TrainingSequence,
)

from support.fakes.parity_models import VOCAB
from support.ranks.parity_layouts import OTHER, OVERLAP, SP, TREES, VPP, batches, probe
from support.ranks.rank_program import opened, settings_of, weights_of

if TYPE_CHECKING:
    from slipstream.extensions.other_models.trainer import Roles
    from slipstream.learner.trainer.model.policy import Policy

CRITIC_RATE = 1e-3
# Narrow enough that some values reach the clip in a second mini-batch.
VALUE_CLIP = 0.03
REFRESH_STEPS = 2
# Likely tokens of the reference, but of the model with tied weights.
TOP_K = 4
STEP_METRICS = (
    "loss",
    "grad_norm",
    "kl_reference",
    "value_loss",
    "value_mean",
    "critic_grad_norm",
    "explained_variance",
)


@dataclass(frozen=True)
class RoleLayout:
    """How many ranks, which model, and the layout of each role."""

    world_size: int
    model: str = "llama"
    policy: dict = field(default_factory=dict)
    reference: dict = field(default_factory=dict)
    critic: dict = field(default_factory=dict)
    learner: dict = field(default_factory=dict)
    sampling: dict = field(default_factory=dict)
    extensions: dict = field(default_factory=dict)


# All that can be away is, while another model works.
OFFLOAD = {
    "ddp": {"use_distributed_optimizer": True},
    "offload": {"parameters": True, "gradients": True, "optimizer": True},
}

# Tensor parallel ranks have the same tokens.
SAME_TOKENS = {"transformer": {"sequence_parallel": False}}
OTHER_TEMPERATURE = 1.3
BY_ENVIRONMENT = {
    "by_environment": {"environments": {OTHER: {"temperature": OTHER_TEMPERATURE}}},
}
LAYOUTS = {
    "one": RoleLayout(1),
    "one-by-environment": RoleLayout(1, extensions=BY_ENVIRONMENT),
    "one-tied": RoleLayout(1, "tied"),
    "one-trees": RoleLayout(1, sampling=TREES),
    "sp2-dp2-cp2-trees": RoleLayout(2, policy=SP, critic={"cp": 2}, sampling=TREES),
    "tp2-pp2-dp2": RoleLayout(2, policy=SP, reference={"pp": 2}, learner=SAME_TOKENS),
    "dp2-sp2-sp2": RoleLayout(2, reference=SP, critic=SP),
    "vpp2-dp2-pp2": RoleLayout(2, policy=VPP, critic={"pp": 2}),
    "dp2-dp2-dp2-overlap": RoleLayout(2, learner=OVERLAP),
    "sp2-sp2-dp2-offload": RoleLayout(2, "llama", SP, SP, learner=OFFLOAD),
    "sp2-pp2-pp2-tied": RoleLayout(2, "tied", SP, {"pp": 2}, {"pp": 2}),
}


def run_rank(folder: Path, job: str) -> None:
    match job.split(":"):
        case ["groups"]:
            groups(folder)
        case ["save", layout]:
            save(folder, layout)
        case ["load", saved, layout]:
            load(folder, saved, layout)
        case ["start", saved, layout]:
            start(folder, saved, layout)
        case ["refresh", model, other]:
            refresh(folder, model, other)
        case [layout]:
            roles(folder, layout)


def config_of(name: str, folder: Path, *others: dict[str, dict]) -> Config:
    """The settings of a layout, with others; the critic's head is drawn from the run's seed."""
    layout = LAYOUTS[name]
    is_tied = layout.model == "tied"
    top_k = {} if is_tied else {"top_k": TOP_K}
    estimator = {} if is_tied else {"estimator": "forward_top_k"}
    tables: dict[str, dict] = {
        "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.1} | estimator},
        "learner": layout.learner
        | {"world_size": layout.world_size, "parallel": layout.policy},
        "sampling": layout.sampling,
        "extensions": layout.extensions,
        "reference": {
            "refresh_every_steps": REFRESH_STEPS,
            "parallel": layout.reference,
        }
        | top_k,
        "critic": {
            "learning_rate": CRITIC_RATE,
            "warmup_steps": 0 if is_tied else 1,
            "value_clip": VALUE_CLIP,
            "parallel": layout.critic,
        },
    }
    return settings_of(folder / layout.model, tables, *others)


def config_of_run(name: str, folder: Path, run: str, **checkpoint: str) -> Config:
    """Returns `config_of(name, folder)` with the checkpoints of run `run`."""
    sections = {
        "run": {"name": run, "dir": str(folder / "runs")},
        "checkpoint": checkpoint,
    }
    return config_of(name, folder, sections)


def judged(batch: Batch, values: list[LogprobArray]) -> list[TrainingSequence]:
    """Sequences with returns that rise along each trajectory."""
    estimates = [
        TokenEstimates(
            np.zeros_like(judged_values),
            values=judged_values,
            returns=(trajectory.reward + 0.1 * np.arange(len(judged_values))).astype(
                np.float32
            ),
        )
        for trajectory, judged_values in zip(batch.trajectories, values, strict=True)
    ]
    return TrainingSequence.of_trajectories(
        batch.trajectories, estimates, step=batch.step
    )


def roles(folder: Path, job: str) -> None:
    """What the roles say and learn by themselves, then what the policy learns with them."""
    from slipstream.extensions.other_models.trainer import Roles
    from slipstream.learner.trainer.model.model import MemoryPart, unwrapped

    config = config_of(job, folder)
    policy = opened(config)
    models = Roles(config, policy)
    reference = models.reference
    critic = models.critic
    assert critic is not None

    first = batches(config)[0]
    before = weights_of(policy)
    results: dict = {
        "reference": _joined(_sampled(reference.logprobs(first))),
        "likely": _likely(reference.logprobs(first)),
        "gradients_of_reference": sum(
            parameter.requires_grad
            for chunk in reference.model.chunks
            for parameter in chunk.parameters()
        ),
        "values": [],
        "critic": [],
    }
    for batch in batches(config):
        values = critic.values(batch)
        results["values"].append(_joined(values))
        results["critic"].append(
            critic.train(judged(batch, values), batch.mini_batches(2))
        )
    results["values"].append(_joined(critic.values(first)))
    results |= train(policy, models, config)
    results["is_policy_same"] = [
        all(torch.equal(after[name], before[name]) for name in before)
        for after in results.pop("weights")
    ]
    with critic.model.memory.resident(MemoryPart.PARAMETERS):
        head = getattr(unwrapped(critic.model.chunks[-1]), "output_layer", None)
        state = {} if head is None else head.state_dict()
        results["head"] = {name: value.clone() for name, value in state.items()}
    torch.save(results, folder / f"{job}-{policy.ranks.rank}.pt")
    policy.ranks.close()


def train(policy: Policy, opened: Roles, config: Config) -> dict:
    """Three steps: the critic alone, then both until the reference is refreshed, then again."""
    from slipstream.learner.trainer.model.model import MemoryPart, torch_optimizers
    from slipstream.learner.trainer.model.schedule import sequence_logprobs
    from slipstream.learner.trainer.step import TrainingStep

    reference = opened.reference
    assert reference is not None
    step = TrainingStep(policy, config, [opened])
    results: dict = {"metrics": [], "references": [], "weights": [], "momentum": []}
    for batch in batches(config):
        results["metrics"].append(step.run(batch).metrics)
        results["references"].append(
            _joined(_sampled(reference.logprobs(batches(config)[0])))
        )
        results["weights"].append(weights_of(policy))
        with policy.memory.resident(MemoryPart.OPTIMIZER):
            states = [
                s
                for part in torch_optimizers(policy.optimizer)
                for s in part.state.values()
            ]
            squares = [float(state["exp_avg"].square().sum()) for state in states]
            results["momentum"].append(math.sqrt(sum(squares)))
        if batch.step + 1 == REFRESH_STEPS:
            results["policy"] = _joined(sequence_logprobs(policy, probe(config)))
            with reference.model.ranks.in_force():
                refreshed = sequence_logprobs(reference.model, probe(config))
            results["refreshed"] = _joined(refreshed)
    return results


def refresh(folder: Path, model: str, other: str) -> None:
    """Moves each weight of the policy by itself, and refreshes a reference from another folder."""
    from slipstream.extensions.other_models.trainer import Roles
    from slipstream.learner.trainer.model.model import unwrapped

    reference = {"path": str(folder / other), "refresh_every_steps": 1}
    tables = {"algorithm": {"kl": {"coefficient": 0.1}}, "reference": reference}
    config = settings_of(folder / model, tables)
    policy = opened(config)
    models = Roles(config, policy)
    ours = dict(unwrapped(policy.chunks[0]).named_parameters())
    with torch.no_grad():
        for place, weight in enumerate(ours.values()):
            weight.add_(0.5 + 0.01 * place)
    models.reference.refresh(policy)
    (reference,) = models.stored_models()
    theirs = dict(unwrapped(reference.chunks[0]).named_parameters())
    stale = [
        name for name, weight in theirs.items() if not torch.equal(weight, ours[name])
    ]
    torch.save(
        {"stale": stale, "names": list(theirs)}, folder / f"refresh:{model}:{other}.pt"
    )
    policy.ranks.close()


def save(folder: Path, layout: str) -> None:
    """Saves the models of a layout after two of three steps, asynchronously."""
    from slipstream.core.types import PolicyVersion
    from slipstream.learner.trainer.model.model import MemoryPart

    run = _Run(config_of_run(layout, folder, layout))
    for batch in batches(run.config)[:2]:
        run.step.run(batch)
    with contextlib.ExitStack() as stack:
        for memory in (
            run.policy.memory,
            *(m.memory for m in run.roles.models().values()),
        ):
            stack.enter_context(
                memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER)
            )
        run.checkpointer.save(PolicyVersion(0, 2), b"digest")
    results = run.last_step()
    run.checkpointer.finish()
    torch.save(results, folder / f"save:{layout}-{run.policy.ranks.rank}.pt")
    run.policy.ranks.close()


def load(folder: Path, saved: str, layout: str) -> None:
    """Goes on in another layout from what `save` saved."""
    run = _Run(config_of_run(layout, folder, saved))
    manifest = run.checkpointer.load_newest()
    results = run.last_step() | {"models": manifest.models}
    torch.save(results, folder / f"load:{saved}:{layout}-{run.policy.ranks.rank}.pt")
    run.policy.ranks.close()


def start(folder: Path, saved: str, layout: str) -> None:
    """A new run whose starting weights are the policy's of what `save` saved."""
    path = folder / "runs" / saved / "checkpoints" / "step-000002"
    run = _Run(config_of_run(layout, folder, "new", load=str(path)))
    reference = run.roles.reference
    critic = run.roles.critic
    first = batches(run.config)[0]
    results = {
        "reference": _joined(_sampled(reference.logprobs(first))),
        "values": _joined(critic.values(first)),
        "kl_reference": run.step.run(first).metrics["kl_reference"],
    }
    torch.save(results, folder / f"start:{saved}:{layout}-{run.policy.ranks.rank}.pt")
    run.policy.ranks.close()


class _Run:
    """A policy with its roles, and what saves them."""

    def __init__(self, config: Config) -> None:
        from slipstream.extensions.other_models.trainer import Roles
        from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
        from slipstream.learner.trainer.checkpoints.stored_model import (
            POLICY,
            StoredModel,
        )
        from slipstream.learner.trainer.step import TrainingStep

        self.config = config
        self.policy = opened(config)
        self.roles = Roles(config, self.policy)
        self.step = TrainingStep(self.policy, config, [self.roles])
        policy = StoredModel(POLICY, self.policy.chunks, self.policy.optimizer)
        self.models = [policy, *self.roles.stored_models()]
        self.checkpointer = Checkpointer(config, self.policy.ranks, self.models)

    def last_step(self) -> dict:
        """What the third step does, and what the critic says after it."""
        last = batches(self.config)[2]
        metrics = self.step.run(last).metrics
        return {
            "metrics": {name: metrics[name] for name in STEP_METRICS},
            "values": _joined(self.roles.critic.values(last)),
        }


def _sampled(found: list[ReferenceLogprobs]) -> list[LogprobArray]:
    return [estimates.logprobs for estimates in found]


def _likely(found: list[ReferenceLogprobs]) -> torch.Tensor:
    """Log-probabilities of likely tokens at their places in the vocabulary, 0 elsewhere."""
    top_ids = np.concatenate([estimates.top_ids for estimates in found])
    ids = torch.from_numpy(top_ids.astype(np.int64))
    values = torch.from_numpy(
        np.concatenate([estimates.top_logprobs for estimates in found])
    )
    return torch.zeros(len(ids), VOCAB).scatter(1, ids, values)


def _joined(arrays: list[LogprobArray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def groups(folder: Path) -> None:
    """Two ranks, the policy in tp 2, others in dp 2 and pp 2; without any model."""
    from megatron.core import parallel_state
    from slipstream.learner.trainer.ranks.parallel import Launch, Ranks, known_globals

    learner = LearnerSection(world_size=2, parallel=ParallelSection(tp=2))
    ranks = Ranks(Launch.from_environment(), learner, seed=1)
    replicas = ranks.placed(ParallelSection())
    stages = ranks.placed(ParallelSection(pp=2))
    before = dict(vars(parallel_state))
    num_groups = len(parallel_state._global_process_group_list)
    again = ranks.placed(ParallelSection(tp=2))
    tree = ast.walk(ast.parse(inspect.getsource(parallel_state)))
    assigned = {
        name for node in tree if isinstance(node, ast.Global) for name in node.names
    }
    threads = [
        task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()
    ]
    results = {
        "gloo_threads": threads.count("gloo_tcp_loop\n"),
        "unknown_globals": sorted(assigned - known_globals()),
        "sizes_outside": (ranks.tp_group.size(), ranks.dp_size),
        # The replicas' layout is not in force.
        "refused": [refused(lambda: replicas.dp_size)],
        "groups_again": len(parallel_state._global_process_group_list) - num_groups,
    }
    results["tp_of_same_groups"] = again.tp_group.size()
    with replicas.in_force():
        results["sizes_inside"] = (replicas.tp_group.size(), replicas.dp_size)
        results["refused"] += [
            refused(lambda: ranks.tp_group.size()),
            refused(stages.in_force),
        ]
        parallel_state._HYBRID_DP_CP_GROUPS[0] = "filled in place"
    with stages.in_force(), stages.in_force():
        results["counts"] = stages.counts
        ones = torch.ones(1)
        dist.all_reduce(ones, group=stages.tp_group)
        results["sum_inside"] = float(ones)
    try:
        with replicas.in_force():
            raise KeyError
    except KeyError:
        results["sizes_after"] = (ranks.tp_group.size(), ranks.dp_size)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=ranks.tp_group)
    results["sum_after"] = float(ones)
    results["changed"] = [
        name
        for name, value in before.items()
        if vars(parallel_state)[name] is not value
    ]
    results["filled"] = dict(parallel_state._HYBRID_DP_CP_GROUPS)
    torch.save(results, folder / f"groups-{ranks.rank}.pt")
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

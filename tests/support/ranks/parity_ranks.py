"""The program of the ranks that train in a layout.

What they saw and made lies in FOLDER/LAYOUT.pt afterwards, what entered the model of one rank in
FOLDER/LAYOUT-rank-RANK.pt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config

from support.fakes.fake_controller import batch_order
from support.ranks.parity_layouts import (
    LAYOUTS,
    PARITY_STEPS,
    batches,
    batches_of,
    config_of,
    probe,
)
from support.ranks.rank_program import kept, opened, score, weights_of
from support.references import plain_heads

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy
    from slipstream.learner.trainer.step import TrainingStep


def run_rank(folder: Path, job: str) -> None:
    layout = LAYOUTS.get(job)
    with contextlib.ExitStack() as stack:
        if layout is not None and layout.is_slow_network:
            stack.enter_context(slow_sends())
        # On GPUs the kernels themselves are compared.
        if (
            layout is not None
            and layout.has_fused_heads
            and not torch.cuda.is_available()
        ):
            stack.enter_context(plain_heads.in_place_of_kernels())
        train(folder, job)


def train(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.batches.batch import read_order
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.export import RunChat, save_hf_folder
    from slipstream.learner.trainer.weights.weight_stream import open_stream

    config = config_of(job, folder)
    policy = opened(config)
    step = TrainingStep(policy, config, step_parts(config, policy))
    extraordinary = {
        "overflow": overflow,
        "nothing-trained": nothing_trained,
        "disturbed-routers": disturbed_routers,
    }
    if job in extraordinary:
        kept(policy, extraordinary[job](policy, step, config), folder / f"{job}.pt")
        return
    # `describe` compares Megatron's groups with the arithmetic of the dry run.
    policy.ranks.describe(has_experts=True)
    finalized = count_finalizations(policy)
    stream = open_stream(policy, config)
    digest = stream.run().identity
    before = weights_of(policy)

    sequences = probe(config)
    metrics = []
    logprobs = [score(policy, sequences)]
    for batch in batches_of(job, config)[:PARITY_STEPS]:
        # A rank has the recorded experts of what it trains, and no others.
        own_batch = read_order(batch_order(batch), step.share)
        with recorded_inputs(policy) as inputs:
            metrics.append(step.run(own_batch).metrics)
        if batch.step == 0:
            torch.save(inputs, folder / f"{job}-rank-{policy.ranks.rank}.pt")
    # The weights are read at once: they must be complete without a forward pass.
    weights = weights_of(policy)
    logprobs.append(score(policy, sequences))
    if policy.ranks.world_size == 1:
        save_hf_folder(policy, config.model.path, folder / f"{job}-final", RunChat())
    result = {
        "metrics": metrics,
        "logprobs": logprobs,
        "digest": digest.hex(),
        "senders": list(stream.senders),
        "before": before,
        "weights": weights,
        "finalizations": len(finalized),
    }
    kept(policy, result, folder / f"{job}.pt")


@contextmanager
def slow_sends() -> Iterator[None]:
    """Asynchronous sends read their tensor 10 ms later: a buffer must live until it was waited for.

    On a fast machine a small message has left before the buffer is used for something else.
    """
    c10d = dist.distributed_c10d
    real = dist.isend
    # A single thread keeps the messages in order.
    with ThreadPoolExecutor(1) as thread:

        def send(*args: object, **named: object) -> None:
            time.sleep(0.01)
            real(*args, **named).wait()

        class Sending:
            def __init__(self, *args: object, **named: object) -> None:
                self._done = thread.submit(send, *args, **named)

            def wait(self) -> None:
                self._done.result()

        c10d.isend = dist.isend = Sending
        yield
        c10d.isend = dist.isend = real


@contextmanager
def recorded_inputs(policy: Policy) -> Iterator[dict]:
    """Records this rank's coordinates, and what enters its first chunk for each micro batch."""
    ranks = policy.ranks
    facts: dict = {"dp": ranks.dp_rank, "cp": ranks.cp_rank, "micro_batches": []}

    def record(_: object, inputs: tuple, named: dict) -> None:
        bounds = named["packed_seq_params"].cu_seqlens_q.tolist()
        facts["micro_batches"].append((inputs[0][0].cpu().clone(), bounds))

    hook = policy.chunks[0].register_forward_pre_hook(record, with_kwargs=True)
    yield facts
    hook.remove()


def count_finalizations(policy: Policy) -> list[int]:
    settings = policy.chunks[0].config
    finalize = settings.finalize_model_grads_func
    numbers = []

    def counted(*args: object, **kwargs: object) -> None:
        numbers.append(1)
        finalize(*args, **kwargs)

    settings.finalize_model_grads_func = counted
    return numbers


def nothing_trained(policy: Policy, step: TrainingStep, config: Config) -> dict:
    """A step after an ordinary one, whose episodes are all truncated and filtered for it."""
    from slipstream.core.types import Status
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.weights.export import hf_tensors

    first, second = batches(config)[:2]
    step.run(first)
    cut = tuple(
        dataclasses.replace(t, status=Status.TRUNCATED) for t in second.trajectories
    )
    metrics = step.run(Batch(second.step, second.batch_id, cut)).metrics
    is_finite = all(
        bool(t.isfinite().all()) for _, t in hf_tensors(policy, torch.float32)
    )
    return {"metrics": metrics, "is_finite": is_finite}


def overflow(policy: Policy, step: TrainingStep, config: Config) -> dict:
    """Steps so far that the next step cannot be finite; how it ended, and if weights moved."""
    from slipstream.learner.trainer.weights.export import hf_tensors

    first, second = batches(config)[:2]
    step.run(first)
    before = weights_of(policy)
    try:
        step.run(second)
    except RunFailed as error:
        after = dict(hf_tensors(policy, torch.float32))
        is_same = all(torch.equal(after[name], before[name]) for name in before)
        return {"error": str(error), "is_same": is_same}
    return {"error": "", "is_same": False}


def disturbed_routers(policy: Policy, step: TrainingStep, config: Config) -> dict:
    """Gaps to what the policy itself sampled, before and after its routers are others."""
    from support.references.replayed_gaps import (
        ReplayedGaps,
        disturb_routers,
        sampled_by,
    )

    batch = batches(config)[0]
    sampled = tuple(sampled_by(policy, trajectory) for trajectory in batch.trajectories)
    batch = dataclasses.replace(batch, trajectories=sampled)
    gaps = ReplayedGaps(policy, batch, config)
    gaps_by_name = gaps.both("")
    disturb_routers(policy.chunks, scale=0.05)
    return gaps_by_name | gaps.both("_disturbed") | step.run(batch).metrics

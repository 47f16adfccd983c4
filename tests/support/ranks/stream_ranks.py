"""The program of ranks that put their weights together in buckets.

FOLDER/JOB-stream-RANK.pt holds the tensors that were in this rank's own buckets, and on rank 0 what
Bridge exports; before and after a training step, and after some weights were changed by hand.
FOLDER/stream-wrong-plan-RANK.pt: how ranks went on whose plan gives other weights than Bridge.
"""

import dataclasses
import logging
from pathlib import Path

import torch

from support.ranks.parity_layouts import batches, config_of
from support.ranks.rank_program import opened

# Smaller than a layer.
BUCKET_BYTES = 20_000
WRONG_PLAN = "wrong-plan"


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.bucket_fill import (
        BridgeFilling,
        ExportedPart,
        PlannedFilling,
        plan_filling,
    )
    from slipstream.learner.trainer.weights.export import hf_tensors
    from slipstream.learner.trainer.weights.weight_stream import (
        WeightStream,
        open_stream,
    )
    from slipstream.protocol.weights.buckets import Bucket

    logging.basicConfig(level=logging.WARNING)
    if job == WRONG_PLAN:
        see_wrong_plan(folder)
        return
    config = config_of(job, folder)
    policy = opened(config)
    whole = open_stream(policy, config)
    assert isinstance(whole._filling, PlannedFilling)
    filling = plan_filling(policy, ExportedPart.MERGED)
    stream = WeightStream(policy, filling, bucket_bytes=BUCKET_BYTES)
    facts: dict = {
        "senders": list(stream.senders),
        "passes": [],
        "num_buckets": len(stream.buckets),
    }

    def one_pass() -> None:
        released: list[int] = []
        tensors: dict[str, torch.Tensor] = {}

        def send(place: int, bucket: Bucket, data: torch.Tensor):
            assert released == list(range(place - 1))
            if stream.senders[bucket.root] != policy.ranks.rank:
                # The bytes that another sender's bucket leaves there.
                data.fill_(0xFF)
                return lambda: released.append(place)
            copy = data.clone()
            for span in bucket.spans:
                raw = copy[
                    span.offset_bytes : span.offset_bytes + span.tensor.num_bytes
                ].clone()
                dtype = getattr(torch, span.tensor.dtype)
                tensors[span.tensor.name] = (
                    raw.view(dtype).view(span.tensor.shape).cpu()
                )
            return lambda: released.append(place)

        alone = stream.run()
        digests = stream.run(send)
        exported = {
            name: t.cpu().clone() for name, t in hf_tensors(policy, policy.dtype)
        }
        assert alone.identity == digests.identity
        assert whole.run().identity == digests.identity
        facts["passes"].append(
            {
                "tensors": tensors,
                "exported": exported if policy.ranks.is_main else {},
                "identity": digests.identity.hex(),
            }
        )

    one_pass()
    TrainingStep(policy, config).run(batches(config)[0])
    one_pass()
    with torch.no_grad():
        for parameter in (
            parameter for chunk in policy.chunks for parameter in chunk.parameters()
        ):
            parameter.view(-1)[::50] += 0.01
    one_pass()
    by_bridge = BridgeFilling(policy, ExportedPart.MERGED, senders=(0,))
    slow = WeightStream(policy, by_bridge, bucket_bytes=BUCKET_BYTES)
    assert slow.senders == (0,)
    assert slow.run().identity.hex() == facts["passes"][-1]["identity"]
    torch.save(facts, folder / f"{job}-stream-{policy.ranks.rank}.pt")
    policy.ranks.close()


def see_wrong_plan(folder: Path) -> None:
    """On one of two ranks, two matrices of the plan have changed places."""
    from slipstream.learner.trainer.weights import bucket_fill
    from slipstream.learner.trainer.weights.weight_stream import open_stream

    config = config_of("tp2", folder)
    policy = opened(config)
    right = open_stream(policy, config)
    plan_matrices = bucket_fill.plan_matrices

    def wrong(policy: object, *, merged: bool) -> list:
        pieces = plan_matrices(policy, merged=merged)
        names = [piece.name for piece in pieces]
        key, value = (
            names.index(f"model.layers.1.self_attn.{x}_proj.weight") for x in "kv"
        )
        if policy.ranks.rank == 1:
            parts = pieces[key].part, pieces[value].part
            pieces[key] = dataclasses.replace(pieces[key], part=parts[1])
            pieces[value] = dataclasses.replace(pieces[value], part=parts[0])
        return pieces

    def unknown(policy: object, *, merged: bool) -> list:
        if policy.ranks.rank == 1:
            raise bucket_fill.UnknownMapping("a parameter has a mapping of tomorrow")
        return plan_matrices(policy, merged=merged)

    kinds = []
    identities = [right.run().identity]
    for plan in (wrong, unknown):
        bucket_fill.plan_matrices = plan
        stream = open_stream(policy, config)
        kinds.append(type(stream._filling).__name__)
        identities.append(stream.run().identity)
    facts = {"kinds": kinds, "num_identities": len(set(identities))}
    torch.save(facts, folder / f"stream-{WRONG_PLAN}-{policy.ranks.rank}.pt")
    policy.ranks.close()

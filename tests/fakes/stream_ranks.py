"""The program of ranks that put their weights together in buckets.

FOLDER/JOB-stream-RANK.pt holds the tensors that were in this rank's own buckets, and on rank 0 what
Bridge exports; before and after a training step.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from parity_layouts import batches, config_of

# Smaller than a layer.
BUCKET_BYTES = 20_000


def run_rank(folder: Path, job: str) -> None:
    """What every rank of a layout does."""
    from slipstream.learner.trainer.bucket_fill import PlannedFilling, open_filling
    from slipstream.learner.trainer.export import hf_tensors
    from slipstream.learner.trainer.model import open_policy
    from slipstream.learner.trainer.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weight_stream import WeightStream, open_stream
    from slipstream.protocol.buckets import Bucket

    logging.basicConfig(level=logging.WARNING)
    config = config_of(job, folder)
    policy = open_policy(config, Launch.from_environment())
    whole = open_stream(policy, config)
    assert isinstance(whole._filling, PlannedFilling)
    filling = open_filling(policy, config.model.dtype)
    stream = WeightStream(policy, filling, bucket_bytes=BUCKET_BYTES)
    found: dict = {
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
                # What another sender's bucket leaves there.
                data.fill_(0xFF)
                return lambda: released.append(place)
            for span in bucket.spans:
                raw = data[span.offset_bytes : span.offset_bytes + span.tensor.num_bytes].clone()
                dtype = getattr(torch, span.tensor.dtype)
                tensors[span.tensor.name] = raw.view(dtype).view(span.tensor.shape).cpu()
            return lambda: released.append(place)

        digests = stream.run(send)
        exported = {name: t.cpu().clone() for name, t in hf_tensors(policy, policy.dtype)}
        alone = stream.run()
        assert alone.identity == digests.identity
        assert whole.run().identity == digests.identity
        found["passes"].append(
            {
                "tensors": tensors,
                "exported": exported if policy.ranks.is_main else {},
                "identity": digests.identity.hex(),
            }
        )

    one_pass()
    TrainingStep(policy, config).run(batches(config)[0])
    one_pass()
    torch.save(found, folder / f"{job}-stream-{policy.ranks.rank}.pt")
    policy.ranks.close()

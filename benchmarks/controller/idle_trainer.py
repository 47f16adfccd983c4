"""Plays a trainer that computes nothing: its passes take `PASS_S`, its steps no time.

    python -m benchmarks.controller.idle_trainer FILE --config ...

So all of a client's step is what is carried, written and waited for. Its calls are the trainer's
own. Produces: the trainer's moments, as `timeline` does.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

from slipstream.core.configuration.config_file import load_config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.batches.batch import Batch, read_order
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.protocol.codec import passes_digest, version_to_pb
from slipstream.v1 import trainer_pb2, weights_pb2

from benchmarks.controller.timeline import Moments

# The step is with the controller by the end of its pass, as when a model computes.
PASS_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    moments = Moments(arguments.file)
    client = ControllerClient(load_config(arguments.config))
    version = PolicyVersion(0, 0)
    pass_ids = list[str]()

    def digest() -> bytes:
        return hashlib.blake2b(str(version.step).encode(), digest_size=16).digest()

    client.register(
        trainer_pb2.TrainerHello(
            world_size=1,
            layout_description="no model",
            version=version_to_pb(version),
            weight_digest=digest(),
            num_parameters=1,
            num_senders=1,
            places=[weights_pb2.Place(host_id="here")],
            process="idle",
        )
    )
    while True:
        names = [passes_digest("", pass_ids)] if pass_ids else []
        message = client.next(version, communicator_id="", bucket_digests=(), held_passes=names)
        order = read_order(message, lambda _: frozenset())
        if isinstance(order, trainer_pb2.Pass):
            moments.note("pass.begin")
            time.sleep(PASS_S)
            logprobs = [bytes(len(sequence.targets)) for sequence in order.sequences]
            pass_ids.append(order.id)
            moments.note("pass.end")
            report = trainer_pb2.PassReport(id=order.id, logprobs=logprobs)
            client.report_pass(report)
        elif isinstance(order, Batch):
            moments.note("update.begin")
            pass_ids.clear()
            version = PolicyVersion(0, order.step + 1)
            moments.note("update.end")
            moments.note("export.end")
            client.report_step(
                trainer_pb2.StepReport(
                    step=order.step,
                    batch_id=order.batch_id,
                    version=version_to_pb(version),
                    weight_digest=digest(),
                )
            )


if __name__ == "__main__":
    main()

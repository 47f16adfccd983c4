"""One publish, as rank 0 leads it: announce, connect if needed, send, hand over the proofs."""

from __future__ import annotations

import logging
import time

from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.export import ExportedWeights
from slipstream.learner.trainer.weight_sender import WeightSender
from slipstream.protocol.errors import WeightSyncError
from slipstream.v1 import trainer_pb2, weights_pb2

logger = logging.getLogger(__name__)


def publish(
    order: weights_pb2.PublishOrder,
    weights: ExportedWeights,
    *,
    sender: WeightSender,
    client: ControllerClient,
    probe: weights_pb2.Probe | None,
    export_s: float,
) -> None:
    """Carries out `order`; what goes wrong on the way to the servers is reported, not raised."""
    result = trainer_pb2.PublishResult(publish_id=order.publish_id, export_s=export_s)
    started = time.monotonic()
    try:
        sent = _deliver(order, weights, sender=sender, client=client)
    except WeightSyncError as error:
        logger.warning("publish %s of version %s: %s", order.publish_id, order.version.step, error)
        result.error = str(error)
    else:
        if not sent:
            return
        result.bucket_digests.extend(weights.digests)
        result.bytes_sent = weights.num_bytes
        if probe is not None:
            result.probe.CopyFrom(probe)
    result.send_s = time.monotonic() - started
    receipt = client.finish_publish(result)
    if receipt.discard_communicator:
        sender.abort()


def _deliver(
    order: weights_pb2.PublishOrder,
    weights: ExportedWeights,
    *,
    sender: WeightSender,
    client: ControllerClient,
) -> bool:
    """Whether it was sent; False when the controller gave the publish up."""
    communicator, is_new = order.communicator, order.new_communicator
    if is_new:
        world_size = 1 + sum(receiver.num_workers for receiver in order.receivers)
        communicator = sender.listen(order.communicator.communicator_id, world_size)
    elif sender.communicator_id != order.communicator.communicator_id:
        raise WeightSyncError(
            f"communicator {order.communicator.communicator_id} is gone: a new one is needed"
        )
    answer = client.start_publish(
        trainer_pb2.PublishStart(
            publish_id=order.publish_id, layout=weights.layout(), communicator=communicator
        ),
        join_deadline_s=order.join_deadline_s,
    )
    if not answer.receivers:
        return False
    lost = {r.server_id for r in order.receivers} - {r.server_id for r in answer.receivers}
    if lost:
        # A group with a member missing can neither be joined nor used.
        sender.abort()
        raise WeightSyncError(f"{', '.join(sorted(lost))} did not take part")
    if is_new:
        sender.connect()
    sender.send(weights.buckets)
    return True

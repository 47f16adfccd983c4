"""Buckets in GPU memory that travel by gloo."""

import threading

import pytest
import torch
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.weights.bucket_senders import GlooSender
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.rollout_server.weights.bucket_receiver import GlooReceiver, Incoming

pytestmark = pytest.mark.timeout(200)
BUCKET_BYTES = 64 << 20
NUM_BUCKETS = 24
LIMIT_S = 60.0


def test_every_bucket_arrives_as_its_lane_was_filled() -> None:
    tensors = [
        TensorSpec(f"t{n}", "bfloat16", (BUCKET_BYTES // 2,))
        for n in range(NUM_BUCKETS)
    ]
    buckets = tuple(plan_buckets(tensors, BUCKET_BYTES))
    sender = GlooSender(WeightsSection(bucket_deadline_s=LIMIT_S), host="127.0.0.1")
    where = sender.announce("members-1", num_senders=1, world_size=2)
    arrived: list[list[int]] = []

    def receive() -> None:
        receiver = GlooReceiver(where, 1, LIMIT_S, torch.device("cpu"))
        incoming = Incoming(buckets, LIMIT_S, own_buffers=False)
        arrived.extend(
            [int(data.min()), int(data.max())] for data in receiver.receive(incoming)
        )
        receiver.close()

    receiving = threading.Thread(target=receive)
    receiving.start()
    sender.connect(where, 0)
    lanes = [
        torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)
    ]
    stream = torch.cuda.Stream()
    releases = {}
    kept = []
    with torch.cuda.stream(stream):
        for number, bucket in enumerate(buckets):
            if number >= len(lanes):
                releases[number - len(lanes)]()
            lane = lanes[number % len(lanes)]
            lane.fill_(number + 1)
            releases[number] = sender.send(bucket, lane)
            # The digest of a bucket is taken from the lane at this time.
            kept.append(torch.stack([lane.min(), lane.max()]))
        sender.finish()
    receiving.join(LIMIT_S)
    torch.cuda.synchronize()
    assert arrived == [[number, number] for number in range(1, NUM_BUCKETS + 1)]
    assert [pair.tolist() for pair in kept] == arrived

"""The copies of a plan, small and large, plain and with gaps, forwards and backwards."""

import torch
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.rollout_server.weights.copy_plan import Copy, CopyPlan, Replay, View

# Elements of a tensor that is copied by itself.
LARGE = 9 << 20


def test_copies_of_all_kinds_are_made_forwards_and_backwards() -> None:
    tensors = [
        TensorSpec("large", "bfloat16", (LARGE // 1024, 512)),
        TensorSpec("gapped", "bfloat16", (8, 16)),
        TensorSpec("small", "bfloat16", (300,)),
        TensorSpec("widened", "bfloat16", (6, 4)),
    ]
    (bucket,) = plan_buckets(tensors, 2 * LARGE)
    buffer = torch.randint(0, 100, (bucket.num_bytes // 2,), dtype=torch.int16)
    buffer = buffer.to(torch.bfloat16).view(torch.uint8)
    parameters = {
        "large": torch.zeros(LARGE // 1024, 512, dtype=torch.bfloat16),
        "gapped": torch.zeros(8, 32, dtype=torch.bfloat16),
        "small": torch.zeros(300, dtype=torch.bfloat16),
        "widened": torch.zeros(6, 4, dtype=torch.float32),
    }
    targets = parameters | {"gapped": parameters["gapped"][:, :16]}
    copies = [
        Copy(
            bucket=0,
            dtype=torch.bfloat16,
            source=View(span.offset_bytes // 2, span.tensor.shape, strides),
            parameter=span.tensor.name,
            destination=View.of(targets[span.tensor.name]),
        )
        for span, strides in zip(bucket.spans, [(512, 1), (16, 1), (1,), (4, 1)], strict=True)
    ]
    replay = Replay(CopyPlan((bucket,), (tuple(copies),)), parameters)
    replay.run(0, buffer)
    typed = buffer.view(torch.bfloat16)
    for span in bucket.spans:
        start = span.offset_bytes // 2
        name, shape = span.tensor.name, span.tensor.shape
        sent = typed[start : start + targets[name].numel()].view(shape)
        assert torch.equal(targets[name], sent.to(targets[name].dtype)), name
    assert not parameters["gapped"][:, 16:].any()
    back = torch.zeros_like(buffer)
    replay.collect(0, back)
    for span in bucket.spans:
        cut = slice(span.offset_bytes, span.offset_bytes + span.tensor.num_bytes)
        assert torch.equal(back[cut], buffer[cut]), span.tensor.name

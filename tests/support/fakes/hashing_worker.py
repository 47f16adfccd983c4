"""vLLM's worker with one more call: a digest of the bits of all its parameters."""

import hashlib
from typing import Any

import torch
from slipstream.rollout_server.vllm import engine_arguments
from slipstream.rollout_server.vllm.weight_receiver import WorkerExtension


class HashingWorker(WorkerExtension):
    def parameter_digest(self) -> str:
        """Digest of names and bits; padding counts too."""
        model: Any = self.weight_transfer_engine.model
        digest = hashlib.blake2b()
        for name, tensor in sorted(model.named_parameters()):
            digest.update(name.encode())
            digest.update(
                tensor.data.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            )
        return digest.hexdigest()


def use_hashing_worker() -> None:
    """Has engines of this process start such workers."""
    engine_arguments._WORKER_EXTENSION = (
        f"{HashingWorker.__module__}.{HashingWorker.__name__}"
    )

"""The arguments of vLLM for an engine whose bits the learner computes too."""

from pathlib import Path

from slipstream.core.settings.config import Config


def engine_arguments(_: Config, _folder: Path | None, *, on_cpu: bool) -> dict[str, object]:
    """Returns vLLM's arguments; on a CPU makes its products and norms batch-invariant."""
    if on_cpu:
        from slipstream.extensions.engine_bits.server import compute_by_rows

        compute_by_rows()
        return {}
    # torch.compile would fuse norms and activations into kernels that no learner has.
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}

"""Records the copy plan of a worker's model, or logs why it has none."""

from __future__ import annotations

from typing import Any

import torch
from slipstream.protocol.weights.buckets import Bucket
from slipstream.rollout_server.weights import vllm_layers
from slipstream.rollout_server.weights.copy_plan import (
    CopyPlan,
    NotCopied,
    Parameters,
    Replay,
    record,
)
from slipstream.rollout_server.weights.fp8_linears import fp8_linears, loadable
from slipstream.rollout_server.weights.fp8_plan import Fp8Plan, Fp8Replay
from slipstream.rollout_server.weights.live_base import LiveBase
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger

# vLLM's own logger: the engine's processes have no other handler.
log = init_logger(f"vllm.{__name__}")

# Errors of models' loaders when the layers do not look as they did at the start.
_LOADER_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def recorded_plan(
    model: torch.nn.Module,
    buckets: tuple[Bucket, ...],
    device: torch.device,
    vllm_config: VllmConfig,
) -> Fp8Plan | None:
    """Returns the copy plan of `buckets`; None, with a line in the log, if the model has none."""
    try:
        if vllm_config.parallel_config.enable_eplb:
            raise NotCopied("experts change their places while the engine runs")
        vllm_layers.check_layers(model)
        # Every model of vLLM has `load_weights`; their base class does not declare it.
        load_weights: Any = model.load_weights
        linears = fp8_linears(model)
        with set_current_vllm_config(vllm_config), loadable(model) as parameters:
            return Fp8Plan.of(record(load_weights, parameters, buckets, device), linears)
    except NotCopied as error:
        log_loader(str(error))
    except _LOADER_ERRORS as error:
        log_loader(f"{type(error).__name__} while its copies were recorded: {error}")
    return None


def live_base(
    plan: CopyPlan, replay: Replay, parameters: Parameters, device: torch.device
) -> LiveBase | None:
    """Returns the base of deltas; None, with a line in the log, if the plan cannot be reversed."""
    try:
        return LiveBase(plan, replay, parameters, device)
    except NotCopied as error:
        log.info("every update is sent whole: %s", error)
        return None


def log_plan(plan: Fp8Plan, replay: Fp8Replay) -> None:
    """Logs that a plan is used."""
    copies = sum(map(len, plan.copies))
    log.info("later weights are copied: a plan of %d copies agrees with the loader", copies)
    if plan.linears:
        mib = replay.landing_bytes / (1 << 20)
        log.info("%d matrices are quantised to FP8 from %.0f MiB", len(plan.linears), mib)


def log_loader(reason: str) -> None:
    """Logs why no plan is used."""
    log.warning("weights go through vLLM's loader at every update: %s", reason)

"""Records the copy plan of a worker's model, or logs why it has none."""

from __future__ import annotations

from typing import Any

import torch
from slipstream.protocol.weights.buckets import Bucket
from slipstream.rollout_server.vllm.weights import vllm_layers
from slipstream.rollout_server.vllm.weights.fp8_linears import fp8_linears, loadable
from slipstream.rollout_server.vllm.weights.fp8_plan import Fp8Check, Fp8Plan, Fp8Replay
from slipstream.rollout_server.weights.copy_plan import (
    NotCopied,
    Parameters,
    record,
)
from slipstream.rollout_server.weights.live_base import LiveBase
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger

# vLLM's own logger: the engine's processes have no other handler.
log = init_logger(f"vllm.{__name__}")

# The weight-transfer engine's name where quantised matrices are also kept as they arrived.
KEEPING_BACKEND = "slipstream-keeping-plain"
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
            plan = record(load_weights, parameters, buckets, device)
        transfer = vllm_config.weight_transfer_config
        keeps_plain = transfer is not None and transfer.backend == KEEPING_BACKEND
        return Fp8Plan.of(plan, linears, keeps_plain=keeps_plain)
    except NotCopied as error:
        log_loader(str(error))
    except _LOADER_ERRORS as error:
        log_loader(f"{type(error).__name__} while its copies were recorded: {error}")
    return None


def proved_replay(
    plan: Fp8Plan, check: Fp8Check, before: Parameters, model: torch.nn.Module
) -> Fp8Replay | None:
    """Returns the replay of a plan; None, with a line in the log, if the loader disproved it.

    `before`: the parameters before the loader's work, which must be the same objects after it.
    """
    different = check.failure()
    parameters = dict(model.named_parameters())
    moved = [n for n, p in before.items() if parameters.get(n) is not p]
    if different is not None or moved:
        log_loader(f"{different or moved[0]} is not a copy of a bucket's data")
        return None
    replay, copies = Fp8Replay(plan, parameters, check.kept), sum(map(len, plan.copies))
    log.info("later weights are copied: a plan of %d copies agrees with the loader", copies)
    if plan.linears:
        mib = replay.landing_bytes / (1 << 20)
        log.info("%d matrices are quantised to FP8 from %.0f MiB", len(plan.linears), mib)
    return replay


def live_base(plan: Fp8Plan, replay: Fp8Replay, device: torch.device) -> LiveBase | None:
    """Returns the base of deltas; None, with a line in the log, if the plan cannot be reversed."""
    try:
        base = LiveBase(plan, replay, replay.readable, device)
        if plan.linears and not base.holds_all:
            raise NotCopied("scales are taken of whole rows, and a worker holds shares of them")
    except NotCopied as error:
        log.info("every update is sent whole: %s", error)
        return None
    return base


def log_loader(reason: str) -> None:
    """Logs why no plan is used."""
    log.warning("weights go through vLLM's loader at every update: %s", reason)

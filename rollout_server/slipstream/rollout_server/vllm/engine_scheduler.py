"""vLLM's scheduler with what every engine here needs: records on CPUs, exact drafts, new weights.

Extensions may give the engine a subclass, by `scheduler` of their manifests.
"""

import time
from collections.abc import Iterable
from typing import Any, Protocol

from slipstream.core.extension import Extension, installed, resolve
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

# Worker classes that record experts or kept tokens on CPUs, where vLLM's own scheduler never asks
# for them.
_CPU_MODULE = "slipstream.rollout_server.vllm.cpu"
_ROUTING_WORKER = f"{_CPU_MODULE}.RoutingWorker"
_KEPT_TOKENS_WORKER = f"{_CPU_MODULE}.KeptTokensWorker"
_KEPT_TOKENS_ROUTING_WORKER = f"{_CPU_MODULE}.KeptTokensRoutingWorker"


def cpu_worker(*, records_experts: bool, records_kept_tokens: bool) -> str | None:
    """Returns the name of the worker class that makes these records on CPUs; None for vLLM's."""
    if records_experts:
        return _KEPT_TOKENS_ROUTING_WORKER if records_kept_tokens else _ROUTING_WORKER
    return _KEPT_TOKENS_WORKER if records_kept_tokens else None


class DraftSwitch(Protocol):
    """Decides with how many requests at a time the engine drafts."""

    # The length of drafts by the number of requests, as vLLM's scheduler reads it.
    lookup: list[int]

    def end_step(self, num_requests: int, num_tokens: int, *, drafts: bool, now_s: float) -> None:
        """Notes a step of `num_requests`, which sampled `num_tokens`, and whether it drafted."""

    def pause(self) -> None:
        """Notes that the next step does not follow at once."""


class EngineScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler, for engines whose weights change while requests wait.

    vLLM verifies drafts in one step: it samples the token after each drafted token, and keeps the
    sampled tokens up to the first that differs. All tokens of a step are sampled by that step's
    weights, so a draft made before an update is verified by the new weights.
    """

    dynamic_sd_lookup: list[int] | None

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> None:
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)
        # Why this engine does without features of subclasses, by their names.
        self.disabled_features: dict[str, str] = {}
        worker = self.vllm_config.parallel_config.worker_cls
        if worker in (_KEPT_TOKENS_WORKER, _KEPT_TOKENS_ROUTING_WORKER):
            self.return_sampling_mask = True
        if worker in (_ROUTING_WORKER, _KEPT_TOKENS_ROUTING_WORKER):
            self.aux_output_connector = AuxOutputSchedulerConnector()
        # vLLM would draft tokens of -1 after a prompt of which one token is left to compute, unless
        # the length of drafts may change.
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._switch = draft_switch(self.vllm_config, self.num_spec_tokens)
        if self._switch is not None:
            self.dynamic_sd_lookup = self._switch.lookup

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Overrides vLLM's method; tells what decides about drafts."""
        if self._switch is not None:
            self._switch.pause()
        super().set_pause_state(pause_state)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Overrides vLLM's method; tells what decides about drafts of the step."""
        if self._switch is not None:
            self._note_step(self._switch, scheduler_output, model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def _note_step(
        self, switch: DraftSwitch, planned: SchedulerOutput, done: ModelRunnerOutput
    ) -> None:
        requests = len(planned.num_scheduled_tokens)
        if not requests or self.pause_state is not PauseState.UNPAUSED or len(self.requests) == 0:
            switch.pause()
            return
        switch.end_step(
            requests,
            sum(map(len, done.sampled_token_ids)),
            drafts=planned.num_spec_tokens_to_schedule > 0,
            now_s=time.monotonic(),
        )


class AsyncEngineScheduler(EngineScheduler, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, which plans a step while the previous step runs."""


def draft_switch(settings: VllmConfig, num_tokens: int) -> DraftSwitch | None:
    """Returns what decides about drafts of `num_tokens`, None if the engine always drafts."""
    for extension in installed():
        if extension.draft_switch:
            switch: DraftSwitch | None = resolve(extension.draft_switch)(settings, num_tokens)
            if switch is not None:
                return switch
    return None


def scheduler_class(
    extensions: Iterable[Extension], *, async_scheduling: bool, num_stages: int = 1
) -> type[EngineScheduler]:
    """Returns the class for vLLM's `scheduler_cls`, as the `extensions` change it in their order.

    Those that were not tried with stages leave it as it is where `num_stages` is over 1. Raises
    ConfigError if one of them cannot change it.
    """
    engine_class = AsyncEngineScheduler if async_scheduling else EngineScheduler
    for extension in extensions:
        if extension.scheduler and (num_stages == 1 or extension.schedules_stages):
            engine_class = resolve(extension.scheduler)(engine_class)
    return engine_class

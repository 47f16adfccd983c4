"""vLLM's AsyncLLM, in this process and its children, without a port.

Consumes: prompts as token ids. Produces: sampled tokens with log-probabilities and versions. Waits
for: the engine process. Unblocked by: its answers, a cancelled request, or its death.
"""

import asyncio
import contextlib
import dataclasses
import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import psutil
from slipstream.core.configuration.config_file import vocabulary_size
from slipstream.core.errors import WeightSyncError
from slipstream.core.machine.segments import note_segments
from slipstream.core.patience import Patience
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray
from slipstream.rollout_server import child_processes
from slipstream.rollout_server.engine_interface import EngineDied, LoadedWeights, Sampling
from slipstream.rollout_server.vllm import disabled_features
from slipstream.rollout_server.vllm.adapter_slot import AdapterRequests
from slipstream.rollout_server.vllm.engine_arguments import engine_config
from slipstream.rollout_server.vllm.engine_pause import EnginePause
from slipstream.rollout_server.vllm.engine_requests import (
    PROBE_PREFIX,
    EngineRequests,
    TokenCounter,
)
from slipstream.rollout_server.weight_orders import WeightUpdate
from slipstream.v1 import weights_pb2
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import multiproc_executor, uniproc_executor

# Seconds without a step after which an engine with requests counts as hung. The limit is longer
# than compiling kernels takes, and shorter than the limit for which the run waits for a batch.
SILENCE_LIMIT_S = 300.0
_HEALTH_PERIOD_S = 0.5
_EXIT_LIMIT_S = 5.0
# How the sequences of a probe are scored, and the scores of none.
_SCORING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_reply_tokens=1,
    max_turns=1,
    max_episode_tokens=1,
    prompt_logprobs=True,
)
_NOTHING: LogprobArray = np.empty(0, dtype=np.float32)


class VllmEngine:
    """An `Engine` of vLLM, which forks: call `start` before any gRPC channel is opened."""

    def __init__(self, llm: AsyncLLM, processes: list[psutil.Process], config: Config) -> None:
        # Closed when the engine's processes are gone.
        self._files = contextlib.ExitStack()
        self.llm = llm
        self._processes = processes
        self._adapters = AdapterRequests(config.lora)
        self.num_workers = int(llm.vllm_config.parallel_config.world_size)
        self.max_model_len = int(llm.model_config.max_model_len)
        self.num_experts = int(llm.model_config.get_num_experts())
        self.disabled_features: Mapping[str, str] = {}
        recomputes = config.rollout_server.recompute_context
        self.pauses = EnginePause(llm, recompute_context=recomputes)
        recorded_vocabulary = None
        if config.replays_sampling:
            recorded_vocabulary = vocabulary_size(config.model.path)
        self.requests = EngineRequests(
            llm,
            self.pauses,
            self._adapters,
            recorded_vocabulary=recorded_vocabulary,
        )
        self._updates = WeightUpdate(
            self._call_all, self.pauses.pause_for_update, may_stage=config.may_stage
        )

    @classmethod
    async def start(cls, config: Config, *, seed: int) -> Self:
        """Starts the engine processes and pauses the engine; blocks the event loop meanwhile.

        `seed` is vLLM's seed for sampling. Raises ConfigError if vLLM refuses its settings.
        """
        with contextlib.ExitStack() as files:
            folder = files.enter_context(child_processes.engine_folder())
            for executor in (uniproc_executor, multiproc_executor):
                # vLLM's own path is in the temporary folder of all programs.
                executor.get_file_store_init_method = lambda: child_processes.store_url(folder)
            before = set(psutil.Process().children(recursive=True))
            settings = engine_config(config, seed, folder)
            # On CPU the line above chose "spawn" for the sake of thread binding, which is off.
            # Forked processes start in 3 s instead of 13 and inherit the hook of
            # `child_processes.bind_children`.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            # Frozen objects are never collected in the forked processes: a finaliser there would
            # wait for a thread that the fork did not copy.
            gc.collect()
            gc.freeze()
            disabled_features.let_engines_answer()
            llm = AsyncLLM.from_vllm_config(
                settings, stat_loggers=[TokenCounter], disable_log_stats=True
            )
            # The engine has begun to return kept tokens. vLLM would now refuse requests without a
            # temperature or `top_k`, such as those of evaluations, which need none.
            llm.model_config.return_sampling_mask = False
            if os.environ["VLLM_WORKER_MULTIPROC_METHOD"] != "fork":
                # vLLM has started a program that knows none of our classes and outlives the server.
                llm.shutdown(timeout=_EXIT_LIMIT_S)
                raise RuntimeError(
                    "vLLM forked no engine: CUDA was started in the server, or it runs in a Ray "
                    "actor or on WSL"
                )
            started = [p for p in psutil.Process().children(recursive=True) if p not in before]
            note_segments(folder, [os.getpid(), *(child.pid for child in started)])
            engine = cls(llm, started, config)
            await engine.pauses.pause()
            engine.disabled_features = await disabled_features.of_engine(llm, config)
            engine._files = files.pop_all()
        # Objects that exist now stay: collections need not look through vLLM's modules again.
        gc.collect()
        gc.freeze()
        return engine

    async def prepare_weights(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        self._adapters.check(layout)
        await self.pauses.wake_weights()
        await self._updates.prepare(order, layout, first_rank, is_busy=bool(self.requests.num_open))

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        if self.requests.num_open:
            return await self._updates.receive(publish_id)
        # Nothing runs, and requests are held until `resume`: the update needs no pause.
        self.pauses.hold_requests()
        return await self._updates.receive(publish_id, self.pauses.resume_idle)

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        async def score(number: int, token_ids: Sequence[int]) -> LogprobArray:
            adapter = adapters[number] if number < len(adapters) else ""
            sampling = dataclasses.replace(_SCORING, adapter=adapter)
            scored = await self.requests.generate(f"{PROBE_PREFIX}{number}", token_ids, sampling, 1)
            assert scored.prompt_logprobs is not None, "they were asked for"
            return scored.prompt_logprobs

        scores = (score(*numbered) for numbered in enumerate(sequences))
        parts = [_NOTHING]
        for logprobs in await asyncio.gather(*scores, return_exceptions=True):
            if isinstance(logprobs, BaseException):
                raise logprobs
            parts.append(logprobs)
        return np.concatenate(parts)

    async def watch(self) -> None:
        patience = Patience(SILENCE_LIMIT_S)
        last_step_s = self.requests.counter.heard_s
        while not self.llm.errored:
            period_s = min(_HEALTH_PERIOD_S, SILENCE_LIMIT_S)
            # A server that was stopped, or slept, has heard of no step either.
            patience.begin(2 * period_s)
            await asyncio.sleep(period_s)
            num_open = self.requests.num_open
            step_s = self.requests.counter.heard_s
            if self.pauses.clock.is_paused or not num_open or step_s != last_step_s:
                last_step_s = step_s
                patience = Patience(SILENCE_LIMIT_S)
            elif patience.is_over:
                raise EngineDied(
                    f"vLLM's engine made no step for {SILENCE_LIMIT_S:g} s, "
                    f"with {num_open} open requests"
                )
        raise EngineDied("vLLM's engine process is gone; its own message stands above")

    async def aclose(self) -> None:
        self.llm.shutdown(timeout=_EXIT_LIMIT_S)
        _, alive = psutil.wait_procs(self._processes, timeout=_EXIT_LIMIT_S)
        for survivor in alive:
            survivor.kill()
        psutil.wait_procs(alive, timeout=_EXIT_LIMIT_S)
        self._files.close()

    async def _call_all(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Returns all workers' answers to `method`.

        Raises EngineDied, or WeightSyncError when vLLM's call fails. A call that was made runs to
        its end, even if its caller no longer waits.
        """

        async def answers() -> list[Any]:
            try:
                call = (method, *arguments)
                return list(await self.llm.collective_rpc("slipstream_call", args=call))
            except EngineDeadError as error:
                raise EngineDied(str(error)) from error
            except Exception as error:
                # vLLM gives every failed call the same class.
                lines = [line for line in str(error).splitlines() if line.strip()]
                raise WeightSyncError(lines[-1] if lines else type(error).__name__) from error

        # Calls that were begun before, in tasks of their own, reach the engine first.
        return await asyncio.shield(asyncio.create_task(answers()))

"""vLLM's AsyncLLM, in this process and its children, without a port.

Consumes: prompts as token ids. Produces: sampled tokens with log-probabilities and versions. Waits
for: the engine process. Unblocked by: its answers, a cancelled request, or its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import psutil
from slipstream.core.errors import WeightSyncError
from slipstream.core.models.vision.placed import PlacedImage
from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import StageSetting
from slipstream.core.types import LogprobArray, PolicyVersion
from slipstream.rollout_server import process
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    EngineUse,
    Generation,
    LoadedWeights,
    Sampling,
    TextOptions,
    TextPart,
)
from slipstream.rollout_server.inference.usage import SILENCE_LIMIT_S, EngineWatchdog
from slipstream.rollout_server.vllm.engine_arguments import engine_config
from slipstream.rollout_server.vllm.engine_pause import EnginePause
from slipstream.rollout_server.vllm.engine_requests import (
    PROBE_PREFIX,
    EngineRequests,
    TokenCounter,
)
from slipstream.rollout_server.vllm.vllm_requests import (
    ReplyRecord,
    ReplyText,
    VllmParts,
    as_ours,
    parameters,
    scores_of,
    scoring_parameters,
)
from slipstream.rollout_server.vllm.weights.adapter_slot import WITHOUT_ADAPTERS, AdapterRequests
from slipstream.rollout_server.weights.weight_update import WeightUpdate
from slipstream.v1 import weights_pb2
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import multiproc_executor, uniproc_executor

_HEALTH_PERIOD_S = 0.5
_EXIT_LIMIT_S = 5.0


class VllmEngine:
    """Implements `Engine` with vLLM's AsyncLLM.

    vLLM forks, so call `start` before any gRPC channel is opened.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        processes: list[psutil.Process],
        *,
        stage: StageSetting,
        adapters: AdapterRequests = WITHOUT_ADAPTERS,
        recompute_context: bool = True,
    ) -> None:
        # Closed when the engine's processes are gone.
        self._files = contextlib.ExitStack()
        self._llm, self._processes, self._adapters = llm, processes, adapters
        self._pauses = EnginePause(llm, recompute_context=recompute_context)
        self._updates = WeightUpdate(self._call_all, self._pauses.pause_for_update, stage=stage)
        # The open requests and their counters.
        self.requests = EngineRequests(llm, self._pauses)

    @classmethod
    async def start(cls, config: Config, *, seed: int) -> VllmEngine:
        """Starts the engine processes and pauses the engine; blocks the event loop meanwhile.

        `seed` is vLLM's seed for sampling. Raises ConfigError if vLLM refuses its settings.
        """
        with contextlib.ExitStack() as files:
            folder = files.enter_context(process.engine_folder())
            for executor in (uniproc_executor, multiproc_executor):
                # vLLM's own path is in the temporary folder of all programs.
                executor.get_file_store_init_method = lambda: f"file://{folder}/store"
            engine = await cls._start(config, seed)
            engine._files = files.pop_all()
        return engine

    @classmethod
    async def _start(cls, config: Config, seed: int) -> VllmEngine:
        before = set(psutil.Process().children(recursive=True))
        settings = engine_config(config, seed)
        # On CPU the line above chose "spawn" for the sake of thread binding, which is off. Forked
        # processes start in 3 s instead of 13 and inherit the hook of `process.bind_children`.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # Frozen objects are never collected in the forked processes: a finaliser there would wait
        # for a thread that the fork did not copy.
        gc.collect()
        gc.freeze()
        llm = AsyncLLM.from_vllm_config(
            settings, stat_loggers=[TokenCounter], disable_log_stats=True
        )
        if os.environ["VLLM_WORKER_MULTIPROC_METHOD"] != "fork":
            # vLLM has started a program that knows none of our classes and outlives the server.
            llm.shutdown(timeout=_EXIT_LIMIT_S)
            raise RuntimeError(
                "vLLM forked no engine: CUDA was started in the server, or it runs in a Ray actor "
                "or on WSL"
            )
        started = [p for p in psutil.Process().children(recursive=True) if p not in before]
        engine = cls(
            llm,
            started,
            stage=config.staging,
            adapters=AdapterRequests(config.lora),
            recompute_context=config.rollout_server.recompute_context,
        )
        await engine.pause()
        # Objects that exist now stay: collections need not look through vLLM's modules again.
        gc.collect()
        gc.freeze()
        return engine

    @property
    def num_workers(self) -> int:
        """The number of ranks in a communicator; see `Engine`."""
        return int(self._llm.vllm_config.parallel_config.world_size)

    @property
    def version(self) -> PolicyVersion | None:
        """The version that `resume` was last called with, or None; see `Engine`."""
        return self._pauses.version

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a sequence; see `Engine`."""
        return int(self._llm.model_config.max_model_len)

    @property
    def num_experts(self) -> int:
        """The number of experts in a layer, or 0 if the model has none; see `Engine`."""
        return int(self._llm.model_config.get_num_experts())

    @property
    def keeps_start(self) -> bool:
        """Whether the engine can also sample from the initial model; see `Engine`."""
        return self._adapters.are_apart

    @property
    def vllm_parts(self) -> VllmParts:
        """The parts that vLLM's HTTP application needs; see `Engine`."""
        return VllmParts(self._llm.vllm_config, self._llm.renderer)

    def use(self) -> EngineUse:
        """Returns the counters since the engine's start; see `Engine`."""
        return self.requests.use()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        experts_from: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Samples a reply, and returns its tokens; see `Engine`."""
        requests = self.requests
        asked = parameters(sampling, max_tokens, experts_from=experts_from)
        async with requests.admitted(request_id) as is_wanted:
            if not is_wanted:
                return Generation.unbegun()
            adapter = self._adapters.request(sampling.adapter)
            collector = await requests.add(request_id, prompt_token_ids, asked, adapter, images)
            output = await requests.next(request_id, collector)
        record = ReplyRecord()
        record.take(output)
        return requests.returned(record, output, asked)

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        options: TextOptions,
        experts_from: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> AsyncGenerator[TextPart, None]:
        """Samples a reply, and yields its tokens and text in parts; see `Engine`."""
        assert self.keeps_start or not options.by_start, "the start's weights are overwritten"
        with as_ours():
            asked = parameters(sampling, max_tokens, experts_from=experts_from, options=options)
        record, requests = ReplyRecord(), self.requests
        text = ReplyText(self._llm.renderer.get_tokenizer(), prompt_token_ids, options)

        def read(output: RequestOutput) -> list[TextPart]:
            new = record.part(output, with_logprobs=options.num_logprobs is not None)
            return [new] if asked.detokenize else text.parts(new, output.outputs[0].finish_reason)

        async with requests.admitted(request_id) as is_wanted:
            if is_wanted:
                adapter = self._adapters.request(sampling.adapter, by_start=options.by_start)
                collector = await requests.add(request_id, prompt_token_ids, asked, adapter, images)
                while not (output := await requests.next(request_id, collector)).finished:
                    for part in read(output):
                        yield part
        if not is_wanted:
            yield TextPart((), "", generation=Generation.unbegun())
            return
        *others, last = read(output)
        for part in others:
            yield part
        end = requests.returned(record, output, asked, is_judged=options.by_start)
        yield dataclasses.replace(last, generation=end)

    async def cancel(self, request_id: str) -> None:
        """Ends an open generation; see `Engine`."""
        await self.requests.cancel(request_id)

    async def pause(self) -> None:
        """Pauses all requests and discards cached prefixes; see `Engine`."""
        await self._pauses.pause()

    async def rest(self, *, give_back: bool) -> None:
        """Pauses all requests, and may free the GPU memory; see `Engine`."""
        await self._pauses.rest(give_back=give_back)

    async def resume(self, version: PolicyVersion) -> None:
        """Resumes generation with the weights of `version`; see `Engine`."""
        await self._pauses.resume(version)

    async def prepare_weights(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        """Prepares to receive new weights; see `Engine`."""
        self._adapters.check(layout)
        await self._pauses.wake_weights()
        await self._updates.prepare(order, layout, first_rank, is_busy=bool(self.requests.num_open))

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        """Pauses and loads the weights of `prepare_weights`; see `Engine`."""
        if self.requests.num_open:
            return await self._updates.receive(publish_id)
        # Nothing runs, and requests are held until `resume`: the update needs no pause.
        self._pauses.hold_requests()
        return await self._updates.receive(publish_id, self._pauses.resume_idle)

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        """Returns the log-probabilities of given sequences' tokens; see `Engine`."""
        # Sequences without a name in `adapters` get the name "".
        names = [*adapters, *[""] * len(sequences)]
        await self._pauses.let_in(PROBE_PREFIX)
        outputs = await asyncio.gather(
            *(
                self._score(f"{PROBE_PREFIX}{n}", sequence, adapter)
                for n, (sequence, adapter) in enumerate(zip(sequences, names, strict=False))
            ),
            return_exceptions=True,
        )
        return scores_of(outputs, sequences)

    async def _score(
        self, request_id: str, token_ids: Sequence[int], adapter: str
    ) -> RequestOutput:
        asked, chosen = scoring_parameters(), self._adapters.request(adapter)
        collector = await self.requests.add(request_id, token_ids, asked, chosen)
        return await self.requests.next(request_id, collector)

    async def watch(self) -> None:
        """Raises EngineDied when the engine has ended or hangs; see `Engine`."""
        watchdog = EngineWatchdog(SILENCE_LIMIT_S)
        while not self._llm.errored:
            await asyncio.sleep(min(_HEALTH_PERIOD_S, SILENCE_LIMIT_S))
            waiting = 0 if self._pauses.clock.is_paused else self.requests.num_open
            watchdog.check(heard_s=self.requests.counter.heard_s, num_requests=waiting)
        raise EngineDied("vLLM's engine process is gone; its own message stands above")

    async def aclose(self) -> None:
        """Stops the engine and all of its processes; see `Engine`."""
        self._llm.shutdown(timeout=_EXIT_LIMIT_S)
        _, alive = psutil.wait_procs(self._processes, timeout=_EXIT_LIMIT_S)
        for each in alive:
            each.kill()
        psutil.wait_procs(alive, timeout=_EXIT_LIMIT_S)
        self._files.close()

    async def aclose_fully(self) -> None:
        """Closes the engine in a program that does not end through `process.leave`.

        Takes a second more than `aclose`. After `aclose`, the finalisers of vLLM's client would run
        after the finalisers of vLLM's modules, and log errors.
        """
        await self.aclose()
        gc.unfreeze()
        del self._llm
        gc.collect()

    async def _call_all(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Returns all workers' answers to `method`.

        Raises EngineDied, or WeightSyncError when vLLM's call fails. A call that was made runs to
        its end, even if its caller no longer waits.
        """
        # Calls that were begun before, in tasks of their own, reach the engine first.
        return await asyncio.shield(asyncio.create_task(self._through_vllm(method, arguments)))

    async def _through_vllm(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        try:
            return list(await self._llm.collective_rpc(method, args=arguments))
        except EngineDeadError as error:
            raise EngineDied(str(error)) from error
        except Exception as error:
            # vLLM gives every failed call the same class.
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise WeightSyncError(lines[-1] if lines else type(error).__name__) from error

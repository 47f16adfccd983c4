"""The process with an engine of `flow.py`: ours, whose steps are timed one by one.

The engine's own process is forked from this one; both share an array, through which it is told how
long prompts wait and says what its steps were.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Coroutine
from multiprocessing.sharedctypes import RawArray
from typing import Any, Self

import numpy as np
from slipstream.core.settings.config import Config

from benchmarks.rollout.engines import Ours, Sizes, Turn, run

# Steps at most for which prompts wait, replies for each prompt, and whether steps without prompts
# are planned by our code: what a turn may choose. "wait-0-32": no prompt waits.
LEVERS = {
    f"wait-{steps}-{replies}{suffix}": (steps, replies, not suffix)
    for steps in (0, 32)
    for replies in (16, 32, 64)
    for suffix in ("", "-vllms-plans")
}
KINDS = ("decoding", "prompts")
MODES = ("NONE", "PIECEWISE", "FULL")
# Sums for each kind of step: `whole` is seconds from plan to plan, `plan` to `take` are seconds
# of the engine's thread.
FIELDS = ("steps", "whole", "plan", "start", "sample", "take", "tokens", "replies", *MODES)
_LEVER = 0
_COUNTS = 4
_FIRST_TOKENS = 64
_RING = 8192


class Board:
    """The array: levers, sums over steps of each kind, times to first tokens."""

    def __init__(self) -> None:
        raw = RawArray("d", _FIRST_TOKENS + 1 + _RING)
        self.values = np.frombuffer(raw, dtype=np.float64)

    def set_lever(self, lever: str) -> None:
        """Tells the engine how prompts wait from its next step on."""
        self.values[_LEVER : _LEVER + 3] = LEVERS[lever]

    @property
    def lever(self) -> list[int]:
        """Steps, replies for each prompt, and whether plans are ours."""
        return [int(value) for value in self.values[_LEVER : _LEVER + 3]]

    def count(self, kind: int, name: str, amount: float) -> None:
        self.values[_COUNTS + kind * len(FIELDS) + FIELDS.index(name)] += amount

    def first_token(self, seconds: float) -> None:
        """Notes how long a request waited for its first token."""
        number = int(self.values[_FIRST_TOKENS])
        self.values[_FIRST_TOKENS + 1 + number % _RING] = seconds
        self.values[_FIRST_TOKENS] = number + 1

    def since(self, before: np.ndarray) -> dict[str, Any]:
        """What was counted after the copy of `values`."""
        sums = (self.values - before)[_COUNTS:]
        start = int(before[_FIRST_TOKENS])
        numbers = range(start, int(self.values[_FIRST_TOKENS]))
        first = [self.values[_FIRST_TOKENS + 1 + number % _RING] for number in numbers]
        found: dict[str, Any] = {
            kind: dict(zip(FIELDS, sums[place * len(FIELDS) :], strict=False))
            for place, kind in enumerate(KINDS)
        }
        if first:
            p50, p99 = np.percentile(first, (50, 99))
            found["first_token_s"] = {"number": len(first), "p50": p50, "p99": p99}
        return found


def timed(scheduler_class: Any, board: Board) -> Any:  # noqa: ANN401 - vLLM's
    """The scheduler, whose steps are counted on the board."""

    class Timed(scheduler_class):  # type: ignore[misc]
        _began_s: float | None = None
        kind = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
            super().__init__(*args, **kwargs)
            self._added_s: dict[str, float] = {}
            self._own = self._planner
            _time_worker(self, board)

        def add_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
            self._added_s[request.request_id] = time.perf_counter()
            self._pull()
            super().add_request(request)

        def _pull(self) -> None:
            *_, is_ours = board.lever
            if not is_ours:
                self._release()
            self._planner = self._own if is_ours else None

        def schedule(self, throttle_prefills: bool = False) -> Any:  # noqa: ANN401 - vLLM's
            began_s = time.perf_counter()
            gathering = self._gathering
            gathering.most_steps, gathering.replies_per_prompt, _ = board.lever
            self._pull()
            plan = super().schedule(throttle_prefills)
            num_replies = len(plan.num_scheduled_tokens)
            if self._began_s is not None:
                board.count(self.kind, "whole", began_s - self._began_s)
            self._began_s = began_s if num_replies else None
            if num_replies:
                self.kind = int(plan.total_num_scheduled_tokens > num_replies)
                board.count(self.kind, "steps", 1)
                board.count(self.kind, "tokens", plan.total_num_scheduled_tokens)
                board.count(self.kind, "replies", num_replies)
                board.count(self.kind, "plan", time.perf_counter() - began_s)
            return plan

        def update_from_output(self, plan: Any, output: Any) -> Any:  # noqa: ANN401 - vLLM's
            began_s = time.perf_counter()
            sampled = output.sampled_token_ids
            for new in plan.scheduled_new_reqs:
                row = output.req_id_to_index.get(new.req_id)
                if row is not None and sampled and len(sampled[row]):
                    added_s = self._added_s.pop(new.req_id, None)
                    if added_s is not None:
                        board.first_token(began_s - added_s)
            result = super().update_from_output(plan, output)
            kind = int(plan.total_num_scheduled_tokens > len(plan.num_scheduled_tokens))
            board.count(kind, "take", time.perf_counter() - began_s)
            return result

    return Timed


def _time_worker(scheduler: Any, board: Board) -> None:  # noqa: ANN401 - vLLM's
    """Counts what the worker does; it lives in the scheduler's process."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                board.count(scheduler.kind, name, time.perf_counter() - began_s)

        return counted

    dispatch = CudaGraphManager.dispatch

    def dispatched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        description = dispatch(*args, **kwargs)
        board.count(scheduler.kind, description.cg_mode.name, 1)
        return description

    CudaGraphManager.dispatch = dispatched
    UniProcExecutor.execute_model = counting("start", UniProcExecutor.execute_model)
    UniProcExecutor.sample_tokens = counting("sample", UniProcExecutor.sample_tokens)


class Measured(Ours):
    """Our engine, with levers and a board."""

    board: Board
    _before: tuple[float, int, np.ndarray]

    @classmethod
    async def start(cls, config: Config, sizes: Sizes, address: str) -> Self:
        """See `Ours`; the scheduler that the settings name is timed."""
        from slipstream.rollout_server.vllm import engine

        board = Board()
        own = engine.engine_config
        board.set_lever("wait-0-32")

        def settings_of(*given: Any) -> Any:  # noqa: ANN401 - vLLM's
            settings = own(*given)
            scheduling = settings.scheduler_config
            scheduling.scheduler_cls = timed(scheduling.scheduler_cls, board)
            return settings

        engine.engine_config = settings_of
        started = await super().start(config, sizes, address)
        started.board = board
        started._mark()
        return started

    def runs(self) -> dict[str, Callable[[Turn], Coroutine[Any, Any, dict[str, Any]]]]:
        """Levers, `mark` and `report` beside what ours can be asked."""

        def setting(lever: str) -> Callable[[Turn], Coroutine[Any, Any, dict[str, Any]]]:
            async def set_lever(_: Turn) -> dict[str, Any]:
                self.board.set_lever(lever)
                return {}

            return set_lever

        async def mark(_: Turn) -> dict[str, Any]:
            self._mark()
            return {}

        async def report(_: Turn) -> dict[str, Any]:
            began_s, tokens, values = self._before
            return {
                "tokens": self._vllm.requests.use().generated_tokens - tokens,
                "window_s": time.perf_counter() - began_s,
                **self.board.since(values),
            }

        levers = {lever: setting(lever) for lever in LEVERS}
        return super().runs() | levers | {"mark": mark, "report": report}

    def _mark(self) -> None:
        tokens = self._vllm.requests.use().generated_tokens
        self._before = time.perf_counter(), tokens, self.board.values.copy()


if __name__ == "__main__":
    run(Measured.start, *sys.argv[1:])

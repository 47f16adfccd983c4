"""Reduces the scheduler's work for requests in the middle of a reply, which get one token a step.

vLLM's scheduler supports drafts, grammars, images, connectors and sliding windows. It checks for
all of these once for each request and step, and goes through all requests three times. That is more
than half of the work of the engine's thread, and with a small model and hundreds of requests it
limits an engine. In the middle of a reply the results of these checks are known. So vLLM plans a
step without these requests, of prompts or of nothing, which updates vLLM's own state; the requests
are added to that plan, and the step changes a few arrays. Their own state follows, as vLLM would
have left it, before vLLM looks at it. vLLM still handles the first and the last step of a reply,
and all unusual steps.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.extensions.fast_decoding.server.held_sets import HeldSets
from vllm import __version__ as VERSION
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request, RequestStatus

_RUNNING = RequestStatus.RUNNING
# The name of the feature that this module is.
STEADY = "steady decoding"
# Most tokens of a reply that are held back.
CHUNK_TOKENS = 16
# The digest of vLLM 0.32.0's modules that this one follows; they are no public interface.
_FOLLOWED = "1e4a9d611bea13a4d06bf5e90383347a05a564c488df47325cf193f59d0e5f3d"
_SOURCES = (Scheduler, AsyncScheduler, KVCacheManager, FullAttentionManager, Request)


def unsteady_cause(scheduler: Scheduler, followed: str = _FOLLOWED) -> str:
    """Returns why `SteadyPlanner` cannot do all that `scheduler` does in a decoding step, or ""."""
    files = (Path(inspect.getfile(source)) for source in _SOURCES)
    if hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() != followed:
        return f"the scheduler of vLLM {VERSION} is not that of 0.32.0"
    # Full attention frees no block, and each block that fills up is one unit of prefix lookup.
    has_simple_cache = all(
        type(manager) is FullAttentionManager and manager.block_size == scheduler.hash_block_size
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    )
    settings = scheduler.scheduler_config
    other_features = {
        "layers other than full attention, or blocks of several sizes": not has_simple_cache,
        "a connector of the KV cache": scheduler.connector,
        "a connector of encoders": scheduler.ec_connector,
        "records of routed experts": scheduler.aux_output_connector,
        "drafts": scheduler.num_lookahead_tokens or scheduler.num_spec_tokens,
        "layers with a state": scheduler.has_mamba_layers,
        "an encoder alone": scheduler.is_mm_encoder_only,
        "pipeline stages": scheduler.use_pp,
        "a KV cache that must be zeroed": scheduler.needs_kv_cache_zeroing,
        "blocks that are freed later": scheduler.defer_block_free,
        "long_prefill_token_threshold": settings.long_prefill_token_threshold,
        "several tokens a step": scheduler.num_sampled_tokens_per_step != 1,
        "staggered decoding": getattr(scheduler, "decode_stagger", 1) != 1,
        "context parallelism": not scheduler.dcp_world_size == scheduler.pcp_world_size == 1,
    }
    names = [name for name, is_used in other_features.items() if is_used]
    return f"the engine has {', '.join(names)}" if names else ""


@dataclass(slots=True)
class Chunk:
    """The sampled tokens of a request that have not been output yet."""

    client_index: int
    limit: int
    with_logprobs: bool
    # The tokens that end the reply; None if vLLM handles every step of this request.
    stops: set[int | None] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed_experts: list[np.ndarray] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    prefill_stats: Any = None
    prompt_logprobs: Any = None
    sampling_masks: list[SamplingMaskLists] = field(default_factory=list)

    def keep(self, output: EngineCoreOutput) -> None:
        """Keeps all of `output` but its tokens and their log-probabilities."""
        if output.new_sampling_mask is not None:
            self.sampling_masks.append(output.new_sampling_mask)
        if output.routed_experts is not None:
            self.routed_experts.append(output.routed_experts)
        if output.events:
            self.events += output.events
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors

    def pour(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Moves the whole content of the chunk into `output`, and returns `output`."""
        if self.with_logprobs and len(self.logprobs) != len(self.token_ids):
            raise RuntimeError(
                f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} sampled tokens"
            )
        output.new_token_ids = self.token_ids
        if self.with_logprobs and self.token_ids:
            output.new_logprobs = LogprobsLists(
                np.asarray(self.token_ids, dtype=np.int32)[:, None],
                np.asarray(self.logprobs, dtype=np.float32)[:, None],
                # The rank of the sampled token, which no caller asks for.
                np.zeros(len(self.token_ids), dtype=np.int32),
            )
        if self.routed_experts:
            output.routed_experts = np.concatenate(self.routed_experts)
        if self.sampling_masks:
            output.new_sampling_mask = joined_masks(self.sampling_masks)
        output.events = self.events or None
        output.prefill_stats = self.prefill_stats
        output.new_prompt_logprobs_tensors = self.prompt_logprobs
        self.token_ids = []
        self.logprobs = []
        self.routed_experts = []
        self.sampling_masks = []
        self.events = []
        self.prefill_stats = self.prompt_logprobs = None
        self.limit = CHUNK_TOKENS
        return output


def joined_masks(masks: Sequence[SamplingMaskLists]) -> SamplingMaskLists:
    """Returns the kept tokens of consecutive tokens of one request as those of one output."""
    first = masks[0]
    if len(masks) == 1 and first.offsets is not None:
        return first
    token_ids = np.concatenate([mask.token_ids for mask in masks])
    lengths: list[int] = []
    for mask in masks:
        is_single = mask.offsets is None
        lengths += [len(mask.token_ids)] if is_single else np.diff(mask.offsets).tolist()
    return SamplingMaskLists(token_ids, np.cumsum([0, *lengths]))


def stops_of(request: Request, parameters: SamplingParams) -> set[int | None] | None:
    """Returns the tokens that end a reply, or None for a request that needs more than tokens.

    That is a grammar, images or another extra, with which vLLM handles every step.
    """
    if (
        request.use_structured_output
        or request.has_encoder_inputs
        or request.resumable
        or parameters.repetition_detection is not None
    ):
        return None
    return {parameters.eos_token_id, *(parameters.stop_token_ids or ())}


class SteadyBatch:
    """The requests of consecutive steps that only decode; each is a row of some arrays.

    A step changes the arrays alone. vLLM's `Request` and the chunk of a row stay behind, until
    `sync` brings them to the state that vLLM itself would have left: before anything but a step
    of this batch looks at the request, when its chunk is full, and where it gets a block.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Whether a step is planned before the tokens of the previous step are known.
        self.is_ahead = isinstance(scheduler, AsyncScheduler)
        self.members: list[tuple[Request, Chunk]] = []
        self.row_of: dict[str, int] = {}
        self._ids = np.empty(0, dtype=object)
        # The rows that the next step samples a token of.
        self.live = np.empty(0, dtype=np.int64)
        self.computed, self._prompts, self._ends = (np.empty(0, np.int64) for _ in range(3))
        # The last step that each is planned in.
        self._steps = np.empty(0, dtype=np.int64)
        # How many tokens of each are known, those in `_tokens` included.
        self.known = np.empty(0, dtype=np.int64)
        # Rows whose next output is nothing but a token.
        self._is_plain = np.empty(0, dtype=np.bool_)
        self._any_stop = np.empty(0, dtype=np.int64)
        self._wants_logprobs = False
        # Tokens that are held of each row, at most as many as its chunk still has room for.
        self._room = np.empty(0, np.int64)
        self._held = np.empty(0, np.int64)
        self._tokens = np.empty((0, CHUNK_TOKENS), dtype=np.int64)
        self._logprobs = np.empty((0, CHUNK_TOKENS), dtype=np.float32)
        # The tokens that the held tokens were drawn from, if the engine returns them.
        self._kept_sets = HeldSets(CHUNK_TOKENS) if scheduler.return_sampling_mask else None

    def join(self, members: Sequence[tuple[Request, Chunk]]) -> None:
        """Adds a row for each of `members`, which only decode from now on."""
        if not members:
            return
        requests = [request for request, _ in members]
        first = len(self.members)
        number = len(members)
        self.members += members
        names = [request.request_id for request in requests]
        self.row_of.update(zip(names, range(first, first + number), strict=True))
        prompts = np.array([request.num_prompt_tokens for request in requests])
        for name, values in (
            ("_ids", np.array(names, dtype=object)),
            ("live", np.arange(first, first + number)),
            ("computed", [request.num_computed_tokens for request in requests]),
            ("_steps", np.zeros(number, np.int64)),
            ("known", [request.num_tokens for request in requests]),
            ("_prompts", prompts),
            ("_ends", prompts + [request.max_tokens for request in requests]),
            ("_is_plain", [_is_plain(request) for request in requests]),
            ("_room", [chunk.limit - len(chunk.token_ids) for _, chunk in members]),
            ("_held", np.zeros(number, np.int64)),
            ("_tokens", np.empty((number, CHUNK_TOKENS), np.int64)),
            ("_logprobs", np.empty((number, CHUNK_TOKENS), np.float32)),
        ):
            setattr(self, name, np.concatenate((getattr(self, name), values)))
        if self._kept_sets is not None:
            self._kept_sets.add_rows(number)
        stops = {stop for _, chunk in members for stop in chunk.stops or () if stop is not None}
        self._any_stop = np.union1d(self._any_stop, np.array([*stops], dtype=np.int64))
        self._wants_logprobs |= any(chunk.with_logprobs for _, chunk in members)

    def next_rows(self) -> np.ndarray:
        """Returns the rows that the next step samples a token of."""
        live = self.live
        longest = self._scheduler.max_model_len - 1
        computed = self.computed[live]
        num_known = self.known[live]
        # The last token of these is already being sampled.
        ended = (computed >= longest) | (
            (computed >= num_known) & (num_known + 1 >= self._ends[live])
        )
        if ended.any():
            self.live = live[~ended]
        return self.live

    def cached_requests(self, rows: np.ndarray) -> tuple[list[str], list[int], list[int]]:
        """Returns ids, computed tokens and output tokens of the requests, as a plan has them."""
        computed = self.computed[rows]
        outputs = (computed + 1 - self._prompts[rows]).tolist()
        return self._ids[rows].tolist(), computed.tolist(), outputs

    def advance(self, rows: np.ndarray) -> None:
        """Notes that the step that is being planned samples a token of each of `rows`."""
        self.computed[rows] += 1
        self._steps[rows] = self._scheduler.current_step

    def take(
        self,
        num_scheduled: Mapping[str, int],
        output: ModelRunnerOutput,
        logprobs: np.ndarray | None,
    ) -> tuple[dict[str, int], list[int]]:
        """Holds the tokens of a step that neither start nor end a reply.

        Returns the number of scheduled tokens of each request that vLLM must handle, by id, and the
        rows whose chunk is full. `logprobs` has a value for each row of the output.
        """
        sampled = output.sampled_token_ids
        step_sets = output.sampling_masks
        lacks_sets = step_sets is None and self._kept_sets is not None
        if not sampled or lacks_sets or (logprobs is None and self._wants_logprobs):
            return dict(num_scheduled), []
        ids = list(num_scheduled)
        number = len(num_scheduled)
        rows = np.fromiter(map(self.row_of.get, ids, repeat(-1)), np.int64, number)
        places = np.fromiter(map(output.req_id_to_index.__getitem__, ids), np.int64, number)
        lengths = np.fromiter(map(len, sampled), np.int64, len(sampled))
        # A row without tokens has another one's, or the last number, for its first.
        flat = np.fromiter(chain(*sampled, (-1,)), np.int64, lengths.sum() + 1)
        lengths, tokens = lengths[places], flat[(np.cumsum(lengths) - lengths)[places]]
        length_limits = np.minimum(self._ends, self._scheduler.max_model_len)
        is_taken = (rows >= 0) & (lengths == 1) & self._is_plain[rows]
        is_taken &= np.fromiter(num_scheduled.values(), np.int64, number) == 1
        is_taken &= self.known[rows] + 1 < length_limits[rows]
        for place in np.flatnonzero(is_taken & np.isin(tokens, self._any_stop)):
            is_taken[place] = int(tokens[place]) not in (self.members[rows[place]][1].stops or ())
        taken_rows = rows[is_taken]
        num_held = self._held[taken_rows]
        self._tokens[taken_rows, num_held] = tokens[is_taken]
        if logprobs is not None:
            self._logprobs[taken_rows, num_held] = logprobs[places[is_taken]]
        if self._kept_sets is not None:
            self._kept_sets.hold(
                rows=taken_rows,
                places=num_held,
                step_sets=step_sets,
                step_rows=places[is_taken],
            )
        self._held[taken_rows] += 1
        self.known[taken_rows] += 1
        vllm_scheduled = {
            ids[place]: num_scheduled[ids[place]] for place in np.flatnonzero(~is_taken)
        }
        return vllm_scheduled, taken_rows[self._held[taken_rows] >= self._room[taken_rows]].tolist()

    def sync(self, rows: Sequence[int]) -> None:
        """Brings the requests and chunks of `rows` up to date, as if each step had changed them."""
        if not rows:
            return
        # Numbers of lists, since looking at one number of an array takes longer.
        arrays = (self.computed, self._steps, self._held, self._tokens, self._logprobs)
        values = zip(rows, *(array[rows].tolist() for array in arrays), strict=True)
        if self._kept_sets is not None:
            self._pour_sets(self._kept_sets, rows)
        self._held[rows] = 0
        for row, computed, last_step, num_held, token_ids, logprobs in values:
            request, chunk = self.members[row]
            steps = computed - request.num_computed_tokens
            request.num_computed_tokens = computed
            request.num_in_flight_tokens += steps - num_held
            if num_held:
                request.append_output_token_ids(token_ids[:num_held])
                chunk.token_ids += token_ids[:num_held]
                if chunk.with_logprobs:
                    chunk.logprobs += logprobs[:num_held]
            # The blocks that are now complete are cached when vLLM next gives the request one.
            if self.is_ahead:
                request.num_output_placeholders += steps - num_held
                if steps and self._scheduler.use_v2_model_runner:
                    request.next_decode_eligible_step = last_step + 1

    def _pour_sets(self, kept_sets: HeldSets, rows: Sequence[int]) -> None:
        """Moves the sets of the held tokens of `rows` to their chunks."""
        full_rows = [row for row in rows if self._held[row]]
        if not full_rows:
            return
        sets_by_row = kept_sets.sets(full_rows, self._held[full_rows].tolist())
        for row, row_sets in zip(full_rows, sets_by_row, strict=True):
            _, chunk = self.members[row]
            chunk.sampling_masks.append(row_sets)

    def settle(self, row: int) -> None:
        """Notes what became of a row that was synced, when its step's outputs are handed out."""
        request, chunk = self.members[row]
        if request.status is _RUNNING:
            self.known[row], self._is_plain[row] = request.num_tokens, _is_plain(request)
            self._room[row] = chunk.limit - len(chunk.token_ids)
        else:
            del self.row_of[request.request_id]
            self.live = self.live[self.live != row]


def _is_plain(request: Request) -> bool:
    """Returns whether the next output of a decoding request has nothing beside its token."""
    return (
        request.prefill_stats is None and not request.num_stale_output_tokens and not request.events
    )


class SteadyPlanner:
    """Plans steps that only decode, for a scheduler without an `unsteady_cause`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # The requests of the steps since vLLM planned one, or None.
        self.batch: SteadyBatch | None = None
        self._num_groups = len(scheduler.kv_cache_manager.coordinator.single_type_managers)
        self._nobody = create_request_queue(scheduler.policy)

    def plan(
        self,
        chunks: Mapping[str, Chunk],
        schedule: Callable[[], SchedulerOutput],
        *,
        takes_prompts: bool = False,
    ) -> SchedulerOutput | None:
        """Plans the next step, or returns None where vLLM must plan all of it.

        vLLM plans the prompts, of waiting requests too if `takes_prompts`, in what room the others
        leave. `chunks` are those of requests, by id; `schedule` is vLLM's own method.
        """
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        block_size = scheduler.hash_block_size
        if scheduler.pause_state is not PauseState.UNPAUSED or scheduler.kv_holding_waiting:
            return None
        if self.batch is not None and len(self.batch.members) > 2 * scheduler.max_num_running_reqs:
            # Most rows are of replies that have ended.
            self.release()
        batch = self.batch = self.batch or SteadyBatch(scheduler)
        prompts: list[Request] = []
        if len(batch.row_of) < len(scheduler.running):
            sorted_requests = self._sorted(chunks, batch.row_of)
            if sorted_requests is None:
                return None
            members, prompts = sorted_requests
            batch.join(members)
        rows = batch.next_rows()
        max_batch_tokens = scheduler.scheduler_config.max_num_batched_tokens
        room = min(scheduler.max_num_scheduled_tokens, max_batch_tokens) - len(rows)
        if not len(rows) or room < 0 or ((prompts or takes_prompts) and scheduler.lora_config):
            return None
        phases = batch.computed[rows] % block_size
        begins_block = phases == 0
        if begins_block.sum() * self._num_groups > manager.block_pool.get_num_free_blocks():
            return None
        # If no step is planned ahead, vLLM caches a block as soon as its last token is planned.
        is_due = begins_block if batch.is_ahead else begins_block | (phases == block_size - 1)
        due = rows[is_due].tolist()
        batch.sync(due)
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(rows)
        for place, row in zip(np.flatnonzero(is_due).tolist(), due, strict=True):
            new = manager.allocate_slots(batch.members[row][0], 1, num_lookahead_tokens=0)
            new_blocks[place] = new.get_block_ids(allow_none=True)
        plan = self._planned_beside(room, prompts, schedule, takes_prompts=takes_prompts)
        ids, computed, outputs = batch.cached_requests(rows)
        cached = plan.scheduled_cached_reqs
        cached.req_ids = ids + cached.req_ids
        cached.num_computed_tokens = computed + cached.num_computed_tokens
        cached.num_output_tokens = outputs + cached.num_output_tokens
        cached.new_block_ids = new_blocks + cached.new_block_ids
        batch.advance(rows)
        plan.num_scheduled_tokens = dict.fromkeys(ids, 1) | plan.num_scheduled_tokens
        plan.total_num_scheduled_tokens += len(rows)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(ids)
        return plan

    def _planned_beside(
        self,
        room: int,
        prompts: list[Request],
        schedule: Callable[[], SchedulerOutput],
        *,
        takes_prompts: bool,
    ) -> SchedulerOutput:
        """Returns vLLM's plan, of at most `room` tokens, of `prompts` and of waiting requests."""
        scheduler = self._scheduler
        running = scheduler.running
        waiting = scheduler.waiting
        before = scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs
        scheduler.running = _Beside(prompts)
        # A prompt that loses its place waits again.
        scheduler.waiting = waiting if takes_prompts or prompts else self._nobody
        scheduler.max_num_scheduled_tokens = room
        scheduler.max_num_active_reqs -= len(running) - len(prompts)
        try:
            plan = schedule()
        finally:
            scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs = before
            admitted = scheduler.running[len(prompts) :]
            scheduler.running = [*running, *admitted]
            scheduler.waiting = waiting
            if any(request.status is not _RUNNING for request in prompts):
                # Without room for their next tokens they wait again.
                scheduler.running = [request for request in running if request.status is _RUNNING]
        return plan

    def release(self) -> None:
        """Brings all requests up to date, and ends the batch: vLLM looks at them next."""
        if self.batch is not None:
            self.batch.sync([*self.batch.row_of.values()])
            self.batch = None

    def _sorted(
        self, chunks: Mapping[str, Chunk], row_of: Mapping[str, int]
    ) -> tuple[list[tuple[Request, Chunk]], list[Request]] | None:
        """Returns the running requests without a row that decode, and those within their prompt.

        Returns None if one of them needs more than a token in each step.
        """
        scheduler = self._scheduler
        longest = scheduler.max_model_len - 1
        # vLLM's older worker must be sent all tokens of a request that was left out of a step.
        sent = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        members: list[tuple[Request, Chunk]] = []
        prompts: list[Request] = []
        for request in scheduler.running:
            if request.request_id in row_of:
                continue
            computed = request.num_computed_tokens
            ahead = request.num_output_placeholders
            if computed >= longest or (
                ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
            ):
                # The request's last token is already being sampled.
                continue
            chunk = chunks.get(request.request_id)
            if chunk is None or chunk.stops is None:
                return None
            if request.is_prefill_chunk:
                prompts.append(request)
                continue
            if request.num_tokens + ahead - computed != 1 or (
                sent is not None and request.request_id not in sent
            ):
                return None
            members.append((request, chunk))
        return members, prompts


class _Beside(list[Request]):
    """Requests that vLLM plans while others, which it does not see, are planned too."""

    def __bool__(self) -> bool:
        return True


def takes_a_prompt(running: Iterable[Request], waiting: Iterable[Request]) -> bool:
    """Returns whether the next step has a prefill in any case, which other prompts may then join.

    This is so in the middle of a chunked prefill, or when a waiting request asks for
    log-probabilities of its prompt: such requests are probes of new weights.
    """
    return any(request.is_prefill_chunk for request in running) or any(
        request.sampling_params and request.sampling_params.prompt_logprobs is not None
        for request in waiting
    )

"""The scheduler that plans ahead while workers draft, with a model that is a table of numbers."""

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.inference.draft_table import DraftRule
from slipstream.rollout_server.vllm.chunking_scheduler import scheduler_class
from slipstream.rollout_server.vllm.drafting_scheduler import (
    DRAFT_TOKENS,
    draft_lengths,
    draft_values,
)
from slipstream.rollout_server.vllm.drafting_worker import DraftingWorker, SharedText
from slipstream.rollout_server.vllm.engine_arguments import engine_config
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import SMALLEST, make_model_folder
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
# Length of the worker's drafts where it is tested alone.
DRAFT = 3
PLACES = 8
PROMPT = list(range(4, 14))
LIMITS = [1, 2, 15, 16, 17, 40, 60, 61]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - vLLM's
    config = small_config(
        model={
            "path": str(make_model_folder(tmp_path_factory.mktemp("model"), **SMALLEST)),
            "dtype": "float32",
        },
        sampling={"max_reply_tokens": 64, "max_episode_tokens": 96},
        rollout_server={
            "max_episodes": PLACES,
            "enforce_eager": True,
            "drafts": "shared",
            "engine": {"block_size": BLOCK},
        },
    )
    found = engine_config(config, seed=0)
    # vLLM plans ahead on GPUs.
    found.scheduler_config.async_scheduling = True
    return found


@dataclass
class Workers:
    """Workers that accept as many drafted tokens as `chosen` says; token n of a text is 100 + n."""

    requests: dict[str, Any]
    chosen: random.Random = field(default_factory=lambda: random.Random(4))
    # Tokens of each request that are computed, as only the workers know.
    computed: dict[str, int] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)

    def run(self, plan: Any) -> Any:  # noqa: ANN401 - vLLM's
        for new in plan.scheduled_new_reqs:
            self.computed[new.req_id] = new.num_computed_tokens
        names, sampled, values, starts = list(plan.num_scheduled_tokens), [], [], [0]
        for name in names:
            drafts = plan.scheduled_spec_decode_tokens.get(name, [])
            assert drafts == [-1] * len(drafts)
            end = self.computed[name] + plan.num_scheduled_tokens[name] - len(drafts)
            self.drafted.append(len(drafts))
            known = end >= len(PROMPT)
            taken = self.chosen.randint(0, len(drafts)) if known else 0
            sampled.append([100 + end + n for n in range(taken + 1)] if known else [])
            self.computed[name] = end + taken
            # vLLM returns a row for each token that it verified.
            values += [-1 / (100 + end + n) for n in range(len(drafts) + 1)]
            starts.append(len(values))
        rows = np.asarray(values, dtype=np.float32)[:, None]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                np.zeros_like(rows, dtype=np.int32),
                rows,
                np.ones(len(rows), dtype=np.int32),
                starts if len(rows) > len(names) else None,
            )
            if names
            else None,
        )


class Engine:
    """vLLM's loop around the scheduler, with two steps under way."""

    def __init__(self, settings: Any, num_blocks: int, **rule: int) -> None:  # noqa: ANN401
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        settings.cache_config.num_gpu_blocks = num_blocks
        self.scheduler = scheduler_class(async_scheduling=True)(
            vllm_config=settings,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(settings),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = True
        self.scheduler._rule = DraftRule(DRAFT_TOKENS, **({"trial_steps": 1 << 40} | rule))
        self.workers = Workers(self.scheduler.requests)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.finished: set[str] = set()
        self.told: list[tuple[int, int]] = []
        self.preempted = 0
        self._queue: deque[tuple[Any, Any]] = deque()

    def add(self, name: str, limit: int) -> None:
        init_none_hash(sha256)
        sampling = SamplingParams(
            max_tokens=limit, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.tokens[name], self.logprobs[name] = [], []
        self.scheduler.add_request(Request(name, list(PROMPT), sampling, None, block_hasher=hasher))

    def step(self) -> None:
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self.preempted += len(plan.preempted_req_ids or ())
            self._queue.append((plan, self.workers.run(plan)))
            if len(self._queue) < 2 and plan.total_num_scheduled_tokens:
                return
        if self._queue:
            for outputs in self.scheduler.update_from_output(*self._queue.popleft()).values():
                # Once a second there are statistics of the load too.
                stats = outputs.scheduler_stats
                if stats is not None and (drafts := stats.spec_decoding_stats) is not None:
                    self.told.append((drafts.num_draft_tokens, drafts.num_accepted_tokens))
                for output in outputs.outputs:
                    self._take(output)

    def drain(self) -> None:
        for _ in range(2000):
            if not (self.scheduler.has_requests() or self._queue):
                return
            self.step()
        raise AssertionError("the scheduler never runs out of work")

    def _take(self, output: Any) -> None:  # noqa: ANN401 - vLLM's
        assert output.request_id not in self.finished
        self.tokens[output.request_id] += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs[output.request_id] += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            self.finished.add(output.request_id)


def check_replies(engine: Engine) -> None:
    """All tokens and log-probabilities arrived, once and in order."""
    for number, limit in enumerate(LIMITS):
        tokens = [100 + len(PROMPT) + place for place in range(limit)]
        assert engine.tokens[f"r{number}"] == tokens
        expected = np.asarray([-1 / token for token in tokens], dtype=np.float32)
        assert np.array_equal(np.asarray(engine.logprobs[f"r{number}"], np.float32), expected)
    assert len(engine.finished) == len(LIMITS)


@pytest.mark.parametrize("num_blocks", [100, 12], ids=["roomy", "preempting"])
def test_replies_are_whole_however_many_tokens_are_accepted(settings, num_blocks: int) -> None:
    engine = Engine(settings, num_blocks)
    for number, limit in enumerate(LIMITS):
        engine.add(f"r{number}", limit)
    engine.drain()
    check_replies(engine)
    assert set(engine.workers.drafted) == {0, DRAFT_TOKENS}
    assert (engine.preempted > 0) is (num_blocks == 12)
    drafted, accepted = map(sum, zip(*engine.told, strict=True))
    assert 0 < accepted < drafted <= sum(engine.workers.drafted)


def test_replies_are_whole_where_running_ones_are_computed_again(settings) -> None:
    engine = Engine(settings, 100)
    for number, limit in enumerate(LIMITS):
        engine.add(f"r{number}", limit)
    for _ in range(4):
        for _ in range(3):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    check_replies(engine)


def test_steps_draft_nothing_while_drafts_rest(settings) -> None:
    engine = Engine(settings, 100, trial_steps=6, kept_steps=6)
    for number, limit in enumerate(LIMITS):
        engine.add(f"r{number}", limit)
    engine.drain()
    check_replies(engine)
    turns = "".join("d" if drafted else "-" for drafted in engine.workers.drafted)
    assert "d" * 8 + "-" * 8 in turns
    assert "-" * 8 + "d" * 8 in turns[8:]


def test_a_step_with_many_replies_gets_shorter_drafts() -> None:
    lengths = draft_lengths(7, 256)
    assert [lengths[size] for size in (1, 64, 65, 128, 129, 256)] == [7, 7, 6, 3, 2, 1]


def test_graphs_are_captured_for_steps_with_drafts_and_without(settings) -> None:
    for places, expected in ((1, {4}), (2, {0, 4}), (102, {0, 4}), (128, {0, 3, 4})):
        section = parse_section(places)
        drafts = draft_values(section, on_cpu=False)["speculative_config"]
        found = build_dynamic_sd_schedule_lookup(
            drafts["num_speculative_tokens_per_batch_size"], places, 4
        )
        assert set(found[1:]) == expected


def parse_section(places: int) -> Any:  # noqa: ANN401 - a section
    return RolloutServerSection(max_episodes=places, drafts="shared")


def test_workers_draft_what_prompts_and_other_replies_say() -> None:
    """On the CPU, with vLLM's tables of requests as plain tensors."""
    text = random.Random(1).sample(range(1000, 9000), 40)
    tokens = torch.zeros(3, 64, dtype=torch.int32)
    ends = torch.zeros(3, dtype=torch.int32)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=ends)
    )
    asked: list[torch.Tensor] = []
    speculator = SharedText(
        DRAFT, torch.device("cpu"), states, lambda drafts: asked.append(drafts) or drafts
    )

    def step(row: int, new: list[int], *, prompt: int = 0, length: int | None = DRAFT) -> list[int]:
        """A step in which one request gets the tokens `new`, the first `prompt` as its prompt."""
        end = int(ends[row])
        tokens[row, end : end + len(new)] = torch.tensor(new)
        ends[row] = end + len(new)
        batch = SimpleNamespace(
            idx_mapping=torch.tensor([row]),
            idx_mapping_np=np.array([row]),
            has_prefill=prompt > 0,
            is_prefilling_np=np.array([prompt > 0]),
            num_computed_tokens_np=np.array([0]),
            num_scheduled_tokens=np.array([prompt]),
            prefill_len_np=np.array([prompt]),
        )
        counted = torch.tensor([len(new) - prompt])
        found = speculator.propose(
            batch, None, None, None, None, counted, num_speculative_tokens=length
        )
        assert found.shape == (1, DRAFT)
        return found[0].tolist()

    assert step(0, [*text[:20], text[4]], prompt=20) == text[5:8]
    # The first sampled token, with what stands before it in the prompt.
    assert step(1, [7, *text[14:20]], prompt=6) == [text[19]] * DRAFT
    step(0, [*text[20:24]])
    assert step(1, [text[4], text[20]]) == text[21:24]
    assert len(asked) == 4
    # Nothing is looked up while drafts rest, but all is entered.
    assert step(0, text[24:30], length=0) == [0] * DRAFT
    assert len(asked) == 4
    assert step(2, [8, *text[24:26]], prompt=2) == text[26:29]
    assert speculator.propose(
        SimpleNamespace(idx_mapping=torch.tensor([0])), dummy_run=True
    ).tolist() == [[0] * DRAFT]


def test_a_worker_with_vllms_older_runner_is_refused() -> None:
    worker = object.__new__(DraftingWorker)
    worker.use_v2_model_runner = False
    with pytest.raises(RuntimeError, match='older runner.*rollout_server.drafts = "off"'):
        worker._make_model_runner()

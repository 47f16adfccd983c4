"""The scheduler that plans ahead while workers draft, with a model that is a table of numbers."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from slipstream.rollout_server.vllm.chunking_scheduler import scheduler_class
from slipstream.rollout_server.vllm.engine_arguments import engine_config
from support.fakes.small_configs import NGRAM, small_config
from support.fakes.tiny_models import SMALLEST, make_model_folder
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
DRAFT_TOKENS = NGRAM["num_speculative_tokens"]
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
            "engine": {"block_size": BLOCK, "speculative_config": NGRAM},
        },
    )
    found = engine_config(config, seed=0)
    # vLLM plans ahead on GPUs, and with other methods.
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

    def __init__(self, settings: Any, num_blocks: int) -> None:  # noqa: ANN401 - vLLM's
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

"""Values and tables of settings that no run can work with, each refused in one line."""

import math
import tomllib
from typing import Any

import pytest
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.settings.algorithm_section import AlgorithmSection
from support.fakes.small_configs import NGRAM, config_with, refusal_of, refusals

Changes = dict[str, Any]

TOO_LONG = "input should be a path of at most 4095 bytes and 255 for each of its names, got 300"
ADDRESS = "an address is host:port with a port up to 65535, got "
HOST = "a host is a name or an address, without a port, got "
TEXT = "input should be one line of text, not empty, got "
# Setting, value, rule.
VALUES: list[tuple[str, object, str]] = [
    (
        "run.name",
        "a b",
        "must be letters, digits and . _ - and begin with a letter or digit, got",
    ),
    (
        "run.name",
        "x" * 101,
        f"string should have at most 100 characters, got '{'x' * 79}...",
    ),
    ("run.steps", 0, "input should be greater than or equal to 1, got 0"),
    ("run.steps", True, "input should be a number, got true"),
    ("run.steps", 2**31, "input should be at most 2147483647, got 2147483648"),
    ("run.dir", "x" * 300, TOO_LONG),
    (
        "run.dir",
        "~/runs",
        "input should be a path without ~ or $ in front, got '~/runs'",
    ),
    (
        "model.path",
        "$HOME/m",
        "input should be a path without ~ or $ in front, got '$HOME/m'",
    ),
    (
        "weights.storage_url",
        "$H/w",
        "input should be a path without ~ or $ in front, got '$H/w'",
    ),
    (
        "model.dtype",
        "int8",
        "input should be 'float32', 'bfloat16' or 'float16', got 'int8'",
    ),
    ("model.path", "", f"{TEXT}''"),
    ("checkpoint.load", "a\nb", f"{TEXT}'a\\nb'"),
    ("tracking.project", "a\0b", f"{TEXT}'a\\x00b'"),
    ("tracking.trackers", [""], ""),
    ("algorithm.learning_rate", "fast", "input should be a valid number"),
    ("algorithm.learning_rate", 1e300, "input should be at most 1e+30, got 1e+300"),
    ("algorithm.learning_rate", math.nan, "input should be a finite number, got nan"),
    ("algorithm.kl.coefficient", math.inf, "input should be a finite number, got inf"),
    ("queue.kind", "kafka", "input should be 'grpc' or 'redis', got 'kafka'"),
    ("queue.max_bytes", 2**63, f"input should be at most {2**63 - 1}, got {2**63}"),
    (
        "controller.stall_timeout_s",
        1e10,
        "input should be 0.001 to 1e+09 seconds, got 1e+10",
    ),
    (
        "controller.stall_timeout_s",
        0.9,
        "input should be greater than or equal to 1, got 0.9",
    ),
    ("sampling.temperature", 2.1, "input should be less than or equal to 2, got 2.1"),
    ("sampling.stop", ["a", ""], "string should have at least 1"),
    *(
        ("learner.master", address, f"{ADDRESS}{address!r}")
        for address in (
            "a..b:1",
            "host:70000",
            "http://h:80",
            "[::1",
            "[::1:8",
            ":1",
            "a b:1",
        )
    ),
    (
        "environments",
        [{"name": "a", "reference": "no-reference"}],
        "a reference is package.mod",
    ),
    (
        "environments",
        {"name": "a"},
        "is a list of tables: write [[environments]] above each in pl",
    ),
    (
        "algorithm.loss",
        "trpo",
        "input should be ppo, gspo, cispo, sapo, reinforce or module:func",
    ),
    (
        "algorithm.loss_args",
        {"clip_low": 2},
        "of loss ppo: input should be less than or equal to ",
    ),
    (
        "algorithm.loss_args",
        {"clip_low": True},
        "of loss ppo: input should be a number, got true",
    ),
    (
        "algorithm.advantage_args",
        {"lam": 0.9},
        "advantage grpo has no argument 'lam'; known: none",
    ),
    (
        "algorithm.weight_args",
        {"bands": 1},
        "has no argument 'bands'; known: token_band, sequence",
    ),
    *(
        (
            "algorithm",
            {"weight": "split", "weight_args": arguments},
            rule,
        )
        for arguments, rule in (
            (
                {"cap": 2.0},
                "weight split has no argument 'cap'; known: engine_cap, engine_tok",
            ),
            (
                {"engine_sequence_band": [2, 1]},
                "engine_sequence_band must be [low, high] with lo",
            ),
            ({"staleness_token_band": [3, 4]}, "begins at 3, above staleness_cap 2"),
        )
    ),
    (
        "algorithm.weight_args",
        {"sequence_band": [2, 1]},
        "must be [low, high] with low < high, go",
    ),
]


@pytest.mark.parametrize(("key", "value", "rule"), VALUES)
def test_a_value_of_no_use_is_refused_with_its_setting(
    key: str, value: object, rule: str
) -> None:
    refusal = refusal_of({key: value})
    assert refusal.startswith(key)
    assert rule in refusal


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.steps", 2**31 - 1),
        ("queue.max_bytes", 2**62),
        ("rollout_server.drain_timeout_s", 0),
        ("rollout_server.drain_timeout_s", 0.001),
        ("learner.master", "[::1]:8"),
        ("queue.redis_url", "unix:///run/redis.sock"),
        ("queue.redis_url", "rediss://user:password@host:6379/0?ssl_ca_certs=x"),
        ("tracking.trackers", ["tensorboard", "wandb", "mlflow"]),
        *(
            ("weights.storage_url", url)
            for url in ("s3://bucket/a", "/mnt/a", "a", "memory://w")
        ),
    ],
)
def test_unusual_values_that_work_pass(key: str, value: object) -> None:
    config_with({key: value})


def test_the_host_of_node_0_is_kept_without_the_brackets_of_addresses_with_ports() -> (
    None
):
    assert config_with({"learner.master": "[::1]:0"}).learner.host == "::1"


def evaluated(**settings: object) -> Changes:
    return {"evaluations": [{"name": "held", "reference": "m:E", **settings}]}


def played(**settings: object) -> Changes:
    return {"environments": [{"name": "a", "reference": "m:E", **settings}]}


NAMED = {"rank": 8, "publish": "adapters", "adapters": ["code", "math"]}
FP8 = {"rollout_server.quantization": "fp8_per_channel"}
FP8_LEARNER: Changes = {"learner.fp8": "blockwise"}
FP8_LEARNER_NEEDS = "learner.fp8 = 'blockwise' needs "
GAE = {"algorithm.advantage": "gae", "critic.learning_rate": 1e-3}
SLEEP = {
    "controller.turns": "sleep",
    "learner.offload": {"gradients": True, "optimizer": True},
}
REPLAY = {"algorithm.router_replay": "rollout"}
# Images exclude that a cut is replayed.
NOT_REPLAYED: Changes = {"sampling.max_images": 1, "sampling.top_p": 0.8}
DRAFTS: Changes = {"drafts.tokens": 3}
STORED = {"weights.storage_url": "w"}
PRECISE = {
    "learner.ddp": {"use_distributed_optimizer": True},
    "learner.optimizer": {"use_precision_aware_optimizer": True},
}
FP8_NEEDS = "rollout_server.quantization = 'fp8_per_channel' needs "
LEARNED_FROM = (
    "the learner needs the log-probabilities of the distribution that was sampled from"
)
# Settings, beginning of the line.
TABLES: list[tuple[Changes, str]] = [
    # A layer that drafts.
    (
        DRAFTS | {"rollout_server.engine": {"speculative_config": NGRAM}},
        "drafts excludes rollout_server.engine.speculative_config",
    ),
    (
        DRAFTS | {"learner.world_size": 2, "learner.parallel.pp": 2},
        "drafts needs learner.parallel",
    ),
    (DRAFTS | {"lora.rank": 8}, "drafts needs lora.rank = 0"),
    (DRAFTS | {"sampling.max_images": 1}, "drafts needs sampling.max_images = 0"),
    (
        DRAFTS | {"algorithm.router_replay": "rollout"},
        "algorithm.router_replay excludes rollout_",
    ),
    (
        DRAFTS | {"algorithm.agreement": "bits"},
        "algorithm.agreement = 'bits' excludes drafts: sev",
    ),
    ({"drafts.tokens": 9}, "drafts.tokens: input should be less than or equal to 8"),
    # A part of the vocabulary that is not replayed.
    (
        NOT_REPLAYED,
        "sampling.top_p = 0.8 leaves out tokens that the learner's policy has, so algorithm.weight "
        "= 'token' would compare unlike probabilities, which biases even tokens of the newest "
        "weights: set sampling.top_p = 1.0 (evaluations may have their own), algorithm.weight = "
        "'none', or do without drafts, images, controller.client_loop and agreement = 'bits'",
    ),
    (
        {"sampling.max_images": 1, "sampling.min_p": 0.1},
        "sampling.min_p = 0.1 leaves out tokens that the learner's policy has, so algorithm.weight",
    ),
    *(
        (
            NOT_REPLAYED | {"algorithm.weight": "none"} | reader,
            f"sampling.top_p = 0.8 leaves out tokens that the learner's policy has, so {name} ",
        )
        for name, reader in {
            "algorithm.weight = 'sequence'": {"algorithm.weight": "sequence"},
            "algorithm.weight_args.token_band": {
                "algorithm.weight_args.token_band": [0.5, 2.0]
            },
            "algorithm.weight_args.sequence_band": {
                "algorithm.weight_args.sequence_band": [0.5, 2.0]
            },
            "algorithm.loss_args.ratio = 'behavior'": {
                "algorithm.loss": "gspo",
                "algorithm.loss_args": {"ratio": "behavior"},
            },
            "algorithm.kl.placement = 'reward'": {
                "algorithm.kl": {"coefficient": 1, "placement": "reward"}
            },
        }.items()
    ),
    (
        {
            "sampling.top_p": 0.8,
            "algorithm.kl.coefficient": 1,
            "reference.server": {"base_url": "http://h/v1", "model": "m"},
        },
        "reference.server excludes sampling.top_p = 0.8: it gives log-probabilities over all tok",
    ),
    # Sizes that must fit each other.
    (
        {"algorithm.mini_batches": 3},
        "algorithm.groups_per_step must be a multiple of mini_batches",
    ),
    (
        {"sampling.max_prompt_tokens": 16},
        "sampling.max_prompt_tokens must be below max_episode_t",
    ),
    (
        {"sampling.max_total_tokens": 15},
        "sampling.max_total_tokens must be 0 or at least max_ep",
    ),
    (
        {"queue.max_bytes": 4 * (2048 + 24 * 16) - 1},
        "queue.max_bytes must hold a batch, groups_per_step * group_size trajectories of 2432 "
        "bytes, 9728 bytes, got 9727",
    ),
    (
        played(name="held") | evaluated(),
        "environments and evaluations need different names, got h",
    ),
    (
        played(name="sums") | evaluated(name="sums/hard/far"),
        "a name must not go on behind another environment's by /, got sums/hard/far and sums",
    ),
    # Evaluations and profiles.
    (
        evaluated(num_episodes=9, samples_per_task=2),
        "evaluations.0: num_episodes must be a multip",
    ),
    (
        evaluated(samples_per_task=2, temperature=0),
        "evaluations.0: samples_per_task of 2 needs a ",
    ),
    (
        evaluated(temperature=0.005),
        "evaluations.0: temperature must be 0 or at least 0.01, got 0",
    ),
    (
        evaluated(max_reply_tokens=16),
        "sampling.max_episode_tokens must leave room for a prompt be",
    ),
    (
        {"debug.profile": {"start_step": 11}},
        "debug.profile.start_step must be at most run.steps",
    ),
    # A shared GPU and weights in storage.
    *(
        (
            SLEEP | STORED | {"controller.turns": turns},
            f'controller.turns must be "auto" or "off" with weights.storage_url, got {turns!r}',
        )
        for turns in ("pause", "sleep")
    ),
    (
        STORED | {"weights.transport": "nccl"},
        'weights.transport must be "auto" with weights.stora',
    ),
    # Precision.
    (
        FP8 | {"model.dtype": "float32"},
        f"{FP8_NEEDS}model.dtype = 'bfloat16', got 'float32'",
    ),
    (
        FP8 | {"lora": {"rank": 8, "publish": "adapters"}},
        f"{FP8_NEEDS}lora.publish = 'merged', go",
    ),
    *(
        (
            server | {"algorithm.weight": "none"},
            "engines in FP8 sample with other probabilities",
        )
        for server in (FP8, {"rollout_server.engine": {"kv_cache_dtype": "FP8_e4m3"}})
    ),
    *(
        (
            learner | {"algorithm.weight": "none"},
            "a learner in FP8 computes other probabilities than engines sample with: algorithm.we",
        )
        for learner in (FP8_LEARNER, {"learner.transformer": {"fp8": "e4m3"}})
    ),
    (
        FP8_LEARNER | {"algorithm.agreement": "bits"},
        "algorithm.agreement must be 'close' with a l",
    ),
    (
        FP8_LEARNER | {"model.dtype": "float32"},
        f"{FP8_LEARNER_NEEDS}model.dtype = 'bfloat16', got",
    ),
    (
        FP8_LEARNER | {"lora.rank": 8},
        f"{FP8_LEARNER_NEEDS}lora.rank = 0, since adapters were not",
    ),
    (
        FP8_LEARNER | DRAFTS,
        f"{FP8_LEARNER_NEEDS}no table drafts, since a layer that drafts was",
    ),
    (
        FP8_LEARNER | {"learner.transformer": {"fp8_recipe": "delayed"}},
        f"{FP8_LEARNER_NEEDS}no learner.transformer.fp8_recipe, got 'delayed'",
    ),
    (
        FP8_LEARNER | {"learner.transformer": {"fp8_param": True}},
        f"{FP8_LEARNER_NEEDS}no learner.transformer.fp8_param, got True",
    ),
    # vLLM's own arguments.
    *(
        (
            {"rollout_server.engine": {name: 1}},
            f"rollout_server.engine.{name} cannot be passed through: {reason}",
        )
        for name, reason in (
            ("logprobs_mode", LEARNED_FROM),
            ("max_num_seqs", "set rollout_server.max_episodes"),
            ("quantization", "set rollout_server.quantization"),
            ("default_mm_loras", "set lora.publish"),
            ("mm_processor_kwargs", "the learner would prepare images without it"),
            ("kv_events_config", "it opens a port without TLS or token"),
        )
    ),
    *(
        (
            {"rollout_server.engine": {"load_format": name}},
            "rollout_server.engine.load_format cannot be 'ipc_cache'",
        )
        for name in ("ipc_cache", "IPC_Cache")
    ),
    *(
        (
            {"rollout_server.engine": {"speculative_config": NGRAM | {name: method}}},
            "rollout_server.engine.speculative_config.rejection_sample_method must be one of "
            f"standard, block, got {method!r}",
        )
        for name in ("rejection_sample_method", "rejection-sample-method")
        for method in ("synthetic", "a newer one")
    ),
    (
        {"rollout_server.engine": {"spec_method": "ngram"}},
        "rollout_server.engine.spec_method cann",
    ),
    # Adapters.
    (
        played() | {"lora": NAMED},
        "a: adapter must be one of lora.adapters (code, math), got none",
    ),
    (
        evaluated(adapter="prose") | {"lora": NAMED},
        "held: adapter must be one of lora.adapters (c",
    ),
    (
        played(adapter="math"),
        "a: adapter must be left out without lora.adapters, got 'math'",
    ),
    *(
        (
            changes | {"lora": NAMED},
            f"lora.adapters must be empty with {what}, got code, math",
        )
        for what, changes in (
            ("use_precision_aware_optimizer", PRECISE),
            (
                "optimizer_cpu_offload",
                PRECISE | {"learner.optimizer": {"optimizer_cpu_offload": True}},
            ),
            (
                "reference.refresh_every_steps",
                {"algorithm.kl.coefficient": 0.1, "reference.refresh_every_steps": 2},
            ),
            ("a critic", GAE),
        )
    ),
    # Router replay.
    *(
        (
            REPLAY | {"rollout_server.engine": {name: value}},
            f"algorithm.router_replay {message}.{name}",
        )
        for name, value, message in (
            ("enable_prefix_caching", False, "needs rollout_server.engine"),
            ("speculative_config", NGRAM, "excludes rollout_server.engine"),
        )
    ),
    (
        REPLAY | {"sampling.stop": ["x"]},
        "algorithm.router_replay needs sampling.stop = []",
    ),
    *(
        (REPLAY | {"learner.transformer": {name: True}}, f"learner.transformer.{name} ")
        for name in ("moe_router_fusion", "enable_cuda_graph")
    ),
    # The algorithm.
    (
        GAE | {"critic.warmup_steps": 10},
        "critic.warmup_steps must be below run.steps, or the pol",
    ),
    *refusals("""
# Stages of an engine.
rollout_server = {pipeline_parallel_size = 2}, algorithm.router_replay = "rollout"
    rollout_server.pipeline_parallel_size = 2 needs algorithm.router_replay = 'off',
    got 'rollout': vLLM records no experts over stages
rollout_server = {pipeline_parallel_size = 2, engine.speculative_config = {method = "ngram"}}
    rollout_server.pipeline_parallel_size = 2 needs neither drafts nor
    rollout_server.engine.speculative_config: the last stage would draft alone, which was not tried
rollout_server = {pipeline_parallel_size = 2}, sampling.max_images = 1
    rollout_server.pipeline_parallel_size = 2 needs sampling.max_images = 0, got 1: images were not
    tried with stages
rollout_server = {tensor_parallel_size = 2, engine.distributed_executor_backend = "uni"}
    rollout_server.engine.distributed_executor_backend must be 'mp' with several workers,
    tensor_parallel_size * pipeline_parallel_size = 2, got 'uni'
rollout_server.engine.pipeline_parallel_size = 2
    rollout_server.engine.pipeline_parallel_size cannot be passed through: set
    rollout_server.pipeline_parallel_size
# Sizes that must fit each other.
rollout_server.max_episodes = 1
    a group runs on one server: algorithm.group_size must be at most
    rollout_server.max_episodes, got 2 and 1
sampling.max_reply_tokens = 16
    sampling.max_episode_tokens must leave room for a prompt beside max_reply_tokens, got 16
sampling.max_total_tokens = 2000000
    sampling.max_total_tokens of 2000000 makes trajectories too large to send
learner.micro_batch_tokens = 15
    an episode must fit one micro batch: sampling.max_episode_tokens must be at most
    learner.micro_batch_tokens * learner.parallel.cp, got 16, 15 and 1
learner.timeout_s = 43.0
    learner.timeout_s must be at least 2 * (weights.join_deadline_s + bucket_deadline_s)
# Files and credentials.
security.tls_key = "k"
    security: tls_certificate and tls_key go together, only one is set
# A shared GPU and weights in storage.
controller.turns = "sleep"
    controller.turns = "sleep" needs learner.offload.gradients and optimizer = true
weights.storage_url = "w", lora = {rank = 2, publish = "adapters"}
    lora.publish must be "merged" with weights.storage_url
# vLLM's own arguments.
rollout_server.engine.distributed_executor_backend = "ray"
    rollout_server.engine.distributed_executor_backend must be one of mp, uni, got 'ray'
rollout_server.engine.max_num_batched_tokens = 63
    rollout_server.engine.max_num_batched_tokens must be at least rollout_server.max_episodes: each
    episode has a token in a batch, got 63 and 64
rollout_server.max_episodes = 16385
    rollout_server.engine.max_num_batched_tokens must be at least rollout_server.max_episodes: each
    episode has a token in a batch, got 16384 (vLLM's own)
# Adapters.
lora.rank = 6, learner = {world_size = 4, parallel = {tp = 4}}
    lora.rank must be a multiple of learner.parallel.tp, got 6 and 4
lora.rank = 6, learner = {world_size = 4, parallel = {tp = 2, etp = 4}}
    lora.rank must be a multiple of learner.parallel.etp, got 6 and 4
lora.rank = 6, checkpoint.load = "elsewhere"
    checkpoint.load holds no adapters: lora.rank must be 0 with it, got 6
# The algorithm.
algorithm.loss = "reinforce", algorithm.mini_batches = 2
    algorithm: loss = 'reinforce' has no ratio that leads on from the policy before the step
algorithm.group_size = 1
    algorithm: advantage = 'grpo' compares a group: group_size must be >= 2, got 1
algorithm.group_size = 1, algorithm.advantage = "reinforce_pp", algorithm.filter = "unequal_rewards"
    algorithm: filter = 'unequal_rewards' would leave out every group of group_size = 1
checkpoint = {every_steps = 30, keep_every = 100}
    checkpoint: keep_every must be a multiple of every_steps, got 100 and 30: other versions are not
checkpoint = {every_steps = 0, keep_every = 100}
    checkpoint: keep_every must be a multiple of every_steps, got 100 and 0: other versions are not
checkpoint = {every_steps = 0, keep_batches = false}
    checkpoint: keep_batches = false needs checkpoints, and every_steps is 0: without one a run
algorithm.kl = {estimator = "k2"}
    algorithm: kl.coefficient must be given with kl.estimator: without it nothing is added (0)
algorithm.advantage = "none", algorithm.kl = {coefficient = 1, placement = "reward"}
    algorithm: advantage = 'none' trains no reward: it needs kl.coefficient > 0 and kl.placement =
    'loss', got 1.0 and 'reward'
algorithm.advantage = "score", algorithm.filter = "unequal_rewards"
    algorithm: filter = 'unequal_rewards' leaves out groups of equal rewards, but advantage
algorithm.loss_args.ratio = "behavior"
    algorithm: ratio = 'behavior' of the loss corrects already: weight must be 'none', got
algorithm.weight_args = {cap = 1.0, token_band = [1.5, 2.0]}
    algorithm: token_band of the weight begins at 1.5, above its cap 1.0
algorithm.kl = {coefficient = 0.1, estimator = "k1"}
    algorithm: kl.estimator = 'k1' in the loss has a gradient of mean 0: take k2 or k3
algorithm.advantage = "return_to_go", algorithm.group_size = 1
    algorithm: advantage = 'return_to_go' compares a group: group_size must be >= 2, got 1
algorithm.advantage = "none", algorithm.kl.coefficient = 1, algorithm.filter = "unequal_rewards"
    algorithm: filter = 'unequal_rewards' leaves out groups of equal rewards, but advantage = 'none'
algorithm.advantage = "gae"
    algorithm.advantage = 'gae' needs the table critic
critic.learning_rate = 1
    the table critic has no effect with algorithm.advantage = 'grpo'
# What replays a cut, and what it excludes.
sampling.top_k = 1025
    sampling.top_k must be at most 1024, as records have no room for more, got 1025
controller.address = "127.0.0.1:9400", tracking.prometheus = "127.0.0.1:9400"
    tracking.prometheus must have a port of its own, got controller.address 127.0.0.1:9400
algorithm.reward = "overlong"
    algorithm.reward_args: reward overlong needs the argument 'cache_tokens'
algorithm.reward = "overlong", algorithm.reward_args.cache_tokens = 17
    algorithm.reward_args.cache_tokens must be at most sampling.max_reply_tokens, got 17
"""),
]


@pytest.mark.parametrize(("changes", "line"), TABLES)
def test_settings_that_do_not_go_together_are_refused(
    changes: Changes, line: str
) -> None:
    assert refusal_of(changes).startswith(line)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret-of-mine@bucket/prefix",
        "https://store/weights?signature=secret-of-mine",
        "memory://weights#secret-of-mine",
        "simplecache::s3://key:secret-of-mine@bucket/prefix",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_shown(url: str) -> None:
    line = refusal_of({"weights.storage_url": url})
    assert line.startswith("weights.storage_url: a storage URL has no user, password")
    assert "secret-of-mine" not in line


@pytest.mark.parametrize(
    "changes",
    [
        evaluated(max_reply_tokens=15),
        evaluated(top_p=0.5),
        {"sampling.top_p": 0.8, "sampling.top_k": 50, "sampling.min_p": 0.1},
        {"sampling.top_k": 4, "algorithm.weight": "sequence"},
        {"sampling.top_k": 4, "algorithm.loss": "gspo", "algorithm.weight": "none"}
        | {"algorithm.loss_args": {"ratio": "behavior"}},
        {"sampling.top_p": 0.8, "sampling.max_images": 1, "algorithm.weight": "none"},
        *(
            FP8 | {"algorithm.weight": "none"} | corrected
            for corrected in (
                {"algorithm.weight_args": {"token_band": [0.5, 2.0]}},
                {"algorithm.loss_args": {"ratio": "behavior"}},
            )
        ),
        STORED,
        REPLAY,
        FP8_LEARNER,
        # The combinations of the table in docs/algorithms.md that need no other model.
        {
            "algorithm.loss_args": {"clip_high": 0.28},
            "algorithm.filter": "unequal_rewards",
            "algorithm.leave_out_truncated": True,
        },
        {"algorithm.advantage": "dr_grpo", "algorithm.aggregation": "fixed"},
        {"algorithm.advantage": "rloo", "algorithm.loss": "reinforce"},
        {"algorithm.advantage": "reinforce_pp", "algorithm.group_size": 1},
        {"algorithm.advantage": "reinforce_pp_baseline"},
        {
            "algorithm.loss": "gspo",
            "algorithm.loss_args": {"clip_low": 3e-4, "clip_high": 4e-4},
        },
        {
            "algorithm.loss": "cispo",
            "algorithm.loss_args": {
                "clip_low": 1.0,
                "clip_high": 3.0,
                "ratio": "behavior",
            },
            "algorithm.weight": "none",
        },
        {"algorithm.loss": "sapo", "algorithm.aggregation": "sequence_mean"},
        {"algorithm.mini_batches": 2, "algorithm.loss_args": {"dual_clip": 3.0}},
    ],
)
def test_settings_that_go_together_come_back_from_their_dump(changes: Changes) -> None:
    """A run's own config.toml names every setting and can be loaded again."""

    config = config_with(changes)
    assert (
        parse_config(tomllib.loads(dump_config(config)), source="config.toml") == config
    )


def test_a_probe_allows_for_the_rounding_of_fp8() -> None:
    caches = ("fp8", "int4_per_token_head", "nvfp4", "turboquant_3bit_nc")
    cached = [{"rollout_server.engine": {"kv_cache_dtype": name}} for name in caches]
    for settings in (
        FP8,
        FP8_LEARNER,
        {"learner.transformer": {"fp8": "e4m3"}},
        *cached,
    ):
        assert config_with(settings).probe_tolerance == 0.5
    assert config_with().probe_tolerance == 0.16


def test_engines_that_give_their_memory_back_keep_none_for_arriving_weights() -> None:
    assert not config_with(SLEEP).may_stage
    assert config_with().may_stage


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"max_staleness": 0, "weight": "none"}, ""),
        ({"weight": "none", "weight_args": {"token_band": [0.5, 2.0]}}, ""),
        ({"weight": "none", "weight_args": {"sequence_band": [0.5, 2.0]}}, ""),
        ({"loss": "cispo", "loss_args": {"ratio": "behavior"}, "weight": "none"}, ""),
        ({"weight": "none"}, "as if the newest had sampled them"),
        ({"weight": "none", "loss": "reinforce"}, "as if the newest had sampled them"),
        ({"weight": "none", "loss_args": {"ratio": "behavior"}}, "have no gradient"),
    ],
)
def test_stale_tokens_without_a_correction_are_warned_of(
    changes: Changes, words: str
) -> None:
    settings = AlgorithmSection.model_validate({"max_staleness": 3} | changes)
    warning = settings.staleness_warning(is_cut=False)
    assert (warning is None) == (not words)
    if warning:
        assert warning.startswith("algorithm.max_staleness is 3 without a correction: ")
        assert words in warning


def test_where_no_weight_is_right_the_warning_about_stale_tokens_advises_none() -> None:
    settings = {"algorithm.weight": "none", "algorithm.max_staleness": 2}
    (warning,) = config_with(settings).training_warnings
    assert warning.endswith("biases the gradient; set algorithm.weight")
    replayed = settings | {"sampling.top_p": 0.8}
    assert config_with(replayed).training_warnings == [warning]
    (cut_warning,) = config_with(
        replayed | {"sampling.max_images": 1}
    ).training_warnings
    assert cut_warning.endswith(
        "; set it to 0, or sample from the whole vocabulary and set algorithm.weight"
    )


def test_a_penalty_that_trains_groups_of_equal_rewards_is_warned_of() -> None:
    penalty = {
        "algorithm.reward": "overlong",
        "algorithm.reward_args": {"cache_tokens": 2},
    }
    (warning,) = config_with(penalty).training_warnings
    assert (
        "are trained by their lengths alone; filter = 'unequal_rewards' leaves them out"
        in warning
    )
    assert not config_with(
        penalty | {"algorithm.filter": "unequal_rewards"}
    ).training_warnings


def test_a_client_s_own_loop_exports_no_folders_by_itself() -> None:
    line = refusal_of(
        {
            "controller": {"client_loop": True},
            "learner": {"shared_prefix_tokens": 0},
            "environments": [],
            "checkpoint": {"export_every": 5},
        }
    )
    assert "checkpoint.export_every must be 0 with controller.client_loop" in line
    assert line.endswith("got 5")


STAGES = {"rollout_server.pipeline_parallel_size": 2}


def test_stages_of_engines_are_neither_quantized_nor_put_to_sleep() -> None:
    quantized = {
        "rollout_server.quantization": "fp8_per_channel",
        "model.dtype": "bfloat16",
        "algorithm.weight": "token",
    }
    asleep = {
        "controller.turns": "sleep",
        "learner.offload": {
            "gradients": True,
            "optimizer": True,
        },
    }
    start = "rollout_server.pipeline_parallel_size = 2 needs "
    assert config_with(quantized)
    assert config_with(asleep)
    assert refusal_of(STAGES | quantized).startswith(
        f"{start}rollout_server.quantization = 'off'"
    )
    assert refusal_of(STAGES | asleep).startswith(
        f"{start}controller.turns other than 'sleep'"
    )

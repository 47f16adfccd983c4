"""Values that no run can work with, in fields of every kind."""

import copy
import math
from pathlib import Path

import pytest
from pydantic import JsonValue
from slipstream.core.configuration.config_file import load_config, parse_config
from slipstream.core.errors import ConfigError

TABLE: dict[str, JsonValue] = {
    "run": {"name": "test", "steps": 10},
    "model": {"path": "models/tiny"},
    "algorithm": {"group_size": 4, "groups_per_step": 8, "learning_rate": 1e-3},
    "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 64},
    "evaluations": [{"name": "e", "reference": "a:B"}],
}
FILE = """
run = {name = "test", steps = 10}
model = {path = "models/tiny"}
algorithm = {group_size = 4, groups_per_step = 8, learning_rate = 1e-3}
sampling = {max_reply_tokens = 16, max_episode_tokens = 64}
"""

WRONG: list[tuple[str, JsonValue, str]] = [
    ("run.steps", True, "input should be a number, got true"),
    ("algorithm.learning_rate", False, "input should be a number, got false"),
    ("evaluations.0.max_reply_tokens", True, "input should be a number, got true"),
    ("run.steps", 2**31, "input should be at most 2147483647, got 2147483648"),
    ("run.seed", 10**30, f"input should be at most 2147483647, got {10**30}"),
    ("queue.max_bytes", 2**63, f"input should be at most {2**63 - 1}, got {2**63}"),
    ("algorithm.solved_reward", math.nan, "input should be a finite number, got nan"),
    ("algorithm.kl.coefficient", math.inf, "input should be a finite number, got inf"),
    ("evaluations.0.pass_reward", -math.inf, "input should be a finite number, got -inf"),
    ("algorithm.learning_rate", 1e300, "input should be at most 1e+30, got 1e+300"),
    ("controller.stall_timeout_s", 1e10, "input should be 0.001 to 1e+09 seconds, got 1e+10"),
    ("evaluations.0.timeout_s", 1e-9, "input should be 0.001 to 1e+09 seconds, got 1e-09"),
    ("learner.adam_betas.1", 1.0, "input should be less than 1, got 1.0"),
    ("sampling.temperature", 2.1, "input should be less than or equal to 2, got 2.1"),
    ("evaluations.0.temperature", 2.1, "input should be less than or equal to 2, got 2.1"),
    ("sampling.temperature", 0.001, "input should be greater than or equal to 0.01, got 0.001"),
    ("model.path", "", "input should be one line of text, not empty, got ''"),
    ("checkpoint.load", "a\nb", "input should be one line of text, not empty, got 'a\\nb'"),
    ("tracking.project", "a\0b", "input should be one line of text, not empty, got 'a\\x00b'"),
    (
        "run.dir",
        "x" * 300,
        "input should be a path of at most 4095 bytes and 255 for each of its names, got 300 "
        "characters",
    ),
    ("run.name", "x" * 101, f"string should have at most 100 characters, got '{'x' * 79}..."),
    ("weights.host", "host:80", "a host is a name or an address, without a port, got 'host:80'"),
    ("weights.host", "a..b", "a host is a name or an address, without a port, got 'a..b'"),
    (
        "learner.master",
        "http://h:80",
        "an address is host:port with a port up to 65535, got 'http://h:80'",
    ),
    (
        "rollout_server.max_episodes",
        16385,
        "rollout_server.engine.max_num_batched_tokens must be at least "
        "rollout_server.max_episodes: each episode has a token in a batch, got 16384 (vLLM's own) "
        "and 16385",
    ),
    ("learner.master", "[::1", "an address is host:port with a port up to 65535, got '[::1'"),
    ("learner.master", "[::1:8", "an address is host:port with a port up to 65535, got '[::1:8'"),
]


def with_value(path: str, value: JsonValue) -> dict[str, JsonValue]:
    table = copy.deepcopy(TABLE)
    table["learner"] = {"adam_betas": [0.9, 0.95]}
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place: object = table
    for parent in parents:
        place = (
            place.setdefault(parent, {})  # type: ignore[union-attr]
            if isinstance(place, dict)
            else place[parent]  # type: ignore[index]
        )
    place[last] = value  # type: ignore[index]
    return table


@pytest.mark.parametrize(("path", "value", "rule"), WRONG, ids=[f"{p}-{r}" for p, _, r in WRONG])
def test_a_value_of_no_use_is_refused_in_one_line(path: str, value: JsonValue, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_value(path, value), source="file")
    # Rules between sections name their settings themselves.
    place = "" if rule.startswith("rollout_server.") else f"{path}: "
    assert str(caught.value) == f"file: {place}{rule}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run.steps", 2**31 - 1),
        ("queue.max_bytes", 2**62),
        ("debug.kept_logits_share", 0),
        ("rollout_server.drain_timeout_s", 0),
        ("rollout_server.drain_timeout_s", 0.001),
        ("evaluations.0.temperature", 0),
        ("evaluations.0.args", {"text": "", "is": True, "lines": "a\nb", "far": 1e300}),
        ("weights.host", "::1"),
        ("weights.host", "[::1]"),
        ("learner.master", "[::1]:8"),
        ("queue.redis_url", "unix:///run/redis.sock"),
        ("queue.redis_url", "rediss://user:password@host:6379/0?ssl_ca_certs=x"),
        ("algorithm.leave_out_truncated", True),
    ],
)
def test_unusual_values_that_work_pass(path: str, value: JsonValue) -> None:
    parse_config(with_value(path, value), source="file")


def test_a_reply_does_not_end_at_no_text() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.stop\.1: string should have at least 1"):
        parse_config(with_value("sampling.stop", ["a", ""]), source="file")


def test_a_host_is_kept_without_the_brackets_of_addresses_with_ports() -> None:
    config = parse_config(with_value("weights.host", "[::1]"), source="file")
    assert config.weights.host == "::1"


def test_between_greedy_and_what_vllm_samples_at_there_is_nothing() -> None:
    with pytest.raises(ConfigError, match=r"temperature must be 0 or at least 0\.01, got 0\.005$"):
        parse_config(with_value("evaluations.0.temperature", 0.005), source="file")


def test_a_critic_that_warms_up_for_the_whole_run_is_refused() -> None:
    table = copy.deepcopy(TABLE)
    table["algorithm"]["advantage"] = "gae"  # type: ignore[call-overload,index]
    table["critic"] = {"learning_rate": 1e-3, "warmup_steps": 10}
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps must be below run\.steps, .* 10$"):
        parse_config(table, source="file")


def test_a_rule_between_sections_names_the_command_line_when_it_has_a_part(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE + "learner = {micro_batch_tokens = 63}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["run.seed=1"])
    assert str(caught.value).startswith(f"{path}: an episode must fit")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["learner.micro_batch_tokens=62"])
    assert str(caught.value).startswith(f"{path} and command line: an episode must fit")


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("controller.heartbeat_s", 0.001, "input should be greater than or equal to 0.01"),
        ("controller.heartbeat_timeout_s", 0.9, "input should be greater than or equal to 1"),
        ("controller.lease_timeout_s", 0.9, "input should be greater than or equal to 1"),
        ("controller.stall_timeout_s", 0.9, "input should be greater than or equal to 1"),
        ("controller.fleet_timeout_s", 0.9, "input should be greater than or equal to 1"),
        ("rollout_server.start_timeout_s", 0.9, "input should be greater than or equal to 1"),
        ("weights.bucket_deadline_s", 0.01, "input should be greater than or equal to 0.1"),
        ("weights.join_deadline_s", 0.9, "input should be greater than or equal to 1"),
        (
            "learner.timeout_s",
            43.0,
            "learner.timeout_s must be at least 2 * (weights.join_deadline_s + bucket_deadline_s)",
        ),
    ],
)
def test_a_limit_with_which_no_run_gets_on_is_refused(path: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_value(path, value), source="file")
    assert rule in str(caught.value)

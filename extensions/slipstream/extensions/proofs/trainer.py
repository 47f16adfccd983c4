"""Tests a run's algorithms: `python -m slipstream.extensions.proofs.trainer < FILE`.

Each function is tested separately first. Then all of them train a tiny random model on a CPU, in
layouts that must give equal results; some layouts have two ranks, each in its own process. A file
in a cache records a success, which is valid while sources, settings and versions stay the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import secrets
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from slipstream.core.configuration.config_file import dump_config, load_config, parse_config
from slipstream.core.errors import USAGE_ERROR, ConfigError, RunFailed
from slipstream.core.machine.address import free_port
from slipstream.core.machine.process import leave
from slipstream.core.settings.algorithm_section import KINDS
from slipstream.core.settings.config import Config
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.algorithms.functions import function_of, load_functions
from slipstream.learner.trainer.tiny_model import make_model
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE

if TYPE_CHECKING:
    from slipstream.learner.trainer.batches.batch import Batch
    from torch import Tensor

PROGRAM = "slipstream.extensions.proofs.trainer"
VOCAB, LENGTH, PROMPT, LONGEST_REPLY = 32, 40, 12, 8
GROUPS, STEPS = 4, 2
# Sums in another order differ by rounding, and a loss that clips enlarges the difference.
TOLERANCE = 1e-3
TIMEOUT_S = 600.0
LOOPBACK = "127.0.0.1"
# Metrics that depend on the layout.
OF_LAYOUTS = ("num_micro_batches", "shared_tokens")


PERMUTED = "order of episodes"
# Changes to the learner's settings, which otherwise have one rank, all sequences in one micro
# batch, and no shared prefixes. A layout with a table `parallel` has two ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "small micro batches": {"micro_batch_tokens": LENGTH},
    "shared prefixes": {"shared_prefix_tokens": 1},
    PERMUTED: {},
    "tp 2": {"parallel": {"tp": 2}},
    "pp 2": {"micro_batch_tokens": LENGTH, "parallel": {"pp": 2}},
    "cp 2": {"parallel": {"cp": 2}},
}


def main() -> int:
    """Runs the tests; returns 0 if all pass, else 2 after printing the faults to stderr.

    With `--cached`, only the first fault is printed, and what was proved before needs no new proof.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--second", nargs="+", help="folder and ports: the second rank")
    arguments = parser.parse_args()
    if arguments.second:
        folder, *ports = arguments.second
        _train_all(Path(folder), ports, rank=1)
        return 0
    from slipstream.extensions.proofs.proof import EpisodeProof
    from slipstream.extensions.proofs.token_proof import TokenProof

    # The output of libraries is not part of the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    try:
        load_functions(config)
        known = _known(config)
        if arguments.cached and known.is_file():
            return 0
        functions, faults = [function_of(config.algorithm, kind) for kind in KINDS], []
        for one in functions:
            if one.kind in ("loss", "weight"):
                faults += TokenProof(one, config.needs_reference).faults()
            else:
                has_values = config.critic is not None
                faults += EpisodeProof(config.algorithm, one.kind, has_values).faults()
        # Nothing is trained by functions that have a fault.
        faults = faults or train_alike(config)
    except ConfigError as error:
        faults = [str(error)]
    for fault in faults[:1] if arguments.cached else faults:
        print(f"slipstream: {fault}", file=sys.stderr)
    if faults:
        return USAGE_ERROR
    for function in functions:
        print(f"{function}: proved", file=answers)
    print(f"a tiny model is trained alike with {', '.join(LAYOUTS)}", file=answers, flush=True)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    except OSError as error:
        print(f"it will be proved again: {known}: {error.strerror}", file=answers, flush=True)
    return 0


def _known(config: Config) -> Path:
    """Returns the path of the cache file that exists if `prove` has passed for the same inputs."""
    proved = {
        "sources": config.sources,
        "algorithm": config.algorithm.model_dump(mode="json"),
        "roles": sorted(config.roles),
        "versions": [importlib.metadata.version(name) for name in ("slipstream-rl", "torch")],
    }
    key = hashlib.sha256(json.dumps(proved, sort_keys=True).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "slipstream" / "proved" / key


def train_alike(config: Config) -> list[str]:
    """Trains in all `LAYOUTS`; returns a line for each whose result differs from one rank's.

    If training fails in a layout, returns only a line about that.
    """
    os.environ[RENDEZVOUS_VARIABLE] = secrets.token_hex(16)
    ports = [str(free_port(LOOPBACK)) for _ in LAYOUTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, model in enumerate(("policy", "reference")):
            make_model(
                folder / model,
                num_layers=2,
                hidden_size=32,
                num_attention_heads=2,
                num_key_value_heads=2,
                tie_word_embeddings=False,
                seed=seed,
            )
        (folder / "config.toml").write_text(dump_config(config))
        command = [sys.executable, "-m", PROGRAM, "--second", name, *ports]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as second:
            try:
                trained = _train_all(folder, ports, rank=0)
            except RunFailed as error:
                return [str(error)]
            finally:
                second.kill()
    reference, faults = trained.pop("one rank"), []
    for layout, found in trained.items():
        for name, mine in reference.items():
            scale, gap = float(mine.abs().max()), float((mine - found[name]).abs().max())
            if not gap <= TOLERANCE * scale + 1e-6:
                what = f"{name} differs by {gap:.3g} from that of one rank"
                faults.append(f"a run with {layout}: {what}, which is up to {scale:.3g}")
                break
    return faults


def _train_all(folder: Path, ports: Sequence[str], *, rank: int) -> dict[str, dict[str, Tensor]]:
    """Returns the results of `_train` by layout; raises RunFailed if training fails."""
    config, found = load_config(folder / "config.toml"), {}
    for port, (name, layout) in zip(ports, LAYOUTS.items(), strict=True):
        world_size = 2 if "parallel" in layout else 1
        size, own = str(world_size), str(rank)
        os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "LOCAL_WORLD_SIZE": size}
        # A function could read these, as in a run.
        os.environ |= {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": size}
        if rank < world_size:
            settings = _settings(config, folder, {"world_size": world_size, **layout})
            try:
                found[name] = _train(settings, rank, is_permuted=name == PERMUTED)
            except Exception as error:
                raise RunFailed(f"a run with {name}: {type(error).__name__}: {error}") from error
    return found


def _train(config: Config, rank: int, *, is_permuted: bool) -> dict[str, Tensor]:
    """Trains `STEPS` steps on this rank; returns metrics and changes of the weights, by name."""
    import torch
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.export import hf_tensors

    policy = open_policy(config, Launch(rank, config.learner.world_size, rank))
    training = TrainingStep(policy, config, step_parts(config, policy))
    before = {name: tensor.clone() for name, tensor in hf_tensors(policy, torch.float32)}
    found = {}
    for step in range(STEPS):
        metrics = training.run(_batch(config, step, is_permuted=is_permuted)).metrics
        for name, value in metrics.items():
            if not name.endswith("_s") and name not in OF_LAYOUTS:
                found[f"{name} of step {step + 1}"] = torch.tensor(value)
    for name, tensor in hf_tensors(policy, torch.float32):
        found[f"the change of {name}"] = tensor.clone() - before[name]
    policy.ranks.close()
    return found


def _settings(config: Config, folder: Path, layout: Mapping[str, Any]) -> Config:
    given = tomllib.loads(dump_config(config))
    algorithm = given["algorithm"]
    algorithm |= {"group_size": min(3, config.algorithm.group_size), "groups_per_step": GROUPS}
    algorithm |= {"max_staleness": 1, "learning_rate": 0.05, "warmup_steps": 0, "decay": "none"}
    algorithm |= {"mini_batches": 2, "epochs": 1, "router_replay": "off"}
    if algorithm["reward"] == "overlong":
        algorithm["reward_args"]["cache_tokens"] = LONGEST_REPLY // 2
    environments = [
        {key: one[key] for key in ("name", "reference")} for one in given["environments"]
    ]
    table: dict[str, Any] = {
        "run": {"name": "check", "steps": STEPS},
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "algorithm": algorithm,
        "environments": environments,
        "sampling": {"max_reply_tokens": LONGEST_REPLY, "max_episode_tokens": LENGTH},
        "learner": {
            "micro_batch_tokens": GROUPS * 3 * LENGTH,
            "shared_prefix_tokens": 0,
            "optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0},
            "weight_decay": 0.0,
            "grad_clip": 0.0,
            "timeout_s": TIMEOUT_S,
            **layout,
        },
    }
    if config.needs_reference:
        top_k = 0 if config.reference is None else min(5, config.reference.top_k)
        table["reference"] = {"path": str(folder / "reference"), "top_k": top_k}
    if config.critic is not None:
        table["critic"] = {"path": str(folder / "policy"), "learning_rate": 0.05}
    return parse_config(table, source="check")


def _batch(config: Config, step: int, *, is_permuted: bool) -> Batch:
    """Returns a batch of random episodes, which depend only on `config` and `step`.

    `is_permuted`: whether the groups of each mini-batch and the episodes of each group are
    reordered.
    """
    from slipstream.learner.trainer.batches.batch import Batch

    chance = np.random.default_rng(step)
    names = [one.name for one in config.environments] or ["environment"]
    groups = []
    for group in range(GROUPS):
        prompt = chance.integers(0, VOCAB, chance.integers(1, PROMPT))
        of = (step, group, names[group % len(names)])
        members = range(config.algorithm.group_size)
        groups.append([_episode(chance, *of, member, prompt) for member in members])
    if is_permuted:
        groups = [groups[place][::-1] for place in (1, 0, 3, 2)]
    return Batch(step, "check", tuple(one for members in groups for one in members))


def _episode(
    chance: np.random.Generator,
    step: int,
    group: int,
    environment: str,
    member: int,
    prompt: np.ndarray,
) -> Trajectory:
    """Returns a random episode of 1 or 2 replies, some tokens sampled by the previous version.

    The first of two replies earns a quarter of the reward, and both end at one state of the group.
    """
    from slipstream.extensions.proofs.proof import AnyMetrics

    replies = chance.integers(1, LONGEST_REPLY + 1, 1 + member % 2).tolist()
    runs = [len(prompt), replies[0], *(length for one in replies[1:] for length in (2, one))]
    sampled = sum(replies)
    old = int(chance.integers(0, sampled + 1)) if step else 0
    spans = [(old, step - 1), (sampled - old, step)]
    logprobs = -np.log(VOCAB) + 0.3 * chance.standard_normal(sampled)
    tokens = np.array([*prompt, *chance.integers(0, VOCAB, sum(runs[1:]))], dtype=np.uint32)
    reward, earned = float(chance.integers(0, 3)) / 2, None
    if replies[1:]:
        tokens[sum(runs[:2]) : sum(runs[:3])] = group
        earned = np.zeros(sampled, dtype=np.float32)
        earned[[replies[0] - 1, -1]] = reward / 4, 3 * reward / 4
    return Trajectory(
        run_id="check",
        group_id=GroupId(f"group-{step}-{group}"),
        member=member,
        attempt=0,
        server_id=ServerId("server"),
        server_epoch=1,
        environment=environment,
        task_index=group,
        seed=0,
        purpose=Purpose.TRAINING,
        status=Status.TRUNCATED if chance.random() < 0.2 else Status.COMPLETED,
        token_ids=tokens,
        run_lengths=tuple(runs),
        behavior_logprobs=logprobs.astype(np.float32),
        version_spans=tuple(VersionSpan(n, PolicyVersion(0, of)) for n, of in spans if n),
        reward=reward,
        token_rewards=earned,
        metrics=AnyMetrics(group * 16 + member),  # type: ignore[arg-type]
        num_turns=len(replies),
    )


if __name__ == "__main__":
    leave(main())

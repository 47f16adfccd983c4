"""What replaying the engine's experts does to the learner's log-probabilities, on this machine.

`PYTHONPATH=tests python -m support.rigs.router_replay_run --out DIR`: a small mixture of experts
generates with vLLM, in two turns over cached prefixes and across a pause that forgets them; then a
learner with the same weights computes the same tokens, once with its own experts and once with the
engine's, before and after its routers were disturbed, and trains a step. On a GPU if there is one.
Writes what it finds to DIR/result.json and prints it; exit code 1 when experts were lost or replay
widened the gap.
"""

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion, RoutedExperts, Trajectory, VersionSpan
from slipstream.protocol.codec import decode_trajectory, encode_trajectory
from slipstream.rollout_server import child_processes

from support.fakes.parity_models import make_mixture
from support.fakes.plain_trajectory import plain_trajectory
from support.references.replayed_gaps import ReplayedGaps, disturb_routers
from support.rigs.started_engine import end_engine, until_generated

SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
}
PHASES = {"generate": 300.0, "learn": 300.0}
NUM_EPISODES = 24
PROMPT_TOKENS = 140
REPLY_TOKENS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for models and results"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--eager", action="store_true", help="no torch.compile, no CUDA graphs"
    )
    parser.add_argument(
        "--engine-tp", type=int, default=1, metavar="N", help="workers of vLLM"
    )
    parser.add_argument(
        "--phase", choices=tuple(PHASES), help="one alone; default: one by one"
    )
    arguments = parser.parse_args()
    if arguments.phase is not None:
        phase = {"generate": generate, "learn": learn}[arguments.phase]
        phase(arguments.out, config_of(arguments))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    make_mixture(arguments.out / "model", seed=0, **SIZES)
    for name, limit_s in PHASES.items():
        print(f"{name} ...", flush=True)
        command = [sys.executable, *sys.argv, "--phase", name]
        subprocess.run(command, check=True, timeout=limit_s)
    parsed = json.loads((arguments.out / "result.json").read_text())
    print(json.dumps(parsed, indent=1), flush=True)
    wrong = problems(parsed)
    for problem in wrong:
        print(f"WRONG: {problem}", flush=True)
    return 1 if wrong else 0


def problems(found: dict) -> list[str]:
    """What contradicts the promise: nothing is lost, and replay never widens the gap."""
    wrong = [
        f"the gap grew by replay{state}"
        for state in ("", "_disturbed")
        if found[f"gap_replayed{state}"] > found[f"gap_own{state}"]
    ]
    if found["routing_unrecorded"] > 0:
        wrong.append("experts were lost")
    if not math.isfinite(found["loss"]) or not found["grad_norm"] > 0:
        wrong.append("the step has no loss or gradient")
    return wrong


def config_of(arguments: argparse.Namespace) -> Config:
    table = {
        "run": {"name": "router-replay", "steps": 1},
        "model": {"path": str(arguments.out / "model"), "dtype": arguments.dtype},
        "algorithm": {
            "group_size": NUM_EPISODES,
            "groups_per_step": 1,
            "max_staleness": 1,
            "learning_rate": 1e-4,
            "router_replay": "rollout",
        },
        "sampling": {"max_reply_tokens": REPLY_TOKENS, "max_episode_tokens": 300},
        "learner": {"micro_batch_tokens": 1024},
        "rollout_server": {
            "max_episodes": NUM_EPISODES,
            "gpu_memory_utilization": 0.3,
            "enforce_eager": arguments.eager or child_processes.is_cpu_build(),
            "tensor_parallel_size": arguments.engine_tp,
        },
    }
    return parse_config(table, source="router_replay_run")


def generate(folder: Path, config: Config) -> None:
    """Writes the trajectories, each as it would travel."""
    # The process must not initialize CUDA: processes forked from it could not use a GPU.
    os.environ |= child_processes.engine_environment(
        config, on_cpu=child_processes.is_cpu_build()
    )
    torch.set_num_threads(1)
    trajectories = asyncio.run(_generate(config))
    for trajectory in trajectories:
        path = folder / f"trajectory-{trajectory.member}.bin"
        path.write_bytes(encode_trajectory(trajectory))
    for leftover in sorted(folder.glob("trajectory-*.bin"))[len(trajectories) :]:
        leftover.unlink()


async def _generate(config: Config) -> list[Trajectory]:
    from slipstream.rollout_server.engine_interface import Sampling
    from slipstream.rollout_server.vllm.engine import VllmEngine

    engine = await VllmEngine.start(config, seed=1)
    sampling = Sampling(1.0, 1.0, 0, REPLY_TOKENS, 2, 300, ignore_eos=True)

    async def episode(member: int) -> Trajectory:
        random = np.random.default_rng(member)
        tokens = [1, *random.integers(4, 32, PROMPT_TOKENS + member).tolist()]
        runs = [len(tokens)]
        logprobs = []
        experts = []
        spans = []
        for turn in range(2):
            reply = await engine.requests.generate(
                f"episode-{member}",
                tokens,
                sampling,
                REPLY_TOKENS,
                experts_from=sum(map(len, experts)),
            )
            experts.append(reply.expert_ids)
            logprobs.append(reply.logprobs)
            spans += reply.version_spans
            tokens = tokens + reply.token_ids.tolist()
            runs.append(len(reply.token_ids))
            if turn == 0:
                tokens += [5, 6, 3]
                runs.append(3)
        return plain_trajectory(
            tokens,
            runs,
            np.concatenate(logprobs),
            member=member,
            version_spans=tuple(VersionSpan(*span) for span in spans),
            reward=float(member % 2),
            routed_experts=RoutedExperts.of_parts(
                experts, engine.num_experts, num_tokens=len(tokens)
            ),
        )

    try:
        await engine.pauses.resume(PolicyVersion(0, 0))
        running = [
            asyncio.create_task(episode(member)) for member in range(NUM_EPISODES)
        ]
        await until_generated(engine, 5 * NUM_EPISODES, running)
        # The same weights again: everything that runs is computed anew.
        await engine.pauses.pause()
        await engine.pauses.resume(PolicyVersion(0, 0))
        return await asyncio.gather(*running)
    finally:
        await end_engine(engine)


def learn(folder: Path, config: Config) -> None:
    """Writes the gaps of the log-probabilities and the metrics of a step."""
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    trajectories = [
        decode_trajectory((folder / f"trajectory-{member}.bin").read_bytes())
        for member in range(NUM_EPISODES)
    ]
    batch = Batch(0, "batch", tuple(trajectories))
    policy = open_policy(config, Launch.from_environment())
    gaps = ReplayedGaps(policy, batch, config)
    facts = gaps.both("")
    weights = disturb_routers(policy.chunks, scale=0.01)
    facts |= gaps.both("_disturbed")
    for weight, before in weights:
        weight.data.copy_(before)
    metrics = (
        TrainingStep(policy, config, step_parts(config, policy)).run(batch).metrics
    )
    names = (
        "routing_difference",
        "routing_unrecorded",
        "logprob_gap_mean",
        "loss",
        "grad_norm",
    )
    facts |= {name: metrics[name] for name in names}
    facts |= {"device": policy.ranks.device.type, "dtype": config.model.dtype}
    (folder / "result.json").write_text(json.dumps(facts, indent=1) + "\n")
    policy.ranks.close()


if __name__ == "__main__":
    sys.exit(main())

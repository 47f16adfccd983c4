r"""Measures the gap between the log-probabilities of learner and server in bfloat16, after updates.

The real processes run synchronously, so that every trained token has lag 0. After `--steps`
updates, each of which is sent to the server, it measures:

- the KL divergence of the sampler from the learner, estimated (k3) over the tokens that the newest
  version sampled;
- the engine that took all updates against an engine that loads the run's exported folder:
  log-probabilities of the same tokens, which should be equal bit for bit.

    python -m benchmarks.agreement.logprob_gap --device cuda --model models/smollm2
    python -m benchmarks.agreement.logprob_gap
    python -m benchmarks.agreement.logprob_gap --device cuda --quantization fp8_per_channel
    python -m benchmarks.agreement.logprob_gap --device cuda --fp8 blockwise
    python -m benchmarks.agreement.logprob_gap --device cuda --model MIXTURE --replies --ep 2

On a GPU machine learner and server share one GPU; with `--ep N` the learner has N, and the server
one of them. Prints one table;
benchmarks/results/logprob_gap.json is written after the run and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.core.configuration.config_file import load_config, parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.protocol.codec import unpack_logprobs, unpack_tokens

from benchmarks.common.measure import RESULTS, part, program, progress, table, visible, write_result
from benchmarks.common.rig import Placement, Rig
from benchmarks.common.shapes import make_apart

KL_TARGET = 1e-3
# bits: bfloat16 with `algorithm.agreement = "bits"`.
DTYPES = ("bfloat16", "float16", "float32", "bits")
START_LIMIT_S = 300.0
STEPS_LIMIT_S = 300.0
FRESH_LIMIT_S = 300.0
# Seconds that the exported folder of a large model may take.
EXPORT_LIMIT_S = 180.0
# Memory for a batch of these short episodes, and for the prompts of one pass.
GPU_ENGINE = {"kv_cache_memory_bytes": 3 << 29, "max_num_batched_tokens": 2048}


def config_of(arguments: argparse.Namespace, folder: Path) -> Config:
    """Returns the settings: a given model answers sums, a random one gives any replies."""
    on_gpu = arguments.device == "cuda"
    environment: dict[str, Any] = {
        "name": "replies",
        "reference": "benchmarks.common.workloads:LognormalReplies",
        "args": {"median": 16, "sigma": 0.5, "longest": 32},
    }
    if arguments.images:
        environment["reference"] = "benchmarks.common.workloads:ImageReplies"
    elif arguments.model is not None and not arguments.replies:
        environment = {
            "name": "arithmetic",
            "reference": "deploy.environments.arithmetic:Arithmetic",
            "args": {
                "digits": 1,
                "operations": ["+", "-"],
                "split": "train",
                "format_credit": 0.0,
            },
        }
    settings = {
        # The batch of the step beyond has the tokens of the last version that is measured.
        "run": {
            "name": "r",
            "dir": str(folder),
            "steps": arguments.steps + 1,
            "seed": arguments.seed,
        },
        "model": {
            "path": str(folder / "model"),
            "dtype": arguments.dtype.replace("bits", "bfloat16"),
        },
        "environments": [environment],
        "algorithm": {
            "group_size": 8,
            "groups_per_step": 16 if on_gpu else 2,
            "max_staleness": 0,
            "learning_rate": arguments.learning_rate,
            "router_replay": "rollout" if arguments.replay else "off",
            "agreement": "bits" if arguments.dtype == "bits" else "close",
        },
        "sampling": {
            "max_reply_tokens": 32,
            "max_episode_tokens": 128,
            **({"max_images": 1, "max_image_bytes": 1 << 17} if arguments.images else {}),
        },
        "controller": {"address": f"127.0.0.1:{free_port('127.0.0.1')}"},
        "checkpoint": {"every_steps": 0},
        "learner": {
            "micro_batch_tokens": 8192 if on_gpu else 2048,
            "threads": 4 if on_gpu else 1,
            "world_size": arguments.ep,
            "parallel": {"ep": arguments.ep},
            "export_final": arguments.fresh,
            "fp8": arguments.fp8,
        },
        "rollout_server": {
            "max_episodes": 128 if on_gpu else 16,
            "threads": 4 if on_gpu else 1,
            "enforce_eager": True,
            "quantization": arguments.quantization,
            # Others may use the GPU: what vLLM measures of its memory would be theirs too.
            **({"gpu_memory_utilization": 0.1} if on_gpu else {}),
            "engine": (GPU_ENGINE if on_gpu else {}) | json.loads(arguments.engine),
        },
        "weights": {
            "transport": arguments.transport,
            "verify_every": 1,
            "bucket_deadline_s": 30.0,
            "join_deadline_s": 120.0,
        },
    }
    return parse_config(settings, source="the benchmark")


async def train(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the rows of all steps, and both sides' log-probabilities of the last probe."""
    # NCCL refuses two ranks on one GPU.
    server = arguments.ep if arguments.transport == "nccl" else 0
    shared = (
        (tuple(range(arguments.ep)), ((server,),)) if arguments.device == "cuda" else ((), ((),))
    )
    place = Placement(*shared, arguments.device)
    async with Rig(config, place, grace_s=EXPORT_LIMIT_S) as rig:
        # A mixture's first and last step are without replay, those between with it.
        rig.controller.former.without_experts = frozenset({0, arguments.steps})
        # Both load at once: the engine's memory is told, not measured.
        await rig.start_trainers()
        await rig.start_server(0)
        progress(f"serving after {await rig.until_serving(START_LIMIT_S):.0f} s")
        controller = rig.controller
        await rig.until(lambda: len(controller.rows) > arguments.steps, "steps", STEPS_LIMIT_S)
        last = arguments.steps + 1
        await rig.until(
            lambda: any(p.step == last and p.answers for p in controller.publishes),
            "the last publish",
            60.0,
        )
        publish = next(p for p in controller.publishes if p.step == last and p.answers)
        assert publish.probe is not None
        (answer,) = publish.answers.values()
        lengths = list(publish.probe.lengths)
        return {
            "rows": controller.rows,
            "token_ids": unpack_tokens(publish.probe.token_ids).tolist(),
            "lengths": lengths,
            "learner": unpack_logprobs(publish.probe.expected_logprobs).tolist(),
            "server": unpack_logprobs(answer).tolist(),
        }


def score_afresh(path: Path) -> None:
    """Loads the export in a program of its own; prints the log-probabilities of the probe."""
    from slipstream.rollout_server import child_processes

    job = json.loads(path.read_text())
    config = load_config(Path(job["config"]), [f'model.path="{job["model"]}"'])
    os.environ |= child_processes.engine_environment(config, on_cpu=child_processes.is_cpu_build())

    async def score() -> list[float]:
        from slipstream.core.types import PolicyVersion
        from slipstream.rollout_server.vllm.engine import VllmEngine

        engine = await VllmEngine.start(config, seed=1)
        try:
            await engine.pauses.resume(PolicyVersion(0, 0))
            cuts = np.cumsum(job["lengths"])[:-1]
            sequences = [part.tolist() for part in np.split(np.asarray(job["token_ids"]), cuts)]
            return (await engine.teacher_forced_logprobs(sequences)).tolist()
        finally:
            await engine.aclose()

    Path(job["answer"]).write_text(json.dumps(asyncio.run(score())))


def compare_afresh(
    config: Config, run_record: dict[str, Any], arguments: argparse.Namespace
) -> Any:  # noqa: ANN401
    """Returns a fresh engine's log-probabilities of the last probe's tokens, as an array."""
    folder = config.run_dir
    job = {
        "config": str(folder / "config.toml"),
        "model": str(folder / "checkpoints" / "final"),
        "answer": str(folder / "fresh.json"),
        **{key: run_record[key] for key in ("token_ids", "lengths")},
    }
    path = folder / "fresh-job.json"
    path.write_text(json.dumps(job))
    environ = dict(os.environ)
    if arguments.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = visible([0])
    with (folder / "logs" / "fresh.log").open("wb") as log:
        subprocess.run(
            [*program("agreement.logprob_gap"), "--score", str(path)],
            check=True,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=FRESH_LIMIT_S,
        )
    return np.asarray(json.loads((folder / "fresh.json").read_text()), dtype=np.float32)


def figures(run_record: dict[str, Any], fresh: Any) -> dict[str, float]:  # noqa: ANN401 - array or None
    """Returns the figures that are the claims, in nats."""
    rows = run_record["rows"]
    learner = np.asarray(run_record["learner"], dtype=np.float32)
    server = np.asarray(run_record["server"], dtype=np.float32)
    result = {
        "updates": float(len(rows) - 1),
        "tokens": rows[-1]["logprob_gap_tokens"],
        "kl_k3": rows[-1]["kl"],
        "kl_k3_mean_of_steps": float(np.mean([row["kl"] for row in rows])),
        "gap_mean": rows[-1]["logprob_gap_mean"],
        "gap_max": rows[-1]["logprob_gap_max"],
        "gap_mean_at_start": rows[0]["logprob_gap_mean"],
        "clip_fraction": rows[-1].get("clip_fraction", 0.0),
        "entropy": rows[-1]["entropy"],
        "probe_gap_mean": float(np.abs(learner - server).mean()),
    }
    if len(rows) > 2 and rows[-2].get("routing_unrecorded") == 0:
        result["replayed_gap_mean"] = rows[-2]["logprob_gap_mean"]
        result["routing_difference"] = rows[-2]["routing_difference"]
    if fresh is not None:
        result["fresh_gap_max"] = float(np.abs(fresh - server).max())
        result["fresh_gap_mean"] = float(np.abs(fresh - server).mean())
        result["fresh_is_bit_equal"] = float(np.array_equal(fresh, server))
        result["fresh_to_learner_mean"] = float(np.abs(fresh - learner).mean())
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="default: a tiny random one")
    parser.add_argument("--replies", action="store_true", help="the given model is a random one")
    parser.add_argument("--images", action="store_true", help="each reply is behind an image")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="replay the engine's experts in all steps but the first and the last",
    )
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument(
        "--fresh",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="export, and compare with an engine that loads the folder",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quantization", default="off", help="rollout_server.quantization")
    parser.add_argument("--fp8", default="off", help="learner.fp8")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--steps", type=int, default=20, help="updates before the measurement")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0, help="run.seed")
    parser.add_argument("--out", type=Path, default=RESULTS / "logprob_gap.json")
    parser.add_argument("--engine", default="{}", help="rollout_server.engine, as JSON")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.score is not None:
        score_afresh(arguments.score)
        return
    failures: dict[str, str] = {}
    run_record: dict[str, Any] = {}
    fresh = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or make_apart(folder / "made", "tiny", dtype="bfloat16")
        (folder / "model").symlink_to(model.resolve())
        config = config_of(arguments, folder)
        with part("the run", failures):
            run_record = asyncio.run(train(config, arguments))
        if run_record and arguments.fresh:
            write(arguments, run_record, None, failures)
            with part("a fresh engine", failures):
                fresh = compare_afresh(config, run_record, arguments)
        if failures:
            for log in sorted((config.run_dir / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-20_000:]}", flush=True)
    print("\n".join(write(arguments, run_record, fresh, failures)), flush=True)
    if failures:
        raise SystemExit(f"failed: {', '.join(failures)}")


def write(
    arguments: argparse.Namespace,
    run_record: dict[str, Any],
    fresh: Any,  # noqa: ANN401 - array or None
    failures: dict[str, str],
) -> list[str]:
    """Writes the result as far as it is known; returns its table."""
    result = figures(run_record, fresh) if run_record else {}
    lines = table(["figure", "value"], [[key, f"{value:.3g}"] for key, value in result.items()])
    lines.append(f"KL target: at most {KL_TARGET:g}")
    record = {"figures": result, "target": KL_TARGET, "table": lines, "failures": failures}
    rows = {
        "rows": run_record.get("rows", []),
        "settings": {k: str(v) for k, v in vars(arguments).items()},
    }
    write_result("logprob_gap", {**record, **rows}, arguments.out)
    return lines


if __name__ == "__main__":
    main()

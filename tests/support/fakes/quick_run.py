"""`slipstream run` with stand-ins for an engine and a step, and all else as a user has it.

`python -m support.fakes.quick_run run CONFIG.toml` starts the command; its ranks and servers are
`quick_rank` and `quick_server`. `started PARENT CONFIG.toml` does so for a program of
Python. `replay RUN` computes the recorded steps again. `chaos CONFIG.toml
--kills 60` does faults to such a run, with `tests` on PYTHONPATH.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
from slipstream.core.configuration.config_file import load_config
from slipstream.core.types import PolicyVersion
from slipstream.protocol.checkpoints import complete_steps
from slipstream.protocol.codec import trajectory_from_pb, version_from_pb, version_to_pb
from slipstream.v1 import trainer_pb2

from support.fakes.fake_engine import FakeEngine
from support.fakes.fake_server import LAYOUT
from support.fakes.fake_trainer import PROBE, START, trained
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.waiting import until

MODULES = {"rank": "support.fakes.quick_rank", "server": "support.fakes.quick_server"}
STATE = "state.json"
STEP_S = 0.05
TOKEN_S = 0.002
CHECKPOINT_STEPS = 5
# Adapter, or "" for the policy -> what its begin and steps have made of it.
Models = dict[str, str]


def digests_of(version: PolicyVersion) -> list[bytes]:
    """What a trainer sends and an engine loads: other bytes for each version."""
    return [hashlib.blake2b(str(version).encode(), digest_size=16).digest()]


class QuickEngine(FakeEngine):
    """Samples a token in some milliseconds; each token says which version it is of."""

    max_model_len = 4096

    @classmethod
    async def start(cls, config, *, seed: int) -> "QuickEngine":
        """Waits until as many engines start as the variable QUICK_TOGETHER says."""
        del seed
        (config.run_dir / f"engine-{os.getpid()}").touch()
        together = int(os.environ.get("QUICK_TOGETHER", "1"))
        await until(lambda: len(list(config.run_dir.glob("engine-*"))) >= together)
        engine = cls()
        engine.probe = np.full(3, -2.0, np.float32)
        return engine

    async def prepare_weights(self, order, layout, first_rank: int) -> None:
        self.digests = tuple(digests_of(version_from_pb(order.version)))
        await super().prepare_weights(order, layout, first_rank)

    async def generate(self, *args, **kwargs):
        await asyncio.sleep(TOKEN_S)
        return await super().generate(*args, **kwargs)


def passed(models: Models, given: trainer_pb2.Pass) -> trainer_pb2.PassReport:
    """Values that depend on the model and on all that the pass says but its id."""
    state = hashlib.blake2b(models.get(given.adapter.name, "").encode())
    state.update(f"{given.loss} {given.loss_args_json} {given.backward}".encode())
    outputs = []
    for sequence in given.sequences:
        state.update(sequence.SerializeToString(deterministic=True))
        values = np.resize(
            np.frombuffer(state.digest(), dtype="u1"), len(sequence.targets) // 4
        )
        outputs.append((-values / 64).astype("<f4").tobytes())
    total = float(int.from_bytes(state.digest()[:4], "big"))
    return trainer_pb2.PassReport(
        id=given.id, logprobs=outputs, metrics={"loss:sum": total}
    )


def ordered(models: Models, kept: dict[int, Models], given, passes) -> None:
    """Changes the model as a client's step asks; `kept` has the models of each version."""
    name = given.adapter.name
    state = hashlib.blake2b(models.get(name, "").encode(), digest_size=16)
    match given.WhichOneof("step"):
        case "adam":
            state.update(given.adam.SerializeToString(deterministic=True))
            for client_pass in passes:
                state.update(repr(passed(models, client_pass).metrics).encode())
        case "begin":
            data = given.begin.SerializeToString(deterministic=True)
            state = hashlib.blake2b(
                data + f"{given.adapter.rank}".encode(), digest_size=16
            )
        case "load":
            models[name] = kept[given.load.step].get(given.load.adapter, "")
            return
        case _:
            return
    models[name] = state.hexdigest()


def made(
    digest: bytes, batch, header, passes, models: Models, kept: dict[int, Models]
) -> bytes:
    """The digest of the weights after a step, which changes the models."""
    digest = trained(digest, batch)
    if header.HasField("given"):
        ordered(models, kept, header.given, passes)
        digest = trained(digest, [], json.dumps(models, sort_keys=True).encode())
    kept[header.step + 1] = dict(models)
    return digest


def serve() -> None:
    """The rollout server's own program, with another engine."""
    engine = types.ModuleType("slipstream.rollout_server.vllm.engine")
    engine.VllmEngine = QuickEngine
    # The second is imported for an engine's start; with torch it takes most of this one's.
    for module in (engine, types.ModuleType("vllm.v1.worker.cpu_worker")):
        sys.modules[module.__name__] = module
    # Tokenizers need no torch, whose import takes three seconds.
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *args: (
        None if name == "torch" else find(name, *args)
    )
    from slipstream.core.machine.process import leave
    from slipstream.rollout_server.__main__ import main

    leave(main())


def train() -> None:
    """A rank with the trainer's own calls to the controller."""
    from slipstream.learner.trainer.controller_client import ControllerClient

    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    client = ControllerClient(config)
    path = config.run_dir / STATE
    version, digest = START
    models: Models = {}
    models_by_step: dict[int, Models] = {}
    if path.exists():
        state = json.loads(path.read_text())
        version = PolicyVersion(*state["version"])
        digest = bytes.fromhex(state["digest"])
        models = state["models"]
        models_by_step = {int(step): of for step, of in state["kept"].items()}

    def save() -> None:
        partial = path.with_suffix(".partial")
        state = {
            "version": version,
            "digest": digest.hex(),
            "models": models,
            "kept": models_by_step,
        }
        partial.write_text(json.dumps(state))
        partial.rename(path)

    def checkpoint() -> None:
        folder = config.run_dir / "checkpoints"
        if version.step not in complete_steps(folder):
            save_checkpoint(folder, version.step, weight_digest=digest.hex())
        report = trainer_pb2.CheckpointReport(
            version=version_to_pb(version), weight_digest=digest
        )
        client.report_checkpoint(report)

    hello = trainer_pb2.TrainerHello(
        world_size=1,
        layout_description="on 1 rank",
        version=version_to_pb(version),
        weight_digest=digest,
    )
    version = version_from_pb(client.register(hello).version)
    communicator = ""
    while True:
        first, *rest = client.next(
            version, communicator_id=communicator, bucket_digests=digests_of(version)
        )
        match first.WhichOneof("directive"):
            case "batch":
                batch = [
                    trajectory_from_pb(t) for d in rest for t in d.chunk.trajectories
                ]
                check_tokens(batch)
                time.sleep(STEP_S)
                step = first.batch.step
                passes = [client_pass for d in rest for client_pass in d.chunk.passes]
                digest = made(
                    digest, batch, first.batch, passes, models, models_by_step
                )
                metrics = {"trained_tokens": sum(t.num_sampled_tokens for t in batch)}
                if made_of := models.get(first.batch.given.adapter.name):
                    metrics["weights"] = int(made_of[:12], 16)
                report = trainer_pb2.StepReport(
                    step=step,
                    batch_id=first.batch.batch_id,
                    version=version_to_pb(PolicyVersion(version.incarnation, step + 1)),
                    weight_digest=digest,
                    metrics=metrics,
                    wall_s=STEP_S,
                )
                version = client.report_step(report)
                if version.step % CHECKPOINT_STEPS == 0:
                    save()
                    if not config.checkpoint.keep_batches:
                        checkpoint()
            case "compute":
                client.report_pass(passed(models, first.compute))
            case "save":
                save()
                checkpoint()
            case "publish":
                communicator = publish(client, first.publish, communicator)
            case "stop":
                client.finish(
                    trainer_pb2.TrainerGoodbye(weight_digest=digest, export_path="none")
                )
                client.close()
                return


def publish(client, order, communicator: str) -> str:
    if not order.begun:
        start = trainer_pb2.PublishStart(
            publish_id=order.publish_id, layout=LAYOUT, communicator=order.communicator
        )
        if not client.start_publish(start, join_deadline_s=5.0).receivers:
            return communicator
    receipt = client.finish_publish(
        trainer_pb2.PublishResult(
            publish_id=order.publish_id,
            bucket_digests=digests_of(version_from_pb(order.version)),
            probe=PROBE if order.verify else None,
        )
    )
    return "" if receipt.discard_communicator else order.communicator.communicator_id


def check_tokens(batch) -> None:
    """Every sampled token is of the version that its span names."""
    for trajectory in batch:
        steps = [
            s.version.step for s in trajectory.version_spans for _ in range(s.length)
        ]
        sampled = trajectory.token_ids[-len(steps) :].tolist()
        # The last one may be the end of the text.
        letters = [token - 4 for token in sampled[:-1]]
        assert letters == [step % 20 for step in steps[: len(letters)]], (
            trajectory.trajectory_id
        )


def replay(folder: Path) -> int:
    """Returns 0 if the recorded batches give the recorded digests."""
    from slipstream.learner.controller.records.history import read_history
    from slipstream.learner.controller.records.journal import read_batch, read_records

    history, (_, digest) = read_history(read_records(folder / "journal")), START
    models: Models = {}
    models_by_step: dict[int, Models] = {}
    for step, record in sorted(history.batches.items()):
        message = read_batch(folder / "journal", step, record.crc32, record.attempt)
        batch = [trajectory_from_pb(t) for t in message.trajectories]
        digest = made(
            digest, batch, message.header, message.passes, models, models_by_step
        )
        step_record = history.steps.get(step)
        if step_record is not None and step_record.digest != digest.hex():
            print(f"step {step} made {step_record.digest}, not {digest.hex()}")
            return 1
    return 0


def main() -> int:
    # Ranks and servers start often, and need none of these.
    if sys.argv[1] in ("chaos", "loop-chaos"):
        from support.rigs import chaos, loop_chaos

        does = {"chaos": chaos.main, "loop-chaos": loop_chaos.main}[sys.argv.pop(1)]
        chaos._PARTS |= {module: role for role, module in MODULES.items()}
        return does((sys.executable, "-m", "support.fakes.quick_run"))
    if sys.argv[1] == "replay":
        return replay(Path(sys.argv[2]))
    from slipstream.client import cli, started_run
    from slipstream.client.launch import launcher, run_processes

    run_processes.TRAINER = replace(run_processes.TRAINER, module=MODULES["rank"])
    server = replace(run_processes.SERVER, module=MODULES["server"])
    launcher.SERVER_PROGRAM = run_processes.SERVER = server
    if sys.argv[1] == "started":
        del sys.argv[1]
        return started_run.main()
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

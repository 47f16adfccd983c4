"""Turns a checkpoint of a run into a Hugging Face folder.

It runs on one rank, for checkpoints of any layout: `python -m
slipstream.learner.trainer.export_checkpoint --config RUN/config.toml --step N --out FOLDER`. It
compares the digest of the loaded weights with the one that the run recorded.
"""

import argparse
import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.configuration.config_file import check_model, load_config, parse_config
from slipstream.core.configuration.roles import of_policy
from slipstream.core.errors import USAGE_ERROR, CheckpointError, SlipstreamError
from slipstream.core.machine.process import leave
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.settings.config import Config
from slipstream.protocol.checkpoints import check_files, checkpoint_path, read_manifest

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy
    from slipstream.learner.trainer.weights.run_chat import RunChat

# Settings of learner, reference and critic about the number of ranks and about training. An export
# does not need them, and many contradict a single rank.
_OF_RANKS = {"parallel", "ranks_per_node", "ddp", "optimizer"}
# Parts of names of Megatron's model settings that depend on the layout.
_OF_LAYOUT = ("pipeline", "_vp_stage", "_comm", "_parallel", "token_dispatcher")


def main() -> int:
    """Exports the checkpoint; returns 0 after the folder is written, 2 if that is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.toml of the run folder")
    parser.add_argument("--step", type=int, required=True, help="the version")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    arguments = parser.parse_args()
    path = checkpoint_path(arguments.config.parent / CHECKPOINTS, arguments.step)
    try:
        config = of_policy(load_config(arguments.config))
        check_model(config)
        try:
            export(config, path, arguments.out)
        except (SlipstreamError, OSError) as error:
            if path.exists():
                raise
            raise CheckpointError(
                f"{path} was removed before it was exported: its run goes on and keeps the newest "
                f"{config.checkpoint.keep_last} (checkpoint.keep_last); export again for a newer "
                "version"
            ) from error
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def export(config: Config, path: Path, out: Path) -> None:
    """Exports the checkpoint `path` to `out`, a Hugging Face folder.

    Adapters are also saved without the base model, in the folder `out`-adapters. Named adapters
    each belong to a model of their own, so only `out`-adapters is written for them.

    Raises CheckpointError if the files or the weights differ from the saved ones.
    """
    manifest = read_manifest(path)
    check_files(path, manifest.files)
    from slipstream.learner.trainer.__main__ import preload

    preload()
    from slipstream.learner.trainer.checkpoints.distributed_files import load_starting_weights
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.model.model import MemoryPart
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.weights.run_chat import RunChat
    from slipstream.learner.trainer.weights.weight_publisher import open_published

    alone = on_one_rank(config, path)
    chat = RunChat.of(config)
    policy = open_policy(alone, Launch.from_environment(), load_weights=False)
    # The stored policy has all trained weights, adapters too, which `checkpoint.load` cannot load.
    with policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
        load_starting_weights(stored_policy(policy, with_optimizer=False), path, policy.ranks)
    policy.adapters.sizes.update(manifest.adapters)
    if open_published(policy, alone).digests().identity.hex() != manifest.weight_digest:
        raise CheckpointError(f"{path} gives other weights than those that were saved")
    write_folders(policy, alone, out, chat)
    policy.ranks.close()


def write_folders(policy: "Policy", config: Config, out: Path, chat: "RunChat") -> None:
    """Writes what `export` says, on one rank; the folder that hinders another export comes last."""
    from slipstream.learner.trainer.weights.export import save_adapters, save_hf_folder

    adapters = out.with_name(f"{out.name}-adapters")
    with _alone_at(adapters if policy.adapters.have_names else out):
        if config.lora.rank:
            save_adapters(policy, config, adapters, chat)
        if not policy.adapters.have_names:
            save_hf_folder(policy, config.model.path, out, chat)


@contextlib.contextmanager
def _alone_at(written: Path) -> Iterator[None]:
    """Lets one process at a time write a folder; raises CheckpointError if another one has.

    The file of the lock stays: whoever waits for it holds it open.
    """
    written.parent.mkdir(parents=True, exist_ok=True)
    with written.with_name(f".{written.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another export writes {written}: waiting for its end", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if written.exists():
            raise CheckpointError(f"{written} was written by another export meanwhile")
        yield


def on_one_rank(config: Config, path: Path) -> Config:
    """Returns a run's settings for one rank; raises ConfigError with the checkpoint's `path`."""
    table = config.model_dump(mode="json", exclude_none=True)
    learner = table["learner"]
    learner["world_size"] = 1
    # An episode could use the room of all context parallel ranks that shared it.
    learner["micro_batch_tokens"] *= config.learner.parallel.cp
    # `of_policy` leaves out the teachers, but a whole run's settings still have theirs.
    reference = table.get("reference", {})
    teachers = reference.get("teachers", {})
    for part in (learner, reference, *teachers.values(), table.get("critic", {})):
        for name in _OF_RANKS & part.keys():
            del part[name]
    settings = learner.get("transformer", {})
    for name in [name for name in settings if any(part in name for part in _OF_LAYOUT)]:
        del settings[name]
    table.pop("debug", None)
    return parse_config(table, source=str(path))


if __name__ == "__main__":
    leave(main())

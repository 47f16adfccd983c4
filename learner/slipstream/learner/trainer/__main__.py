"""Runs one trainer rank: torchrun starts `python -m slipstream.learner.trainer --config FILE`."""

import argparse
import contextlib
import functools
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core import errors
from slipstream.core.configuration.config_file import check_model, load_config
from slipstream.core.extension import check_process
from slipstream.core.logs import use_format
from slipstream.core.machine.gpu_memory import without_processes
from slipstream.core.machine.gpus import fill_gpus, gpu_names
from slipstream.core.machine.process import leave, without_collections
from slipstream.core.run_folder import LOCKS
from slipstream.core.settings.config import Config

if TYPE_CHECKING:
    from slipstream.learner.trainer.ranks.parallel import Launch

logger = logging.getLogger(__name__)

_PACKAGE = "slipstream.learner.trainer"

# Most seconds between two heartbeats of a trainer that works.
WORK_PERIOD_S = 5.0
# While a model is loaded these errors come from settings, files and code, which a restart does not
# change.
_LASTING = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FileNotFoundError,
    ImportError,
    LookupError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)


def main() -> int:
    """Trains until the controller's order to stop; returns the exit code of the rank.

    The code is 0 after the order to stop, 1 after a failure that a restart may remedy, 2 for an
    impossible setting, 3 after a failure that a restart would repeat, and 4 after a failure while
    loading that may not recur.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the resolved settings")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_model(config)
        check_process(config)
        from slipstream.learner.trainer.ranks.parallel import Launch

        launch = Launch.from_environment()
    except errors.ConfigError as error:
        print(error, file=sys.stderr)
        return errors.USAGE_ERROR
    return _run_rank(config, launch)


def _run_rank(config: Config, launch: "Launch") -> int:
    from slipstream.learner.trainer.controller_client import ControllerClient, ControllerLost
    from slipstream.v1 import trainer_pb2

    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s rank {launch.rank} %(levelname)s %(name)s: %(message)s",
        # An import of Megatron's has set up the logs already.
        force=True,
    )
    use_format(config, f"trainer-rank-{launch.rank}")
    # Micro batches differ in size: without this a tenth of a full GPU was lost between their
    # tensors.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    client = ControllerClient(config)
    has_loaded = False
    try:
        with contextlib.ExitStack() as stack:
            preload()
            from slipstream.learner.trainer.opening import open_policy
            from slipstream.learner.trainer.ranks.activity import Activity, signs_of_life
            from slipstream.learner.trainer.train import Trainer

            activity = Activity()
            if launch.rank == 0:
                period_s = min(WORK_PERIOD_S, config.controller.stall_timeout_s / 4)
                tell = functools.partial(client.report_work, activity)
                stack.enter_context(signs_of_life(activity, tell, period_s=period_s))
            gpus = gpu_names(os.environ, launch.local_rank, 1)
            limit_s = config.rollout_server.start_timeout_s
            with fill_gpus(config.run_dir / LOCKS, gpus, alone=False, limit_s=limit_s):
                policy = open_policy(config, launch, activity=activity)
                trainer = Trainer(config, policy, client)
            has_loaded = True
            trainer.run()
            policy.ranks.close()
    except Exception as error:
        logger.exception("rank %d failed", launch.rank)
        code = exit_code(error, has_loaded=has_loaded)
        # A controller that comes back must not blame a batch for its own absence.
        if not isinstance(error, ControllerLost):
            client.report_failure(
                trainer_pb2.TrainerFailure(
                    message=without_processes(f"{type(error).__name__}: {error}"),
                    rank=launch.rank,
                    final=code == errors.FINAL_ERROR,
                )
            )
        logging.shutdown()
        # A collective that the other ranks never finish would block an orderly exit.
        os._exit(code)
    client.close()
    return errors.DONE


def exit_code(error: Exception, *, has_loaded: bool) -> int:
    """Returns the exit code for `error`: faults of settings, files and code outlast restarts."""
    if isinstance(error, errors.SlipstreamError):
        return errors.FINAL_ERROR
    if has_loaded or isinstance(error, (ConnectionError, TimeoutError)):
        return errors.FAILED
    return errors.FINAL_ERROR if isinstance(error, _LASTING) else errors.NOT_STARTED


def preload() -> None:
    """Imports what a rank needs before it loads a model; patches Megatron and Bridge."""
    with without_collections():
        for name in ("ranks.cpu", "ranks.compat"):
            importlib.import_module(f"{_PACKAGE}.{name}").install()
        for name in ("layers.spec", "ranks.activity", "opening", "train"):
            importlib.import_module(f"{_PACKAGE}.{name}")


if __name__ == "__main__":
    leave(main())

"""One trainer rank: `python -m slipstream.learner.trainer --config FILE` as torchrun starts it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.protocol.card_lock import cards_of, fill_cards
from slipstream.protocol.errors import ConfigError, SlipstreamError
from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.config_file import check_model, load_config

if TYPE_CHECKING:
    from slipstream.learner.trainer.controller_client import ControllerClient
    from slipstream.learner.trainer.ranks.parallel import Launch

logger = logging.getLogger(__name__)

USAGE_ERROR = 2
# Starting again would fail the same way.
FINAL_ERROR = 3


def main() -> int:
    """Trains until the controller says stop; 0 then, 2 for impossible settings.

    1 for a failure that need not come again, 3 for one that would.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the resolved settings")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
        check_model(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    return _run_rank(config)


def _run_rank(config: Config) -> int:
    from slipstream.learner.trainer.controller_client import ControllerClient
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.v1 import trainer_pb2

    try:
        launch = Launch.from_environment()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s rank {launch.rank} %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)
    client = ControllerClient(config)
    try:
        _train(config, launch, client)
    except Exception as error:
        logger.exception("rank %d failed", launch.rank)
        is_final = isinstance(error, SlipstreamError)
        client.report_failure(
            trainer_pb2.TrainerFailure(
                message=f"{type(error).__name__}: {error}",
                rank=launch.rank,
                final=is_final,
            )
        )
        logging.shutdown()
        # A collective that the other ranks never finish would hold up an orderly exit.
        os._exit(FINAL_ERROR if is_final else 1)
    client.close()
    return 0


def _train(config: Config, launch: Launch, client: ControllerClient) -> None:
    from slipstream.learner.trainer.model.model import open_policy
    from slipstream.learner.trainer.train import Trainer

    cards = cards_of(os.environ, launch.local_rank, 1)
    limit_s = config.rollout_server.start_timeout_s
    with fill_cards(config.run_dir / "locks", cards, alone=False, limit_s=limit_s):
        policy = open_policy(config, launch)
        trainer = Trainer(config, policy, client)
    trainer.run()
    policy.ranks.close()


if __name__ == "__main__":
    sys.exit(main())

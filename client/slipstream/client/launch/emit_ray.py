"""The roles as a program for an existing Ray cluster: an actor runs the command of an instance."""

from __future__ import annotations

from pathlib import Path
from pprint import pformat

from slipstream.client.launch.roles import LEARNER, ROLLOUT_SERVER, Roles
from slipstream.client.launch.template import filled_template

# Servers start beside the learner, which may prove its algorithm before it listens.
CONNECT_TIMEOUT_S = 3600
# In a file without the suffix of a module: nothing here can import Ray.
TEMPLATE = Path(__file__).with_name("ray_program.txt")


def ray_program(roles: Roles, file: str, *, controller_port: int, master_port: int) -> str:
    """Returns the program, which will lie at `file`, for runs in this folder."""
    learner, server = roles[LEARNER], roles[ROLLOUT_SERVER]
    return filled_template(
        TEMPLATE,
        run=roles.run,
        file=file,
        folder=repr(str(Path.cwd())),
        learner=pformat(learner.command),
        rollout_server=pformat([*server.command, f"--connect-timeout-s={CONNECT_TIMEOUT_S}"]),
        nodes=learner.count.usual,
        servers=server.count.usual,
        learner_cpus=learner.cpus,
        learner_gpus=learner.gpus,
        server_cpus=server.cpus,
        server_gpus=server.gpus,
        learner_grace=learner.grace_s,
        server_grace=server.grace_s,
        strategy="STRICT_SPREAD" if learner.count.usual > 1 else "PACK",
        controller_port=controller_port,
        master_port=master_port,
    )

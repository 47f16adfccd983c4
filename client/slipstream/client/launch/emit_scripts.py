"""Writes the roles as scripts for a cluster whose machines share this folder.

For Slurm they are plain sbatch files: a job for the learner, an array for rollout servers. For Ray
they are a program, in which an actor runs the command of an instance.
"""

from __future__ import annotations

from pathlib import Path
from pprint import pformat

from slipstream.client.launch.roles import LEARNER, ROLLOUT_SERVER, Role, Roles
from slipstream.client.launch.template import filled_template, shell_command, shell_word

# Seconds between two checks of a rollout job: for the controller's address, and that the learner's
# job still runs.
LOOK_S, WATCH_S = 5, 60
# Servers of Ray start with the learner, which may test its algorithm before it listens.
CONNECT_TIMEOUT_S = 3600
LEARNER_JOB = Path(__file__).with_name("slurm_learner.template.sbatch")
ROLLOUT_JOB = Path(__file__).with_name("slurm_rollout_server.template.sbatch")
# The file has no suffix of a module, because nothing here can import Ray.
RAY_PROGRAM = Path(__file__).with_name("ray_program.txt")


def slurm_files(
    roles: Roles, folder: str, *, controller_port: int, master_port: int, watch_s: float = WATCH_S
) -> dict[str, str]:
    """Returns the text of each Slurm file by its name; `folder` is where they will be saved.

    A rollout job checks every `watch_s` seconds whether the learner's job still runs.
    """
    address = f"{roles.folder}/controller.address"
    learner, server = roles[LEARNER], roles[ROLLOUT_SERVER]
    common = {"run": roles.run, "folder": folder, "address": shell_word(address)}
    return {
        "learner.sbatch": filled_template(
            LEARNER_JOB,
            **common,
            **_sizes(roles, learner),
            nodes=learner.count.usual,
            s="s" * (learner.count.usual > 1),
            controller_port=controller_port,
            master_port=master_port,
            run_folder=shell_word(roles.folder),
            command=shell_command(learner.command, indent=8).replace("'", "'\\''"),
        ),
        "rollout-server.sbatch": filled_template(
            ROLLOUT_JOB,
            **common,
            **_sizes(roles, server),
            last=server.count.usual - 1,
            learner_job=shell_word(f"{roles.run}-{LEARNER}"),
            look=LOOK_S,
            watch=watch_s,
            restarts=server.restarts,
            command=shell_command(server.command, indent=8),
        ),
    }


def _sizes(roles: Roles, role: Role) -> dict[str, object]:
    gpus = f"#SBATCH --gpus-per-node={role.gpus}\n" if role.gpus else ""
    grace = f"{role.grace_s:.0f}"
    return {"job": f"{roles.run}-{role.name}", "cpus": role.cpus, "gpus": gpus, "grace": grace}


def ray_program(roles: Roles, file: str, *, controller_port: int, master_port: int) -> str:
    """Returns the text of the Ray program that runs the roles in the current folder.

    The program will be saved as `file`.
    """
    learner, server = roles[LEARNER], roles[ROLLOUT_SERVER]
    return filled_template(
        RAY_PROGRAM,
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

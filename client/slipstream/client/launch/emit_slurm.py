"""The roles as plain sbatch files: a job for the learner, an array for rollout servers."""

from __future__ import annotations

import re

from slipstream.client.launch.roles import LEARNER, ROLLOUT_SERVER, Role, Roles

# Seconds between two looks of a rollout job for the controller, and for the learner's job while its
# server runs.
LOOK_S, WATCH_S = 5, 60
_PLAIN = re.compile(r"[\w@%+=:,./-]+")

LEARNER_FILE = """\
#!/bin/bash
# The learner of run {run}: controller and trainer ranks, on {nodes} node{s} that start together.
# Written by `slipstream roles`; yours to edit and to commit.
#
#   sbatch {folder}/learner.sbatch         in the folder in which `slipstream roles` was called
#   scontrol requeue JOB                  the run goes on from its newest checkpoint
#
#SBATCH --job-name={job}
#SBATCH --output={folder}/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --requeue
# Before the time limit: the step ends, a checkpoint is written, the job goes to the queue again.
#SBATCH --signal=TERM@{grace:.0f}

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export CONTROLLER_ADDRESS=$first:{controller_port} MASTER_ADDRESS=$first:{master_port}

# Rollout jobs find the run by this file.
mkdir -p -m 700 {run_folder}
echo "$CONTROLLER_ADDRESS" > {address}.partial
mv {address}.partial {address}

# Slurm ends the steps itself, and this shell waits for them.
trap : TERM
srun --kill-on-bad-exit=1 bash -c '
    export NODE_RANK=$SLURM_NODEID HOST_ADDRESS=$SLURMD_NODENAME
    exec {command}
'
code=$?
# 143: the run was told to end before its last step. A job that Slurm itself has requeued or
# cancelled does not run any more.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [ "$code" -eq 143 ] && [ "$state" = RUNNING ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

ROLLOUT_FILE = """\
#!/bin/bash
# Rollout servers of run {run}: each job of the array is one, and may come and go.
# Written by `slipstream roles`; yours to edit and to commit.
#
#   sbatch --partition=NAME --array=0-7 {folder}/rollout-server.sbatch      eight, preemptible
#   scancel JOB_7                     drains one and ends it
#
#SBATCH --job-name={job}
#SBATCH --output={folder}/%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --requeue
# At a preemption and before the time limit: the server drains, the job goes to the queue again.
#SBATCH --signal=B:TERM@{grace:.0f}

export HOST_ADDRESS=$SLURMD_NODENAME SERVER_ID=server-$SLURM_ARRAY_TASK_ID

leave() {{ leaving=1; [ -z "$server" ] || kill -TERM "$server"; }}
trap leave TERM
# Once the learner's job is neither queued nor runs; not while Slurm itself gives no answer.
is_over() {{ jobs=$(squeue --me --noheader --name={learner_job}) && [ -z "$jobs" ]; }}
has_moved() {{ now=$(cat {address}) && [ "$now" != "$CONTROLLER_ADDRESS" ]; }}
answers() {{ timeout 3 bash -c "exec 3<> /dev/tcp/${{CONTROLLER_ADDRESS/://}}" 2> /dev/null; }}
failures=0
# Between two starts of the learner's job this job waits.
while [ -z "$leaving" ] && ! is_over; do
    CONTROLLER_ADDRESS=$(cat {address} 2> /dev/null)
    if ! answers; then
        sleep {look} & wait $!
        continue
    fi
    {command} &
    server=$!
    # A server that has not joined yet hears from nobody that the run is over, and none hears that
    # the learner's node died and the controller is elsewhere.
    while sleep {watch}; do
        if is_over || has_moved; then kill -TERM "$server"; break; fi
    done &
    watch=$!
    wait "$server"; code=$?
    while kill -0 "$server" 2> /dev/null; do wait "$server"; code=$?; done
    server=
    kill "$watch" 2> /dev/null
    # A server that is refused would be refused again; one whose controller has gone waits for it.
    if [ "$code" -eq 2 ] && answers; then exit 2; fi
    [ "$code" -eq 0 ] || failures=$((failures + 1))
    [ "$failures" -le {restarts} ] || exit "$code"
done
# A job that Slurm itself has requeued or cancelled does not run any more.
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
state=$(squeue --noheader --jobs="$job" --format=%T)
if [ -n "$leaving" ] && [ "$state" = RUNNING ]; then scontrol requeue "$job"; fi
"""


def slurm_files(
    roles: Roles, folder: str, *, controller_port: int, master_port: int, watch_s: float = WATCH_S
) -> dict[str, str]:
    """Returns the text of each file by its name; `folder` is where they will lie."""
    address = f"{roles.folder}/controller.address"
    learner, server = roles[LEARNER], roles[ROLLOUT_SERVER]
    common = {"run": roles.run, "folder": folder, "address": shell_word(address)}
    return {
        "learner.sbatch": LEARNER_FILE.format(
            **common,
            **_sizes(roles, learner),
            nodes=learner.count.usual,
            s="s" * (learner.count.usual > 1),
            controller_port=controller_port,
            master_port=master_port,
            run_folder=shell_word(roles.folder),
            command=shell_command(learner.command, indent=8).replace("'", "'\\''"),
        ),
        "rollout-server.sbatch": ROLLOUT_FILE.format(
            **common,
            **_sizes(roles, server),
            last=server.count.usual - 1,
            learner_job=shell_word(_job(roles, learner)),
            look=LOOK_S,
            watch=watch_s,
            restarts=server.restarts,
            command=shell_command(server.command, indent=8),
        ),
    }


def _sizes(roles: Roles, role: Role) -> dict[str, object]:
    gpus = f"#SBATCH --gpus-per-node={role.gpus}\n" if role.gpus else ""
    return {"job": _job(roles, role), "cpus": role.cpus, "gpus": gpus, "grace": role.grace_s}


def _job(roles: Roles, role: Role) -> str:
    return f"{roles.run}-{role.name}"


def shell_command(command: list[str], *, indent: int) -> str:
    """Returns a command for a shell script, a line for each setting and option."""
    words = [shell_word(word) for word in command]
    joint = " \\\n" + " " * indent
    return joint.join([" ".join(words[:3]), *words[3:]])


def shell_word(word: str) -> str:
    """Returns a word for a shell script, in which ${NAME} stays a variable."""
    if _PLAIN.fullmatch(word):
        return word
    escaped = re.sub(r'(["\\`]|\$(?!\{[A-Z_]+\}))', r"\\\1", word)
    return f'"{escaped}"'

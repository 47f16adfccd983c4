"""Judges a simulated run by what its engines sampled; `verify` judges the files that it left."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from slipstream.client.findings import Findings
from slipstream.client.run_folder import write_config
from slipstream.client.verify import examine, read_batch, read_journal
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.types import GroupId, PolicyVersion, Trajectory
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory, read_history
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.records.kinds import parsed
from slipstream.learner.controller.records.snapshots import (
    decode_history,
    encode_history,
)
from slipstream.learner.controller.records.state import RunState
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.v1 import trainer_pb2
from support.references.drawn_tasks import drawn_tasks
from support.references.history_state import different_field

from simulation.disk import REMOVED
from simulation.fleet import NUM_TASKS, text_of, verdict_on
from simulation.samplers import least_drawn
from simulation.trainer import is_trainable

if TYPE_CHECKING:
    from simulation.world import World


# Records between two snapshots that are compared.
SNAPSHOT_EVERY = 5


def judge(world: World) -> Counter[str]:
    """Adds what is wrong to the violations of `world`; returns how much it trained, by kind."""
    return _Judge(world).run()


class _Judge:
    def __init__(self, world: World) -> None:
        self._world = world
        self._wrong = world.violations
        self._folder = world.config.run_dir
        # The number of the log in which each trajectory has ended, and the byte there.
        self._ended: dict[str, tuple[int, int]] = {}
        # The same of the first lease of each group to each server.
        self._leased: dict[tuple[str, str], tuple[int, int]] = {}
        self.trained: Counter[str] = Counter()
        # Trajectories that were quarantined as those of another run.
        self._foreign = 0

    def run(self) -> Counter[str]:
        write_config(self._world.config, self._folder)
        for path in (self._folder / REMOVED).glob("*"):
            shutil.copy(path, self._folder / "journal" / "batches")
        # Simulated checkpoints are empty.
        shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
        findings_of_run = examine(self._folder)
        if self._world.fired["told lost delivery"]:
            # Trajectories that were lost in the queue stay known.
            open_ledger = (
                "the ledger's difference: ",
                "the ledger's gaps: ",
                "ledger_difference of step ",
            )
            findings_of_run.faults = [
                text
                for text in findings_of_run.faults
                if not text.startswith(open_ledger)
            ]
        self._wrong += findings_of_run.faults
        self._read_journal()
        self._check_state()
        if not self._wrong:
            self._check_snapshots()
            self._check_groups()
            self._check_draws()
        self._check_acknowledged()
        self._check_leased()
        if self._foreign > self._world.fired["told foreign run"]:
            self._wrong.append(f"{self._foreign} trajectories are of another run")
        for version, weights in self._world.truth.weights.items():
            if len(weights) > 1:
                self._wrong.append(
                    f"{len(weights)} different weights are called {version}"
                )
        if not self._wrong and findings_of_run.steps != self._world.shape.steps:
            self._wrong.append(
                f"the journal has {findings_of_run.steps} steps of {self._world.shape.steps}"
            )
        self._wrong += [f"unhandled: {text}" for text in self._world.loop.unhandled]
        self.trained += Counter(
            steps=findings_of_run.steps, tokens=findings_of_run.lags.total()
        )
        return self.trained

    def _check_draws(self) -> None:
        """Each task that is drawn by weights is the one that the journal's records give."""
        if not self._world.shape.is_weighed:
            return
        draws = drawn_tasks(
            self._folder / "journal",
            "e",
            least_drawn,
            seed=self._world.config.run.seed,
        )
        for number, (task, expected) in enumerate(draws):
            if task != expected:
                self._wrong.append(
                    f"draw {number} is of task {task}, and by weights {expected}"
                )

    def _check_state(self) -> None:
        """The last controller knew what the next one would know from the journal."""
        state = self._world.state
        if state is None:
            return
        history = read_history(read_records(self._folder / "journal"))
        for name in state.environments:
            # An epoch without a record has counted nothing.
            history.environments[name]
        for name in (state_field.name for state_field in fields(RunState)):
            ours = getattr(state, name)
            theirs = getattr(history, name)
            if ours != theirs:
                self._wrong.append(
                    f"{name} is {ours} live, and {theirs} after a restart"
                )

    def _check_snapshots(self) -> None:
        """A state that was written and read goes on like the other, wherever that was."""
        replayed = RunHistory()
        stored = RunHistory()
        for number, fields_ in enumerate(read_records(self._folder / "journal"), 1):
            record = parsed(fields_)
            replayed.add(record)
            stored.add(record)
            if number % SNAPSHOT_EVERY == 0:
                stored = decode_history(encode_history(stored))
                name = different_field(stored, replayed)
                if name:
                    text = (
                        f"{name} of the snapshot after record {number} is another one"
                    )
                    self._wrong.append(text)
                    return

    def _check_groups(self) -> None:
        """Wherever a journal is cut, each leased group is open, in one batch, or over."""
        history = RunHistory()
        leased = set[GroupId]()
        over = set[GroupId]()
        for number, fields_ in enumerate(read_records(self._folder / "journal"), 1):
            record = parsed(fields_)
            history.add(record)
            match record:
                case kinds.GroupLease():
                    leased.add(record.group)
                    over |= {record.replaces} - {None}
                case kinds.GroupSetAside() | kinds.Closed():
                    over.add(record.group)
                case kinds.BatchSetAside():
                    over.update(group for group, *_ in record.groups)
            trained = {
                group for group in leased if history.trained_in.get(group) is not None
            }
            places = [*history.open_groups, *trained, *(over & leased)]
            if sorted(places) != sorted(leased):
                self._wrong.append(
                    f"groups are lost or twice after record {number}: {places}"
                )
                return

    def _read_journal(self) -> None:
        batches: dict[int, dict[str, Any]] = {}
        written: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {}
        aside: list[str] = []
        evaluated: list[int] = []
        for log, end, record in read_journal(self._folder, Findings()):
            kind = record["kind"]
            place = (log, end)
            if kind == "end":
                self._ended[record["id"]] = place
                if (
                    record["end"] == "quarantined"
                    and record["cause"] == "it is of run other-1"
                ):
                    self._foreign += 1
                elif record["end"] == "quarantined":
                    # All other trajectories that come to a controller were sampled for a lease
                    # that it knows.
                    self._wrong.append(
                        f"{record['id']} was quarantined: {record['cause']}"
                    )
            elif kind in ("lease", "evaluation_lease"):
                self._leased.setdefault((record["group"], record["server"]), place)
            elif kind == "batch":
                batches[record["step"]] = record
                written[record["batch_id"]] = record, place
            elif kind == "batch_set_aside":
                batches.pop(record["step"], None)
                aside += record["ids"]
            elif kind == "evaluation":
                evaluated.append(record["version"])
                if record["episodes"] + record["failed"] != NUM_TASKS:
                    self._wrong.append(
                        f"an evaluation has other than {NUM_TASKS}: {record}"
                    )
        for record, place in written.values():
            is_trained = batches.get(record["step"]) is record
            for trajectory in self._recorded(record):
                # Members that were put back were acknowledged with their first batch.
                name = trajectory.trajectory_id
                self._ended[name] = min(place, self._ended.get(name, place))
                if is_trained:
                    self._check_trajectory(record["step"], trajectory)
        for trajectory_id in aside:
            if is_trainable(trajectory_id.partition(".")[0]):
                self._wrong.append(
                    f"{trajectory_id} was set aside, and nothing is wrong with it"
                )
        if not self._wrong:
            self._check_evaluations(evaluated)

    def _recorded(self, record: dict[str, Any]) -> Iterator[Trajectory]:
        """The trajectories of a batch; none if its file is missing or damaged, which is wrong."""
        findings = Findings()
        with findings.reading(f"the batch of step {record['step']}"):
            contents = read_batch(self._folder, record)
            assert isinstance(next(contents), trainer_pb2.BatchHeader)
            yield from map(trajectory_from_pb, contents)
        self._wrong += findings.faults

    def _check_trajectory(self, step: int, trajectory: Trajectory) -> None:
        if not is_trainable(trajectory.group_id):
            self._wrong.append(f"step {step + 1} trains {trajectory.group_id}")
        turns = _turns(trajectory)
        self._check_reward(trajectory, turns)
        sampled = [token for turn in turns for token in turn]
        versions = [
            s.version for s in trajectory.version_spans for _ in range(s.length)
        ]
        for token, version in zip(sampled, versions, strict=True):
            self._check_token(step, token, version)
        self.trained["trajectories"] += 1

    def _check_reward(self, trajectory: Trajectory, turns: list[list[int]]) -> None:
        """Compares an episode with what its environment says of each reply."""
        name = trajectory.trajectory_id
        verdicts = [verdict_on(text_of(turn)) for turn in turns]
        rewards = sum(reward for reward, _ in verdicts)
        if trajectory.reward != rewards:
            self._wrong.append(
                f"{name} has the reward {trajectory.reward}, not {rewards}"
            )
        is_last = [
            is_done or n == self._world.shape.max_turns
            for n, (_, is_done) in enumerate(verdicts, 1)
        ]
        if is_last != [False] * (len(turns) - 1) + [True]:
            self._wrong.append(f"{name} has {len(turns)} turns: {verdicts}")

    def _check_token(self, step: int, token: int, claimed: PolicyVersion) -> None:
        world = self._world
        place = world.tokens.find(token)
        if place.version != claimed:
            self._wrong.append(f"token {token} of {place.version} is called {claimed}")
        if place.weights not in world.truth.weights.get(claimed, set()):
            self._wrong.append(
                f"token {token} was sampled by no weights of version {claimed}"
            )
        lag = step - place.version.step
        if not 0 <= lag <= world.shape.max_staleness:
            self._wrong.append(
                f"step {step + 1} trains token {token} of version {place.version}: lag {lag}"
            )

    def _check_evaluations(self, versions: list[int]) -> None:
        """The last version is measured, and none twice; a newer one may stand for one before."""
        shape = self._world.shape
        every = shape.evaluate_every
        due = set()
        if every is not None:
            due = {0, shape.steps, *(range(0, shape.steps, every) if every else ())}
        is_right = len(versions) == len(set(versions)) <= len(due)
        if not is_right or (due and versions[-1:] != [shape.steps]):
            self._wrong.append(
                f"versions {versions} were evaluated, due were {sorted(due)}"
            )

    def _check_acknowledged(self) -> None:
        for trajectory_id, synced in self._world.acknowledged.items():
            place = self._ended.get(trajectory_id)
            if place is None:
                self._wrong.append(f"{trajectory_id} was acknowledged and is nowhere")
            elif place > synced:
                self._wrong.append(
                    f"{trajectory_id} was acknowledged before it was on disk"
                )

    def _check_leased(self) -> None:
        for (group_id, server), synced in self._world.leased.items():
            place = self._leased.get((group_id, server))
            if place is None or place > synced:
                self._wrong.append(
                    f"{server} got a lease of {group_id} before it was on disk"
                )


def _turns(trajectory: Trajectory) -> list[list[int]]:
    """The sampled tokens of each turn."""
    tokens = trajectory.token_ids.tolist()
    turns = []
    at = 0
    for number, length in enumerate(trajectory.run_lengths):
        if number % 2:
            turns.append(tokens[at : at + length])
        at += length
    return turns

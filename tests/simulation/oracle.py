"""Judges a simulated run by what its engines sampled and by the files that it left."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import TYPE_CHECKING

from slipstream.core.run_folder import journal_logs, log_number
from slipstream.core.types import PolicyVersion, Trajectory
from slipstream.learner.controller.records.history import attempt_of
from slipstream.learner.controller.records.journal import batch_path
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.v1 import trainer_pb2

from simulation.fleet import NUM_TASKS, text_of, verdict_on
from simulation.trainer import is_trainable

if TYPE_CHECKING:
    from simulation.world import World


def judge(world: World) -> Counter[str]:
    """Adds what is wrong to the violations of `world`; returns how much it trained, by kind."""
    return _Judge(world).run()


class _Judge:
    def __init__(self, world: World) -> None:
        self._world, self._wrong = world, world.violations
        self._folder = world.config.run_dir / "journal"
        # The number of the log in which each trajectory has ended, and the byte there.
        self._ended: dict[str, tuple[int, int]] = {}
        # The same of the first lease of each group to each server.
        self._leased: dict[tuple[str, str], tuple[int, int]] = {}
        self._ends: Counter[str] = Counter()
        self._tokens: Counter[int] = Counter()
        self.trained: Counter[str] = Counter()
        # Trajectories that were quarantined as those of another run.
        self._foreign = 0

    def run(self) -> Counter[str]:
        self._read_journal()
        self._check_acknowledged()
        self._check_leased()
        for version, weights in self._world.truth.weights.items():
            if len(weights) > 1:
                self._wrong.append(f"{len(weights)} different weights are called {version}")
        self._check_summary()
        self._wrong += [f"unhandled: {text}" for text in self._world.loop.unhandled]
        return self.trained

    def _read_journal(self) -> None:
        batches: dict[int, tuple[dict, tuple[int, int]]] = {}
        written: dict[str, tuple[dict, tuple[int, int]]] = {}
        evaluated: list[int] = []
        steps: set[int] = set()
        for place, record in self._records().values():
            if record["kind"] == "end":
                self._read_end(record)
                # One that was put back is on disk with the batch that was set aside.
                self._ended.setdefault(record["id"], place)
            elif record["kind"] in ("lease", "evaluation_lease"):
                self._leased.setdefault((record["group"], record["server"]), place)
            elif record["kind"] == "batch":
                batches[record["step"]] = record, place
                written[record["batch_id"]] = record, place
            elif record["kind"] == "batch_set_aside":
                batches.pop(record["step"])
                self._set_aside(*written[record["batch_id"]], record["ids"])
            elif record["kind"] == "step":
                steps.add(record["step"])
            elif record["kind"] == "evaluation":
                evaluated.append(record["version"])
                if record["episodes"] + record["failed"] != NUM_TASKS:
                    self._wrong.append(f"an evaluation has other than {NUM_TASKS}: {record}")
        self.trained["steps"] = len(steps)
        for step, (record, place) in batches.items():
            self._read_batch(step, record, place, is_trained=step in steps)
        if not self._world.violations and len(steps) != self._world.shape.steps:
            self._wrong.append(f"the journal has {len(steps)} steps of {self._world.shape.steps}")
        if not self._world.violations:
            self._check_evaluations(evaluated)
        for trajectory_id, times in self._ends.items():
            if times > 1:
                self._wrong.append(f"{trajectory_id} has ended {times} times")
        for token, times in self._tokens.items():
            if times > 1:
                self._wrong.append(f"token {token} is in {times} batches")

    def _read_end(self, record: dict) -> None:
        self._ends[record["id"]] += 1
        if record["end"] == "quarantined" and record["cause"] == "it is of run other-1":
            self._foreign += 1
        elif record["end"] == "quarantined":
            # Whatever else comes to a controller was sampled for a lease that it knows.
            self._wrong.append(f"{record['id']} was quarantined: {record['cause']}")

    def _records(self) -> dict[int, tuple[tuple[int, int], dict]]:
        """The records by their line, each with its place: a later log goes on where it begins."""
        found: dict[int, tuple[tuple[int, int], dict]] = {}
        for path in journal_logs(self._folder):
            offset, is_first = 0, True
            for line in path.read_bytes().splitlines(keepends=True):
                offset += len(line)
                if line[:8] != b"%08x" % zlib.crc32(line[9:].rstrip(b"\n")):
                    # Cut off by a loss of power; a later log goes on.
                    break
                record = json.loads(line[9:])
                if is_first:
                    found = {n: each for n, each in found.items() if n < record["line"]}
                    is_first = False
                if record["line"] != len(found) + 1:
                    self._wrong.append(f"{path.name} has line {record['line']} out of order")
                found[record["line"]] = (log_number(path.name), offset), record
        return found

    def _read_batch(
        self, step: int, record: dict, place: tuple[int, int], *, is_trained: bool
    ) -> None:
        for trajectory in self._recorded(record):
            # Members that were put back were acknowledged with their first batch.
            self._ended.setdefault(trajectory.trajectory_id, place)
            self._ends[trajectory.trajectory_id] += 1
            if not is_trainable(trajectory.group_id) and is_trained:
                self._wrong.append(f"step {step + 1} trains {trajectory.group_id}")
            turns = _turns(trajectory)
            self._check_reward(trajectory, turns)
            sampled = [token for turn in turns for token in turn]
            versions = [s.version for s in trajectory.version_spans for _ in range(s.length)]
            for token, version in zip(sampled, versions, strict=True):
                self._check_token(step, token, version)
            self.trained += Counter(trajectories=is_trained, tokens=is_trained * len(sampled))

    def _recorded(self, record: dict) -> list[Trajectory]:
        """The trajectories of a batch; none if its file is missing or damaged, which is wrong."""
        path = batch_path(self._folder, record["step"], attempt_of(record["batch_id"]))
        data = path.read_bytes() if path.is_file() else b""
        if zlib.crc32(data) != record["crc32"]:
            self._wrong.append(f"{path.name} is {'damaged' if data else 'missing'}")
            return []
        batch = trainer_pb2.RecordedBatch.FromString(data)
        return [trajectory_from_pb(message) for message in batch.trajectories]

    def _set_aside(self, record: dict, place: tuple[int, int], ids: list[str]) -> None:
        """Notes who was acknowledged with a batch that was set aside."""
        for trajectory in self._recorded(record):
            # What was put back may be set aside again, and lies on disk since the first batch.
            self._ended.setdefault(trajectory.trajectory_id, place)
        self._ends.update(ids)
        for trajectory_id in ids:
            if is_trainable(trajectory_id.partition(".")[0]):
                self._wrong.append(f"{trajectory_id} was set aside, and nothing is wrong with it")

    def _check_reward(self, trajectory: Trajectory, turns: list[list[int]]) -> None:
        """Compares an episode with what its environment says of each reply."""
        name = trajectory.trajectory_id
        verdicts = [verdict_on(text_of(turn)) for turn in turns]
        rewards = sum(reward for reward, _ in verdicts)
        if trajectory.reward != rewards:
            self._wrong.append(f"{name} has the reward {trajectory.reward}, not {rewards}")
        is_last = [
            is_done or n == self._world.shape.max_turns
            for n, (_, is_done) in enumerate(verdicts, 1)
        ]
        if is_last != [False] * (len(turns) - 1) + [True]:
            self._wrong.append(f"{name} has {len(turns)} turns: {verdicts}")

    def _check_token(self, step: int, token: int, claimed: PolicyVersion) -> None:
        world = self._world
        self._tokens[token] += 1
        found = world.tokens.find(token)
        if found.version != claimed:
            self._wrong.append(f"token {token} of {found.version} is called {claimed}")
        if found.weights not in world.truth.weights.get(claimed, set()):
            self._wrong.append(f"token {token} was sampled by no weights of version {claimed}")
        lag = step - found.version.step
        if not 0 <= lag <= world.shape.max_staleness:
            self._wrong.append(
                f"step {step + 1} trains token {token} of version {found.version}: lag {lag}"
            )

    def _check_evaluations(self, versions: list[int]) -> None:
        """The last version is measured, and none twice; a newer one may stand for one before."""
        shape = self._world.shape
        every, due = shape.evaluate_every, set()
        if every is not None:
            due = {0, shape.steps, *(range(0, shape.steps, every) if every else ())}
        is_right = len(versions) == len(set(versions)) <= len(due)
        if not is_right or (due and versions[-1:] != [shape.steps]):
            self._wrong.append(f"versions {versions} were evaluated, due were {sorted(due)}")

    def _check_acknowledged(self) -> None:
        for trajectory_id, synced in self._world.acknowledged.items():
            place = self._ended.get(trajectory_id)
            if place is None:
                self._wrong.append(f"{trajectory_id} was acknowledged and is nowhere")
            elif place > synced:
                self._wrong.append(f"{trajectory_id} was acknowledged before it was on disk")

    def _check_leased(self) -> None:
        for (group_id, server), synced in self._world.leased.items():
            place = self._leased.get((group_id, server))
            if place is None or place > synced:
                self._wrong.append(f"{server} got a lease of {group_id} before it was on disk")

    def _check_summary(self) -> None:
        path = self._world.config.run_dir / "summary.json"
        if self._wrong or not path.is_file():
            if not self._wrong:
                self._wrong.append("the run left no summary")
            return
        summary = json.loads(path.read_text())
        ledger = summary["ledger"]
        if self._foreign > self._world.fired["told foreign run"]:
            self._wrong.append(f"{self._foreign} trajectories are of another run")
        # What was lost in the queue stays known.
        if ledger["difference"] and not self._world.fired["told lost delivery"]:
            self._wrong.append(f"the ledger's difference is {ledger['difference']}")
        tokens = self.trained["tokens"]
        if ledger["trained"] != tokens:
            self._wrong.append(
                f"the ledger says {ledger['trained']} trained tokens, there are {tokens}"
            )


def _turns(trajectory: Trajectory) -> list[list[int]]:
    """The sampled tokens of each turn."""
    tokens, turns, at = trajectory.token_ids.tolist(), [], 0
    for number, length in enumerate(trajectory.run_lengths):
        if number % 2:
            turns.append(tokens[at : at + length])
        at += length
    return turns

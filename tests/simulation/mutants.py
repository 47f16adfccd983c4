"""Breaks the product on purpose, in memory, and asks whether simulated runs notice.

    python tests/simulation/mutants.py --seeds 0:2000

Prints for each mutant the first seed that breaks a rule; the exit code is 1 if one survives.
"""

import argparse
import contextlib
import importlib
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from simulation.world import World, shared_memory  # noqa: E402

CONTROLLER = "slipstream.learner.controller"
BATCHES = f"{CONTROLLER}.loop:BatchFormer"
ORDERS = "slipstream.rollout_server.weight_orders:WeightOrders"
CLIENT = "slipstream.learner.trainer.controller_client:ControllerClient"
SERVICE = f"{CONTROLLER}.services.trainer_service"
WRITER = "slipstream.extensions.stored_weights.trainer:StorageWriter"
WEIGHTS = "slipstream.extensions.task_weights.controller:TaskWeighing"
FETCHED = "slipstream.extensions.stored_weights.server:StoredWeights"


@dataclass(frozen=True)
class Change:
    """A text in the source of a function, and what takes its place."""

    target: str
    old: str
    new: str


NO_COMPARISON = (
    Change(
        f"{ORDERS}._commit", "list(order.bucket_digests) != publish.digests", "False"
    ),
    Change(
        f"{CONTROLLER}.publishing.publish:Receiver.problem",
        "tuple(self.loaded.result().bucket_digests) == self.publish.digests",
        "True",
    ),
)
MUTANTS: dict[str, Change | tuple[Change, ...]] = {
    "acknowledge a batch before the journal has it": Change(
        f"{BATCHES}._write",
        "self._ahead = None",
        "self._ahead = None\n"
        "    await self._receiver.acknowledge(t.trajectory_id for t in batch.trajectories)",
    ),
    "a batch goes that a resume needs": Change(
        f"{BATCHES}._make_room",
        "min(first, oldest_needed)",
        "min(first, oldest_needed) + 1",
    ),
    "acknowledge ends before the journal has them": Change(
        f"{CONTROLLER}.records.ledger:TokenLedger.flush",
        "await self._journal.durable()",
        "self._journal.durable()",
    ),
    "a later log does not make the earlier ones durable": Change(
        f"{CONTROLLER}.records.journal:_begun_logs",
        "os.fsync(earlier.fileno())",
        "pass",
    ),
    "the name of a batch's file is not durable": Change(
        f"{CONTROLLER}.records.journal:Journal.write_batch",
        "sync_folder(path.parent)",
        "pass",
    ),
    "a batch's file is not durable": Change(
        f"{CONTROLLER}.records.journal:Journal.write_batch",
        "os.fsync(file.fileno())",
        "pass",
    ),
    "no epoch fence for trainers": Change(
        f"{SERVICE}:TrainerPlace.check", "epoch_of(context) != str(self.epoch)", "False"
    ),
    "no epoch fence for servers": (
        Change(
            f"{CONTROLLER}.services.fleet_service:FleetServicer._read",
            "self._fleet.find(session.key) is session",
            "True",
        ),
        Change(
            f"{CONTROLLER}.servers.fleet:Fleet.remove",
            "self.find(session.key) is not session",
            "False",
        ),
    ),
    "no timelines: other weights keep the name of a version": Change(
        f"{BATCHES}.identify", "return version_of(", "return version or version_of("
    ),
    "serve after a failed load": (
        Change(
            f"{ORDERS}._receive",
            "await self._discard(publish.publish_id, str(error))\n        return",
            "from slipstream.rollout_server.engine_interface import LoadedWeights\n"
            "        loaded = LoadedWeights(())",
        ),
        *NO_COMPARISON,
    ),
    "digests of loaded buckets are not compared": NO_COMPARISON,
    "no check at batching": (
        Change(
            f"{CONTROLLER}.leasing.shares:choose",
            "staleness.choose_batch(groups, step, groups_per_step)",
            "[group for group in groups if group.is_complete][:groups_per_step]",
        ),
        Change(
            f"{CONTROLLER}.leasing.shares:choose",
            "if earliest is None:",
            "if len(earliest) < groups_per_step:",
        ),
        Change(
            f"{CONTROLLER}.leasing.shares:_keep_staleness",
            "while overfull := staleness.overfull_deadlines(+rest, step + 1, groups_per_step):",
            "while overfull := []:",
        ),
    ),
    "a batch has the earliest groups, of whatever environment": Change(
        f"{CONTROLLER}.leasing.shares:choose", "len(supplies) == 1", "True"
    ),
    "a batch waits for no share": Change(
        f"{CONTROLLER}.leasing.shares:_supplies",
        "group.holder in mixture.working_servers",
        "False",
    ),
    "what rounding leaves is lost": Change(
        f"{CONTROLLER}.loop:BatchFormer._mixture", "owed=self._state.owed", "owed={}"
    ),
    "no check at leasing": Change(
        f"{CONTROLLER}.leasing.leases:LeaseBook.may_lease",
        "return staleness.holds(",
        "return True or staleness.holds(",
    ),
    "a lease leaves before its record is durable": Change(
        f"{CONTROLLER}.leasing.scheduler:Scheduler.lease_all", ", after=durable)", ")"
    ),
    "a lease of an evaluation leaves before its record is durable": Change(
        f"{CONTROLLER}.leasing.scheduler:Scheduler.send_evaluation",
        ", after=durable)",
        ")",
    ),
    "an episode has the reward of its last turn": Change(
        "slipstream.rollout_server.episodes.environment_talk:EnvironmentTalk._turn",
        "recording.reward += calls.whole_reward(verdict)",
        "recording.reward = calls.whole_reward(verdict)",
    ),
    "a client that comes again is refused": Change(
        f"{CONTROLLER}.trajectories.intake:Intake.suspend",
        "entry.state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED",
        "pass",
    ),
    "a step is answered before its record is durable": Change(
        f"{SERVICE}:TrainerServicer.ReportStep", "await self._former.durable()", "pass"
    ),
    "a trainer that starts again gets a new batch": Change(
        f"{BATCHES}.recorded",
        "if self.training is None or self.training.step != step:",
        "if (found := await self.form()) is not None:\n        return found\n"
        "    if self.training is None or self.training.step != step:",
    ),
    "trained trajectories are forgotten at a restart": Change(
        f"{CONTROLLER}.trajectories.inspection:EarlierIds.holds",
        "return trajectory_id in self._newest[1]",
        "return False",
    ),
    "a server that joins again names nothing": Change(
        "slipstream.rollout_server.service:RolloutServer._greeting",
        "if sender is not None:",
        "if False:",
    ),
    "a restart awaits only servers that were connected": Change(
        f"{CONTROLLER}.leasing.leases:LeaseBook.restore",
        "Awaited(holders)",
        "Awaited({key.server_id for key in history.servers.connected} & set(holders))",
    ),
    # Rare: seed 3834 is the first.
    "what a server put into the queue before it joined is not awaited": Change(
        f"{CONTROLLER}.trajectories.intake:Intake.joined",
        "self._ledger.unreceived(session.in_queue)",
        "()",
    ),
    # Rare: seed 746 is the first.
    "a group withdrawn at a restart loses what a batch put back": Change(
        f"{CONTROLLER}.trajectories.intake:Intake.withdraw",
        "self._cancel_members(group, cause)",
        "pass",
    ),
    "a lost server keeps its leases": Change(
        f"{CONTROLLER}.leasing.leases:LeaseBook.orphan", "group.holder = None", "pass"
    ),
    "a restart forgets open groups": Change(
        f"{CONTROLLER}.leasing.leases:LeaseBook.restore",
        "self._keep(self._reopened(open_group))",
        "pass",
    ),
    "episodes run while new weights are judged are delivered as good": (
        Change(f"{ORDERS}._reject", "settle(passed=False)", "settle(passed=True)"),
        Change(f"{ORDERS}._reject", "await self._dispatcher.cancel_all()", "pass"),
    ),
    "a trainer does not call a lost controller again": Change(
        f"{CLIENT}._retried", "not self._is_away(error)", "True"
    ),
    "a trainer does not wait for its place": Change(
        f"{CLIENT}._enter", "has_reason(error, Reason.PLACE_TAKEN)", "False"
    ),
    "a trainer does not register again": Change(
        f"{CLIENT}._keep_place", "self._enter_again()", "pass"
    ),
    "a call that began before a new registration is not repeated": Change(
        f"{CLIENT}._retried", "if has_entered:", "if False:"
    ),
    "a trainer registers again with its first version": Change(
        f"{CLIENT}.report_step", "if self._hello is not None:", "if False:"
    ),
    "a trainer registers again with its first weights": Change(
        f"{CLIENT}.report_step",
        "self._hello.weight_digest = report.weight_digest",
        "pass",
    ),
    "a registration again does not change the epoch of calls": Change(
        f"{CLIENT}._enter", "self._epoch = (", "self._epoch = self._epoch or ("
    ),
    "a version is announced before its manifest lies in storage": Change(
        f"{WRITER}._write",
        "self._storage.write(key, memoryview(data), until)",
        "threading.Thread(self._storage.write, (key, memoryview(data), until)).start()",
    ),
    "a manifest names objects that storage did not take": Change(
        "slipstream.extensions.stored_weights.trainer:RankObjects._put",
        "self._storage.write(key, data, until)",
        "with __import__('contextlib').suppress(Exception):\n"
        "        self._storage.write(key, data, until)",
    ),
    "a version is removed while a server fetches it": Change(
        "slipstream.extensions.stored_weights.controller:StoredPublisher.stored",
        "{fetch.stored.key for fetch in self._fetches.values()}",
        "set()",
    ),
    "digests of fetched weights are not compared": (
        Change(f"{FETCHED}._read", "storage.object_digest(data) != digest", "False"),
        Change(f"{FETCHED}._apply", "digest != link.bucket_digests[place]", "False"),
    ),
    "weights are of results that the journal does not name": Change(
        f"{WEIGHTS}._weigh", "events=len(events)", "events=0"
    ),
    "a restart weighs the results behind the newest record, too": Change(
        f"{WEIGHTS}._weigh",
        "self._made(name, table, [], table.step)",
        "self._made(name, table, table.pending, table.step)",
    ),
    "a group that completes again has a second result": Change(
        f"{CONTROLLER}.trajectories.intake:Intake._note_result",
        "leased.has_result",
        "False",
    ),
    "what is delivered under another run is dropped": Change(
        f"{CONTROLLER}.trajectories.inspection:Inspector.take",
        'self.refuse(delivery, f"it is of run {trajectory.run_id}")',
        "self._ledger.acknowledge(delivery.trajectory_id)",
    ),
}
# Each must be caught in continuous integration, which plays this seed before all others: it was the
# first to break a rule.
NAMED = {
    "a batch goes that a resume needs": 3,
    "acknowledge a batch before the journal has it": 2,
    "no epoch fence for trainers": 21,
    "serve after a failed load": 9,
    "no check at batching": 172,
    "a batch waits for no share": 52,
    "a later log does not make the earlier ones durable": 4,
    "a trainer registers again with its first version": 0,
    "an episode has the reward of its last turn": 4,
    "a version is announced before its manifest lies in storage": 16,
    "digests of fetched weights are not compared": 39,
    "what is delivered under another run is dropped": 113,
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Lets the product have this mutant."""
    with contextlib.ExitStack() as stack:
        changes = MUTANTS[name]
        for change in (changes,) if isinstance(changes, Change) else changes:
            stack.enter_context(_changed(change))
        yield


@contextlib.contextmanager
def _changed(change: Change) -> Iterator[None]:
    module_name, _, path = change.target.partition(":")
    module = importlib.import_module(module_name)
    owner_name, _, attribute = path.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    before = owner.__dict__[attribute]
    source = getattr(before, "mutated_source", None) or textwrap.dedent(
        inspect.getsource(before)
    )
    if source.count(change.old) < 1:
        raise ValueError(f"{change.target} has no {change.old!r} any more")
    source = source.replace(change.old, change.new)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        code = SourceFileLoader(module_name, file.name).get_code(module_name)
    [function] = [
        constant for constant in code.co_consts if isinstance(constant, CodeType)
    ]
    after: Any = FunctionType(function, module.__dict__, attribute, before.__defaults__)
    after.__kwdefaults__ = before.__kwdefaults__
    after.mutated_source = source
    setattr(owner, attribute, after)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def catching_seed(
    name: str, seeds: Iterable[int], folder: Path
) -> tuple[int, str] | None:
    """Returns the first of `seeds` whose run breaks a rule with this mutant, and the rule."""
    with mutated(name):
        for seed in seeds:
            result = World(seed, folder / "run").run()
            if result.violations:
                return seed, result.violations[0]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:2000")
    parser.add_argument("--only", default="", help="mutants whose name has this text")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    survivors = 0
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        for name in MUTANTS:
            if arguments.only not in name:
                continue
            seed = catching_seed(name, range(int(first), int(end)), Path(folder))
            survivors += seed is None
            where = "SURVIVES" if seed is None else f"seed {seed[0]}: {seed[1][:150]}"
            print(f"{name}: {where}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

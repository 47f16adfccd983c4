"""Groups of which some members never finish are trained with the others, after a crash too."""

import random
import shutil
from collections import Counter

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import read_batch, read_records
from slipstream.learner.trainer.recorded_run import recorded_steps
from support.fakes.fake_server import FakeServer, coin, environment_failure
from support.fakes.fake_trainer import START, FakeTrainer
from support.rigs.batch_messages import in_one_message
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of, rows_of
from support.rigs.waiting import until

STEPS = 12
GROUPS = 4
MEMBERS = 4
TOKENS = 5


def fails(group_id: str, member: int) -> bool:
    """A fifth of the members of all groups, on every attempt."""
    return random.Random(f"{group_id}/{member}/fails").random() < 0.2


def a_fifth_fails(lease, member, attempt):
    if lease.environment != "sound" and fails(lease.group_id, member):
        return environment_failure(lease, member, attempt)
    return coin(lease, member, attempt)


def with_sound(config: Config) -> Config:
    """The same run with another environment, in which nothing fails."""
    table = config.model_dump(mode="json", exclude_none=True)
    table["environments"].append({"name": "sound", "reference": "m:B"})
    return parse_config(table, source="test")


def trained(config: Config) -> dict[str, list[int]]:
    """The trained members of each trained group, from the files of the batches."""
    members_by_group: dict[str, list[int]] = {}
    folder = config.run_dir / "journal"
    for batch in read_history(read_records(folder)).batches.values():
        stored = read_batch(folder, batch.step, batch.crc32, batch.attempt)
        message = in_one_message(stored)
        assert message.header.num_trajectories == len(message.trajectories)
        assert message.header.num_groups == GROUPS
        for trajectory in message.trajectories:
            members_by_group.setdefault(trajectory.group_id, []).append(
                trajectory.member
            )
    return members_by_group


def check(config: Config, summary: dict) -> dict[str, list[int]]:
    """Every group has the members that did not fail, half of them or more."""
    assert (summary["state"], summary["steps"]) == ("finished", STEPS), summary["cause"]
    assert summary["suspended_environments"] == {}
    groups = trained(config)
    sound = set()
    for record in records_of(config.run_dir, "lease"):
        if record["environment"] == "sound":
            sound.add(record["group"])
    for group_id, members in groups.items():
        expected = [
            m for m in range(MEMBERS) if group_id in sound or not fails(group_id, m)
        ]
        assert members == expected
        assert len(members) >= MEMBERS / 2
    number = sum(map(len, groups.values()))
    assert STEPS * GROUPS < number < STEPS * GROUPS * MEMBERS
    assert summary["ledger"]["trained"] == number * TOKENS
    missing = STEPS * GROUPS * MEMBERS - number
    rows = rows_of(config.run_dir)
    assert sum(row["missing_members"] for row in rows if "step" in row) == missing
    # A whole group was set aside where less than half of it was left, or before any member came.
    aside = {r["group"] for r in records_of(config.run_dir, "set_aside")}
    assert not aside & groups.keys()
    assert all(
        sum(fails(group, m) for m in range(MEMBERS)) >= MEMBERS / 2 for group in aside
    )
    assert [
        len([*step.batch.trajectories])
        for step in recorded_steps(config.run_dir / "journal")
    ]
    return groups


async def test_groups_are_trained_with_the_members_that_finished(tmp_path, caplog):
    config = with_sound(make_config(tmp_path))
    address = config.controller.address
    servers = [
        FakeServer(address, f"s{i}", judge=a_fifth_fails, delay_s=0.01)
        for i in range(2)
    ]
    trainer = FakeTrainer(address)
    check(config, await play(config, *servers, trainer=trainer))
    assert max(trainer.lags) <= 2
    shares = Counter(t.environment for batch in trainer.batches for t in batch)
    assert min(shares.values()) > len(shares) * STEPS
    texts = [
        r.getMessage() for r in caplog.records if "goes on without" in r.getMessage()
    ]
    assert len(texts) == 1
    assert texts[0].endswith(
        "which had its last attempt: ValueError: broken; missing_members counts such episodes"
    )


async def test_partial_groups_go_on_as_they_were_after_a_crash(tmp_path):
    config = make_config(tmp_path / "whole")
    address = config.controller.address
    copies = []
    trainer = FakeTrainer(address, checkpoint_every=3, step_s=0.05)
    servers = [
        FakeServer(address, f"s{i}", judge=a_fifth_fails, delay_s=0.05)
        for i in range(2)
    ]

    async def crash(controller, tasks):
        for step in (2, 5, 8):
            await until(lambda step=step: trainer.version.step >= step)
            folder = tmp_path / f"crash-{step}"
            ignored = shutil.ignore_patterns("*.partial")
            shutil.copytree(config.run_dir, folder / "r", ignore=ignored)
            copies.append((folder, trainer.newest_checkpoint))

    check(config, await play(config, *servers, trainer=trainer, during=crash))
    for folder, checkpoint in copies:
        again = make_config(folder)
        history = read_history(read_records(again.run_dir / "journal"))
        given_up = {
            (g.group_id, member)
            for g in history.open_groups.values()
            for member in g.failed
        }
        address = again.controller.address
        servers = [FakeServer(address, f"s{i}", judge=a_fifth_fails) for i in range(2)]
        summary = await play(
            again, *servers, trainer=FakeTrainer(address, checkpoint=checkpoint)
        )
        check(again, summary)
        leased = {
            (lease.group_id, m)
            for server in servers
            for lease in server.leases
            for m in lease.members
        }
        assert not leased & given_up


async def test_a_partial_group_that_is_put_back_stays_as_it_is(tmp_path):
    config = make_config(tmp_path / "whole")
    copy = tmp_path / "crashed"

    def poisoned(batch):
        """Refuses the first batch with a partial group, for one of its whole groups."""
        sizes = Counter(t.group_id for t in batch)
        bad = next((g for g, n in sorted(sizes.items()) if n == MEMBERS), None)
        if (
            set(sizes.values()) == {MEMBERS}
            or bad is None
            or refused not in ([], [bad])
        ):
            return None
        refused[:] = [bad]
        return [bad]

    class Crashing(FakeTrainer):
        async def _refuse(self, header, group_ids) -> None:
            await super()._refuse(header, group_ids)
            shutil.copytree(config.run_dir, copy / "r")

    refused: list[str] = []
    address = config.controller.address
    trainer = Crashing(address, checkpoint=START)
    trainer.poisoned = poisoned
    server = FakeServer(address, judge=a_fifth_fails)
    check(config, await play(config, server, trainer=trainer))
    (record,) = records_of(config.run_dir, "batch_set_aside")
    kept = {group for group, *_ in record["put_back"]}
    assert any(len(trained(config)[group]) < MEMBERS for group in kept)
    again = make_config(copy)
    server = FakeServer(again.controller.address, judge=a_fifth_fails)
    groups = check(
        again, await play(again, server, trainer=FakeTrainer(server.address))
    )
    assert not {lease.group_id for lease in server.leases} & kept
    assert {g: groups[g] for g in kept} == {g: trained(config)[g] for g in kept}

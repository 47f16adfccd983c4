"""Several clients' models in one run over HTTP: real controller and front, and fakes."""

import pytest
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.loop_client import logprobs_of, replies
from support.rigs.loop_runs import DATUM, loop_config, started
from support.rigs.run_processes import summary_of
from support.rigs.waiting import until

LORA = {
    "lora__rank": 8,
    "lora__adapters": ["a", "b"],
    "lora__publish": "adapters",
    "lora__alpha": 16.0,
}


@pytest.fixture
def config(tmp_path):
    return loop_config(tmp_path, **LORA)


def kinds(trainer: FakeTrainer) -> list[tuple[str, str]]:
    """Kind and adapter of each step that the trainer was ordered."""
    return [
        (order.WhichOneof("step"), order.adapter.name) for order, _ in trainer.ordered
    ]


async def test_each_client_has_an_adapter_of_its_own_rank_and_passes(config) -> None:
    async with started(config) as (one, _, trainer):
        other = one.another()
        third = one.another()
        await one.begin(rank=1)
        await other.begin(rank=8, user_metadata={"lora_alpha": "4"})
        assert (await third.begin())["error"].startswith(
            "all 2 places for models (lora.adapters)"
        )
        assert "has a rank of 1 to 8" in (await third.begin(rank=9))["error"]
        futures = [
            await client.send(client.passed([DATUM], "cross_entropy"))
            for client in (one, other, one, other)
        ]
        for future in futures:
            assert logprobs_of(await one.result(future)) == [[-1.5] * 3]
        await other.step()
        await one.step()
        assert kinds(trainer) == [
            ("begin", "a"),
            ("begin", "b"),
            ("adam", "b"),
            ("adam", "a"),
        ]
        sizes = [
            (header.adapter.rank, header.adapter.alpha) for header, _ in trainer.ordered
        ]
        assert sizes == [(1, 16.0), (8, 4.0), (8, 4.0), (1, 16.0)]
        for client, (_, passes) in zip((other, one), trainer.ordered[2:], strict=True):
            assert [name.rpartition(":")[0] for name in passes] == [
                f"{client.model}:{number}" for number in (1, 2)
            ]
        # A session that has finished gives its place away.
        await one.post(
            f"sessions/{one.session}/finish", {"reason": {"type": "success"}}
        )
        assert "model_id" in await third.begin(rank=2)
        assert kinds(trainer)[-1] == ("begin", "a")
        assert "is not trained by this run any more" in (await one.step())["error"]


async def test_a_publish_leaves_the_sessions_of_other_models_as_they_are(
    config,
) -> None:
    async with started(config) as (one, server, _):
        other = one.another()
        await one.begin(rank=1)
        await other.begin(rank=8)
        publish = await one.publish()
        first = await other.publish()
        server.gate.clear()
        under_way = await one.ask(publish, [1])
        await until(lambda: len(server.leases) == 1)
        await other.step()
        # The publish waits for no sample of another model.
        second = await other.publish()
        server.gate.set()
        assert len(replies(await one.result(under_way))) == 1
        assert len(replies(await one.sample(publish, [2]))) == 1
        assert len(replies(await other.sample(second, [3]))) == 1
        gone = await other.sample(first, [4])
        assert gone["error"].startswith(
            "version 4 is not served any more, version 6 is"
        )
        start = await one.post(
            "create_sampling_session",
            {
                "session_id": one.session,
                "sampling_session_seq_id": next(one.sampling),
                "base_model": "nowhere",
            },
        )
        await one.sample(start["sampling_session_id"], [5])
        samplings = [
            (lease.sampling.adapter, lease.sampling.by_start) for lease in server.leases
        ]
        assert samplings == [("a", False), ("a", False), ("b", False), ("", True)]
        environments = [lease.environment for lease in server.leases]
        assert environments == ["client-a", "client-a", "client-b", "client"]


async def test_one_client_that_fails_again_and_again_stops_no_other(tmp_path) -> None:
    config = loop_config(tmp_path, **LORA, controller__max_set_aside_batches=1)
    async with started(config) as (one, _, trainer):
        other = one.another()
        await one.begin(rank=1)
        await other.begin(rank=8)
        passed = await other.send(other.passed([DATUM], "cross_entropy"))
        await other.result(passed)
        trainer.poisoned = lambda _: []
        for _ in range(3):
            assert (await one.step())["error"] == "the loss is nan"
        trainer.poisoned = lambda _: None
        assert (await other.step())["type"] == "optim_step"
        assert [len(passes) for _, passes in trainer.ordered] == [0, 0, 1]

    summary = summary_of(config.run_dir)
    assert (summary["steps"], summary["set_aside_batches"]) == (3, 3)


async def test_a_state_goes_to_a_new_model_of_its_rank_and_to_no_other(config) -> None:
    async with started(config) as (one, _, trainer):
        other = one.another()
        await one.begin(rank=2)
        await one.step()
        path = (await one.done("save_weights", path="x"))["path"]
        save_checkpoint(config.run_dir / "checkpoints", 2)
        await other.begin(rank=8)
        assert (
            "has rank 2 and alpha 16, this model has 8"
            in (await other.load(path))["error"]
        )
        assert (await one.load(path, optimizer=False))["path"] == path
        await other.post(f"sessions/{other.session}/finish", {})
        await one.begin_from(path)
        assert kinds(trainer)[-2:] == [("load", "a"), ("load", "b")]
        loads = [
            (header.load.adapter, header.adapter.rank)
            for header, _ in trainer.ordered[-2:]
        ]
        assert loads == [("a", 2), ("a", 2)]
        await one.step()
        assert trainer.ordered[-1][0].adapter.name == "b"


async def test_all_models_go_on_after_kills_of_controller_and_trainer(config) -> None:
    async with started(config, is_killed=True) as (one, _, trainer):
        other = one.another()
        await one.begin(rank=1)
        await other.begin(rank=8)
        session = await one.publish()
        for client in (one, other):
            await client.result(
                await client.send(client.passed([DATUM], "cross_entropy"))
            )
        trainer.hold_at(3)
        stepped = await one.order("optim_step", adam_params={})
        await until(lambda: trainer.holds)
        published = await other.order(
            "save_weights_for_sampler", sampling_session_seq_id=0
        )
        known = one, other
    async with started(config) as (one, server, trainer):
        other = one.another()
        for client, before in zip((one, other), known, strict=True):
            client.go_on(before)
        assert (await one.result(stepped))["type"] == "optim_step"
        theirs = (await other.result(published))["sampling_session_id"]
        for client, served, adapter in ((one, session, "a"), (other, theirs, "b")):
            await client.sample(served, [1])
            assert server.leases[-1].sampling.adapter == adapter
        await other.step()
        events = [("begin", "a"), ("begin", "b"), ("serve", "a")]
        assert kinds(trainer) == [*events, ("adam", "a"), ("serve", "b"), ("adam", "b")]
        # Every step has its own passes alone.
        assert [len(passes) for _, passes in trainer.ordered] == [0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("several", [True, False])
async def test_a_key_has_what_is_its_own_and_nothing_of_another_one(
    tmp_path, several
) -> None:
    config = loop_config(tmp_path, **LORA if several else {})
    async with started(config) as (alice, _, trainer):
        alice.http.headers["x-api-key"] = "tml-alice"
        mallory = alice.another()
        mallory.http.headers["x-api-key"] = "tml-mallory"

        async def is_refused(
            path: str, body: dict | None = None, method: str = "POST"
        ) -> bool:
            answer = await mallory.http.request(method, path, json=body)
            return answer.status_code == 403 and "is of another api_key" in answer.text

        await alice.begin()
        for kind in ("training_runs", "checkpoints"):
            assert (await mallory.http.get(kind)).json()[kind] == []
        assert len((await alice.http.get("training_runs")).json()["training_runs"]) == 1
        # An operation of another client, with its next number.
        step = {
            "model_id": alice.model,
            "seq_id": 1,
            "adam_params": {"learning_rate": 1000.0},
        }
        assert await is_refused("optim_step", step)
        assert (await alice.step(learning_rate=1e-4))["metrics"] is not None
        assert [order.adam.learning_rate for order, _ in trainer.ordered][-1] == 1e-4
        # States, samples, results and the session are not for another key.
        saved = (await alice.done("save_weights", path="good"))["path"]
        save_checkpoint(config.run_dir / "checkpoints", trainer.version.step)
        state = f"training_runs/{alice.model}/checkpoints/weights/good"
        assert await is_refused(state, method="DELETE")
        session = await alice.publish()
        future = await alice.ask(session, [1, 2, 3])
        assert await is_refused("retrieve_future", {"request_id": future["request_id"]})
        assert len(replies(await alice.result(future))) == 1
        refusal = await mallory.ask(session, [1, 2, 3])
        assert (refusal.status_code, "of another api_key" in refusal.text) == (
            403,
            True,
        )
        assert await is_refused(f"sessions/{alice.session}/finish", {"reason": {}})
        assert await is_refused("session_heartbeat", {"session_id": alice.session})
        # A place of its own is all that it gets, if there is one.
        answer = await mallory.begin()
        if several:
            load = {
                "path": saved,
                "optimizer": True,
                "model_id": mallory.model,
                "seq_id": 1,
            }
            assert await is_refused("load_weights", load)
        else:
            assert "the run's only model is that of another api_key" in answer["error"]
            newest = await mallory.begin_from("tinker://newest")
            assert "tinker://newest is no state that this run saved" in newest["error"]
        assert (await alice.load(saved))["path"] == saved
        listed = (await alice.http.get("checkpoints")).json()["checkpoints"]
        assert saved in [checkpoint["tinker_path"] for checkpoint in listed]

"""A client's own loop over HTTP: real controller and front, servers and a trainer that are none."""

import asyncio
import json
import math
import time

import pytest
from slipstream.client.client import Client
from slipstream.client.launch.display import table_rows
from slipstream.client.run_folder import write_config
from slipstream.client.verify import examine
from slipstream.extensions.tinker.front import MAX_BODY_BYTES
from slipstream.extensions.tinker.wire_pb2 import SampleResponse
from slipstream.protocol.checkpoints import KEPT_NAME
from support.fakes.fake_server import PROMPT_LOGPROBS
from support.fakes.fake_trainer import FakeTrainer, TrainerDied
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.loop_client import logprobs_of, metrics_of, replies
from support.rigs.loop_runs import DATUM, loop_config, started
from support.rigs.run_processes import batches_of, summary_of
from support.rigs.waiting import LIMIT_S, until


@pytest.fixture
def config(tmp_path):
    return loop_config(tmp_path)


async def test_a_loop_samples_passes_steps_and_publishes(config) -> None:
    async with started(config) as (client, server, trainer):
        made = await client.begin()
        assert made["model_id"] == f"{client.session}:train:0"
        for step in range(3):
            session = await client.publish()
            sampling = {"max_tokens": 4} | ({"seed": 7} if step else {})
            future = await client.ask(
                session, [1, 2, 3], num_samples=3, sampling_params=sampling
            )
            assert len(set(future["sample_sequence_ids"])) == 3
            summary = replies(await client.result(future))
            assert [len(tokens) for tokens, _, _ in summary] == [5, 5, 5]
            # Submitted together, as by a client that does not wait.
            passed = await client.send(client.passed([DATUM, DATUM], "cross_entropy"))
            stepped = await client.order(
                "optim_step", adam_params={"learning_rate": 0.5}
            )
            result = await client.result(passed)
            assert logprobs_of(result) == [[-1.5] * 3] * 2
            assert metrics_of(result) == {"loss:sum": 2.0}
            assert (await client.result(stepped))["type"] == "optim_step"
            assert trainer.version.step == step + 1
        assert (
            await client.post(f"sessions/{client.session}/finish", {"status": "x"})
            == {}
        )
        leases = server.leases
        assert all(lease.environment == "client" for lease in leases)
        # Every reply of a sample with a seed has a seed of its own.
        assert not any(lease.sampling.HasField("seed") for lease in leases[:3])
        assert [lease.sampling.seed for lease in leases[3:6]] == [7, 8, 9]
        assert [lease.task_index for lease in leases[:6]] == [0, 1, 2] * 2
        assert leases[0].prompt_token_ids == b"\1\0\0\0\2\0\0\0\3\0\0\0"

    summary = summary_of(config.run_dir)
    assert (summary["steps"], summary["ledger"]["difference"]) == (3, 0)
    assert summary["ledger"]["generated"] == summary["ledger"]["evaluated"] == 3 * 3 * 5
    write_config(config, config.run_dir)
    trained_tokens = examine(config.run_dir).trained
    assert trained_tokens == "3 steps of a client's own loop, 3 passes"
    assert {"reward", "lag"}.isdisjoint(dict(table_rows(summary)))
    # A version is published when it is asked for, and not before.
    assert [version.step for version in server.loaded_versions] == [0, 1, 2]
    header, passes = trainer.ordered[0]
    assert (header.adam.learning_rate, header.adam.eps) == (0.5, 1e-12)
    assert [name.rpartition(":")[2] for name in passes] == ["forward_backward"]
    # The journal holds the passes of each step.
    assert [
        len(sequence.sequences) for sequence in batches_of(config.run_dir)[0].passes
    ] == [2]


async def test_an_operation_that_is_sent_twice_happens_once_and_in_the_order_of_numbers(
    config,
):
    async with started(config) as (client, _, trainer):
        await client.begin()
        late = client.passed([DATUM], "cross_entropy", number=2)
        later = await client.send(late)
        step = {"model_id": client.model, "seq_id": 3, "adam_params": {}}
        stepped = [await client.post("optim_step", step) for _ in range(2)]
        first = await client.send(client.passed([DATUM], "cross_entropy", number=1))
        assert await client.send(late) == later
        assert stepped[0] == stepped[1]
        results = [await client.result(later) for _ in range(2)]
        assert results[0] == results[1]
        await client.result(stepped[0])
        await client.result(first)
        assert trainer.version.step == 1
        client.numbers = iter([4, 5])
        await client.step()
        assert [len(passes) for _, passes in trainer.ordered] == [2, 0]
        numbers = [name.split(":")[-2] for name in trainer.ordered[0][1]]
        assert numbers == ["1", "2"]

    assert summary_of(config.run_dir)["steps"] == 2


async def test_a_known_number_with_other_content_is_refused(config) -> None:
    async with started(config) as (client, _, trainer):
        await client.begin()
        step = {
            "model_id": client.model,
            "seq_id": 1,
            "adam_params": {"learning_rate": 0.1},
        }
        future = await client.post("optim_step", step)
        other = step | {"adam_params": {"learning_rate": 1000.0}}
        refusal = await client.http.post("optim_step", json=other)
        assert refusal.status_code == 409
        assert (
            "is known with other content: number the new operation anew" in refusal.text
        )
        await client.result(future)
        assert (await client.http.post("optim_step", json=other)).status_code == 409
        assert [order.adam.learning_rate for order, _ in trainer.ordered] == [0.1]


@pytest.mark.parametrize("kind", ["batch", "compute"])
async def test_an_operation_that_ends_trainers_is_refused_and_the_loop_goes_on(
    config, kind
):
    async with started(config, is_killed=True) as (client, _, first):
        await client.begin()
        second, third = (FakeTrainer(config.controller.address) for _ in range(2))
        first.dies_of = second.dies_of = kind
        if kind == "batch":
            bad = await client.order("optim_step", adam_params={})
        else:
            bad = await client.send(client.passed([DATUM], "cross_entropy"))
        good = await client.order("optim_step", adam_params={})
        with pytest.raises(TrainerDied):
            await second.run()
        running = asyncio.ensure_future(third.run())
        error = (await client.result(bad))["error"]
        assert "is refused: 2 trainers have ended while they carried it out" in error
        assert "error" not in await client.result(good)
        assert len(third.ordered) == 1
        running.cancel()


async def test_each_new_client_begins_with_the_models_own_weights(config) -> None:
    async with started(config) as (client, _, trainer):
        for _ in range(2):
            assert "model_id" in await client.begin()
            await client.step()
    assert [order.WhichOneof("step") for order, _ in trainer.ordered] == [
        "adam",
        "begin",
        "adam",
    ]


async def test_a_state_takes_a_name_in_use_only_if_it_is_told_to(config) -> None:
    folder = config.run_dir / "checkpoints"
    async with started(config) as (client, _, trainer):
        await client.begin()
        await client.step()
        path = (await client.done("save_weights", path="x"))["path"]
        save_checkpoint(folder, 1)
        await client.step()
        refusal = (await client.done("save_weights", path="x"))["error"]
        assert refusal.startswith(f"{path} is in use: give the state another name")
        again = await client.done("save_weights", path="x", overwrite=True)
        assert again["path"] == path
        save_checkpoint(folder, 2)
        await client.load(path)
        assert trainer.ordered[-1][0].load.step == 2


async def test_status_names_the_operation_that_a_loop_waits_for(config) -> None:
    async with (
        started(config) as (client, *_),
        Client(config.controller.address) as status_client,
    ):

        async def said(words: str) -> None:
            async with asyncio.timeout(LIMIT_S):
                while (status := await status_client.status()).waiting_for != words:
                    await asyncio.sleep(0.01)
            assert not status.lease_wait

        await client.begin()
        await said("the next training operation of the client")
        await client.send(client.passed([DATUM], "cross_entropy", number=2))
        await said(f"operation 1 of {client.model}, behind which later ones wait")


async def test_what_is_refused_fails_in_its_turn_with_one_line(config) -> None:
    async with started(config) as (client, server, trainer):
        await client.begin()
        other = {"session_id": client.session, "model_seq_id": 7, "base_model": "x"}
        created = await client.result(await client.post("create_model", other))
        assert created["error"].endswith("/nowhere only, not x")
        bad = await client.result(
            await client.send(client.passed([DATUM], "stable_reinforce"))
        )
        assert bad["error"].startswith(
            "loss_fn stable_reinforce is not served, since its formula"
        )
        assert bad["category"] == "user"
        # Version 0 is the model of the settings: it is saved and loaded as long as it is there.
        saved = await client.done("save_weights", path="x")
        assert (await client.load(saved["path"]))["path"] == saved["path"]
        # Later operations have their turn, also behind what the controller refuses to take.
        negative = await client.step(learning_rate=-1.0)
        assert (
            "learning_rate is a number from 0 to 1e+06, got -1.0" in negative["error"]
        )
        large = await client.send(client.passed([DATUM], "x" * MAX_BODY_BYTES))
        assert (
            "a request has at most 25165824 bytes, got"
            in (await client.result(large))["error"]
        )
        # A number that is not finite is null in the SDK's JSON.
        infinite = await client.step(learning_rate=None)
        assert (
            "learning_rate is a number from 0 to 1e+06, got None" in infinite["error"]
        )
        strange = await client.step(eps="small")
        assert "eps is a number from 0 to 1e+06, got 'small'" in strange["error"]
        await client.step()
        # The state of version 0 is the run's own beginning, to which a step goes back.
        assert (await client.load(saved["path"]))["path"] == saved["path"]
        assert [order.WhichOneof("step") for order, _ in trainer.ordered] == [
            "adam",
            "begin",
        ]
        nothing = f"{client.session}:sample:9"
        assert (
            f"{nothing} is no name of a publish"
            in (await client.sample(nothing, [1]))["error"]
        )
        refusal = await client.ask(nothing, [1], topk_prompt_logprobs=2)
        assert (refusal.status_code, "prompt_logprobs has" in refusal.text) == (
            400,
            True,
        )
        beat = {"session_id": client.session}
        assert (await client.post("session_heartbeat", beat))[
            "type"
        ] == "session_heartbeat"
        assert (await client.post("training_runs", {})).status_code == 404
        for body in (
            [],
            {"seq_id": 1, "model_id": f"{client.model}\n", "adam_params": {}},
        ):
            assert (await client.http.post("optim_step", json=body)).status_code == 400
        unlisted = await client.post("weights_info", {"tinker_path": saved["path"]})
        assert (unlisted.status_code, "is not there" in unlisted.text) == (404, True)
        sampling = f"samplers/{client.session}:sample:0+{saved['path']}"
        sampler = (await client.http.get(sampling)).json()
        assert sampler["base_model"] == str(config.model.path.absolute())
        assert sampler["model_path"] == saved["path"]
        unknown = {"request_id": f"{client.session}:a:1:sample"}
        assert (
            await client.http.post("retrieve_future", json=unknown)
        ).status_code == 410
        copied = await client.http.post(
            "copy_weights", json={"source_path": saved["path"]}
        )
        assert copied.status_code == 404
        assert (
            "copy_weights is not served: a state is loaded by its path" in copied.text
        )

    assert summary_of(config.run_dir)["steps"] == 2


async def test_a_session_samples_by_its_version_alone(config) -> None:
    async with started(config) as (client, server, trainer):
        # A call that finds no order ends after half of it.
        trainer.call_timeout_s = 4.0
        await client.begin()
        old = await client.publish()
        server.gate.clear()
        under_way = await client.ask(old, [1])
        await until(lambda: len(server.leases) == 1)
        await client.step()
        publish = asyncio.ensure_future(client.publish())
        # The client waits for the sample, which has one version.
        waits = trainer.num_waits
        await until(lambda: trainer.num_waits > waits + 1)
        assert server.loaded_versions[-1].step == 0
        late = await client.ask(old, [2])
        server.gate.set()
        assert len(replies(await client.result(under_way))) == 1
        new = await publish
        gone = await client.result(late)
        assert gone["error"].startswith(
            "version 0 is not served any more, version 1 is"
        )
        assert len(replies(await client.sample(new, [3]))) == 1


async def test_a_session_in_flight_samples_by_what_is_served(config) -> None:
    async with started(config) as (client, server, _):
        await client.begin()
        newest = await client.publish(kind="inflight")
        server.gate.clear()
        under_way = await client.ask(newest, [1])
        await until(lambda: len(server.leases) == 1)
        await client.step()
        # The client does not wait for the sample, which may have tokens of several versions.
        assert await client.publish(kind="inflight") != newest
        assert server.loaded_versions[-1].step == 1
        server.gate.set()
        assert len(replies(await client.result(under_way))) == 1
        assert len(replies(await client.sample(newest, [2]))) == 1


async def test_with_in_flight_older_sessions_sample_by_what_is_served(config) -> None:
    async with started(config, in_flight=True) as (client, server, _):
        await client.begin()
        sessions = [await client.publish()]
        for _ in range(2):
            await client.step()
            sessions.append(await client.publish())
        assert len(set(sessions)) == 3
        for session in sessions:
            await client.sample(session, [1])
        assert server.loaded_versions[-1].step == 2
        assert len(server.leases) == 3
        # An older session is no reference any more: its weights are not served.
        gone = await client.sample(sessions[1], [1, 2, 3], prompt_logprobs=True)
        assert gone["error"].startswith("version 1 is not served any more")
        samples = await client.sample(sessions[2], [1, 2, 3], prompt_logprobs=True)
        assert SampleResponse.FromString(samples).prompt_logprobs[4:] == PROMPT_LOGPROBS


@pytest.mark.parametrize("in_flight", [False, True])
async def test_the_start_is_sampled_and_scores_prompts_beside_adapters(
    tmp_path, in_flight
) -> None:
    config = loop_config(tmp_path, lora__rank=8, lora__publish="adapters")
    async with started(config, in_flight=in_flight) as (client, server, _):
        await client.begin(rank=8)
        start = await client.publish()
        for _ in range(2):
            samples = await client.sample(start, [1, 2, 3], prompt_logprobs=True)
            assert (
                SampleResponse.FromString(samples).prompt_logprobs[4:]
                == PROMPT_LOGPROBS
            )
            await client.step()
            newest = await client.publish()
        await client.sample(newest, [1, 2, 3])
        assert [lease.sampling.by_start for lease in server.leases] == [
            True,
            True,
            False,
        ]


async def test_a_saved_state_is_loaded_as_a_step_and_a_new_model_takes_over(
    config,
) -> None:
    async with started(config) as (client, _, trainer):
        await client.begin()
        await client.step()
        path = (await client.done("save_weights", path="x"))["path"]
        await client.step()
        removed = await client.load(path)
        assert "is gone: its ttl was over, or somebody removed it" in removed["error"]
        save_checkpoint(config.run_dir / "checkpoints", 1)
        assert (await client.load(path, optimizer=False))["path"] == path
        missing = await client.begin_from(f"tinker://{client.model}/weights/y")
        assert "is no state that this run saved" in missing["error"]
        before = client.model
        assert (await client.begin_from(path))["model_id"] != before
        await client.step()
        parsed = [
            order.load
            for order, _ in trainer.ordered
            if order.WhichOneof("step") == "load"
        ]
        assert [(load.step, load.without_optimizer) for load in parsed] == [
            (1, True),
            (1, False),
        ]
        client.model, client.numbers = before, iter([9])
        assert "is not trained by this run any more" in (await client.step())["error"]

    assert summary_of(config.run_dir)["steps"] == 5


async def test_a_saved_state_stays_until_its_ttl_is_over_or_it_is_deleted(
    config,
) -> None:
    folder = config.run_dir / "checkpoints"

    def kept() -> dict[str, float]:
        return json.loads((folder / KEPT_NAME).read_text())

    async with started(config, is_killed=True) as (before, *_):
        client = before
        await client.begin()
        await client.step()
        paths = []
        for name, ttl_s in (("x", None), ("y", 60)):
            saved = await client.done("save_weights", path=name, ttl_seconds=ttl_s)
            paths.append(saved["path"])
        assert kept() == {"1": math.inf}
        x, y = (f"training_runs/{path.removeprefix('tinker://')}" for path in paths)
        x, y = (path.replace("/weights/", "/checkpoints/weights/") for path in (x, y))
        assert (await client.http.delete(x)).json() == {}
        assert time.time() < kept()["1"] < time.time() + 60.0
        assert (
            await client.http.put(f"{y}/ttl", json={"ttl_seconds": 1e5})
        ).json() == {}
        assert kept()["1"] > time.time() + 9e4
        refused = await client.http.post(f"{y}/publish")
        assert (refused.status_code, "is not published" in refused.text) == (400, True)
        save_checkpoint(folder, 1)
    async with started(config) as (client, *_):
        client.go_on(before)
        assert (await client.http.delete(x)).status_code == 404
        assert (
            "is no state that this run saved" in (await client.load(paths[0]))["error"]
        )
        listed = (await client.http.get("checkpoints")).json()["checkpoints"]
        assert [checkpoint["tinker_path"] for checkpoint in listed] == [paths[1]]
        assert listed[0]["expires_at"]
        assert (await client.load(paths[1]))["path"] == paths[1]
        assert (await client.http.delete(y)).json() == {}
        assert kept() == {}
        assert (await client.http.get("checkpoints")).json()["checkpoints"] == []


async def test_replies_are_no_staler_than_a_model_promises_also_after_a_restart(
    config,
) -> None:
    promise = {"user_metadata": {"max_staleness": "1"}}
    async with started(config, is_killed=True) as (before, *_):
        client = before
        wrong = await client.begin(user_metadata={"max_staleness": "-1"})
        assert (
            "max_staleness is a number of steps from 0 to 999999, got" in wrong["error"]
        )
        await client.begin(**promise)
        session = await client.publish()
        flying = await client.publish(kind="inflight")
        await client.step()
        sampled = replies(await client.sample(session, [1, 2]))
        assert len(sampled) == 1
        await client.step()
        refused = await client.sample(session, [1, 2])
        assert (
            "version 0 is more than max_staleness = 1 steps behind" in refused["error"]
        )
    async with started(config) as (client, server, _):
        client.go_on(before)
        refused = await client.sample(session, [1, 2])
        assert (
            "version 0 is more than max_staleness = 1 steps behind" in refused["error"]
        )
        # In flight it waits for the next publish.
        waiting = await client.ask(flying, [1, 2])
        await client.publish(kind="inflight")
        assert len(replies(await client.result(waiting))) == 1
        assert [lease.sampling.max_reply_tokens for lease in server.leases] == [4]


async def test_a_step_that_cannot_be_made_fails_and_the_loop_goes_on(config) -> None:
    async with started(config) as (client, _, trainer):
        await client.begin()
        await client.result(await client.send(client.passed([DATUM], "cross_entropy")))
        trainer.poisoned = lambda _: []
        assert (await client.step())["error"] == "the loss is nan"
        trainer.poisoned = lambda _: None
        assert (await client.step())["type"] == "optim_step"
        # The passes of the failed step are gone.
        assert [passes for _, passes in trainer.ordered] == [[]]

    summary = summary_of(config.run_dir)
    assert summary["steps"] == 1
    assert summary["set_aside_batches"] == 1


async def test_futures_outlive_the_http_process_and_the_controller(config) -> None:
    async with started(config, is_killed=True) as (before, _, trainer):
        client = before
        await client.begin()
        first = await client.send(client.passed([DATUM], "cross_entropy"))
        result = await client.result(first)
        trainer.hold_at(0)
        stepped = await client.order("optim_step", adam_params={})
        await until(lambda: trainer.holds)
        waiting = await client.send(client.passed([DATUM, DATUM], "cross_entropy"))
    # All come back: the trainer without gradients, from its start.
    async with started(config) as (client, _, trainer):
        client.go_on(before)
        assert await client.result(first) == result
        assert (await client.result(stepped))["type"] == "optim_step"
        assert len(logprobs_of(await client.result(waiting))) == 2
        await client.step()
    # The step has the pass of before, and the next one that which had waited.
    passes = [
        [order.split(":")[-2] for order in passes] for _, passes in trainer.ordered
    ]
    assert passes == [["1"], ["3"]]


def test_no_setting_of_other_loops_fits_a_client(config) -> None:
    from slipstream.core.configuration.config_file import parse_config
    from slipstream.core.errors import ConfigError

    table = config.model_dump(mode="json", exclude_unset=True)
    table["environments"] = [{"name": "e", "reference": "m:E"}]
    with pytest.raises(
        ConfigError, match=r"client_loop needs no environments, got \['e'\]"
    ):
        parse_config(table, source="test")

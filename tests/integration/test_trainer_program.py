"""The trainer as a program, with a controller that follows a script and a plain receiver."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.settings.sections import WeightsSection
from slipstream.core.types import GroupId, PolicyVersion, VersionSpan
from slipstream.extensions.stored_weights.server import StoredWeights
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.protocol.checkpoints import checkpoint_path
from slipstream.protocol.codec import trajectory_to_pb, unpack_logprobs, unpack_tokens
from slipstream.protocol.rich_errors import Reason
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.protocol.weights.digests import (
    bucket_digest,
    bucket_tensor_digests,
    weight_digest,
)
from slipstream.v1 import trainer_pb2, trajectory_pb2, weights_pb2
from support.fakes.fake_controller import (
    FakeController,
    batch_order,
    make_batch,
    publish_order,
    stop_order,
    with_branches,
)
from support.fakes.tiny_models import make_model_folder
from support.ranks.rank_pool import Rank, RankPool, start_ranks
from support.rigs.loopbacks import own_loopback
from support.rigs.waiting import LIMIT_S

TIMEOUT_S = 300
BATCHES = [
    make_batch(step, num_groups=4, group_size=4, vocab_size=32, max_tokens=24)
    for step in range(3)
]


class Receiver:
    """Joins the communicator that the first publish announces, and receives every publish."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroupGloo | None = None
        self.received: list[dict[str, torch.Tensor]] = []
        self.digests: list[list[bytes]] = []
        self.identities: list[bytes] = []
        self._threads: list[threading.Thread] = []

    def start(self, publish: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        thread = threading.Thread(target=self._receive, args=(publish,))
        thread.start()
        self._threads.append(thread)
        return [weights_pb2.Receiver(server_id="server", first_rank=1, num_workers=1)]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _receive(self, publish: trainer_pb2.PublishStart) -> None:
        where = publish.communicator
        if self.group is None:
            store = dist.TCPStore(
                where.store_host,
                where.store_port,
                is_master=False,
                wait_for_workers=False,
            )
            self.group = dist.ProcessGroupGloo(
                dist.PrefixStore(where.communicator_id, store),
                1,
                where.world_size,
                timedelta(seconds=10),
            )
        tensors = {}
        digests = []
        by_name = {}
        for bucket in layout_from_pb(publish.layout):
            data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self.group.broadcast(data, 0).wait()
            of_tensors = bucket_tensor_digests(bucket, data.numpy().data)
            digests.append(bucket_digest(of_tensors))
            by_name |= zip(
                (s.tensor.name for s in bucket.spans), of_tensors, strict=True
            )
            for span in bucket.spans:
                raw = data[
                    span.offset_bytes : span.offset_bytes + span.tensor.num_bytes
                ]
                dtype = getattr(torch, span.tensor.dtype)
                tensors[span.tensor.name] = raw.view(dtype).reshape(span.tensor.shape)
        self.received.append(tensors)
        self.digests.append(digests)
        self.identities.append(weight_digest(by_name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def start_trainer(
    folder: Path,
    model: Path,
    address: str,
    *,
    pool: RankPool | None = None,
    world_size: int = 1,
    checkpoint: dict[str, object] | None = None,
    sampling: dict[str, object] | None = None,
    environ: Mapping[str, str] = {},
    weights: dict[str, object] | None = None,
    debug: dict[str, object] | None = None,
    **learner: object,
) -> list[Rank]:
    """The ranks of a trainer, forked from the pool or, without one, started as users do."""
    config = parse_config(
        {
            "run": {"name": "program", "steps": 3, "dir": str(folder)},
            "model": {"path": str(model), "dtype": "float32"},
            "algorithm": {
                "group_size": 4,
                "groups_per_step": 4,
                "max_staleness": 1,
                "learning_rate": 1e-3,
            },
            "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 24}
            | (sampling or {}),
            "controller": {"address": address, "stall_timeout_s": 1.0},
            "checkpoint": checkpoint or {},
            "learner": {"world_size": world_size, "timeout_s": 60.0, **learner},
            "weights": {
                "bucket_mib": 1,
                "join_deadline_s": 2.0,
                "bucket_deadline_s": 1.0,
            }
            | (weights or {}),
            "debug": debug or {},
        },
        source="test",
    )
    path = folder / "resolved.toml"
    path.write_text(dump_config(config))
    return start_ranks(path, world_size, environ, pool=pool)


def finish(processes: list[Rank], folder: Path) -> list[int]:
    """Exit statuses; a rank that does not end fails the test with its log."""
    try:
        return [process.wait(TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail((folder / "rank-0.log").read_text()[-3000:])
    finally:
        for process in processes:
            process.kill()


def trained(
    folder: Path,
    model: Path,
    orders: Iterable[list[trainer_pb2.Directive]],
    *,
    statuses: Sequence[int] = (0,),
    on_start_publish: Callable[..., list[weights_pb2.Receiver]] | None = None,
    on_stored: Callable[[trainer_pb2.StoredReport], None] | None = None,
    **settings: object,
) -> FakeController:
    """A controller whose `orders` a trainer has followed until it ended with these `statuses`."""
    hooks = {"on_start_publish": on_start_publish, "on_stored": on_stored}
    own_hooks = {name: hook for name, hook in hooks.items() if hook is not None}
    folder.mkdir(exist_ok=True)
    with FakeController(orders, **own_hooks) as controller:
        ranks = start_trainer(folder, model, controller.address, **settings)
        codes = finish(ranks, folder)
    assert codes == list(statuses), (folder / "rank-0.log").read_text()[-3000:]
    return controller


def test_an_outdated_trainer_loads_the_newest_checkpoint_and_goes_on_from_it(
    tmp_path: Path, model: Path, rank_pool: RankPool
) -> None:
    settings = {"checkpoint": {"every_steps": 1}, "world_size": 2, "pool": rank_pool}
    orders = [*map(batch_order, BATCHES), stop_order()]
    uninterrupted = trained(tmp_path, model, orders, statuses=(0, 0), **settings)
    folder = tmp_path / "program" / CHECKPOINTS
    shutil.rmtree(checkpoint_path(folder, 3))
    # The checkpoints of another trainer appear while this one, of version 0, waits.
    hidden = folder.rename(tmp_path / "hidden")

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        hidden.rename(folder)

    with FakeController([batch_order(BATCHES[2]), stop_order()]) as controller:
        controller.refusals.append(Reason.OUTDATED)
        controller.on_refused = write
        ranks = start_trainer(tmp_path, model, controller.address, **settings)
        assert finish(ranks, tmp_path) == [0, 0], (tmp_path / "rank-0.log").read_text()[
            -3000:
        ]
    (hello,) = controller.hellos
    assert (hello.version.step, hello.weight_digest) == (
        2,
        uninterrupted.steps[1].weight_digest,
    )
    (step,) = controller.steps
    assert step.weight_digest == uninterrupted.steps[2].weight_digest


def test_trainer_trains_publishes_and_stops_as_ordered(
    tmp_path: Path, model: Path
) -> None:
    receiver = Receiver()
    orders = [
        publish_order(0, new_communicator=True, verify=True),
        batch_order(BATCHES[0]),
        publish_order(1, new_communicator=False, verify=False),
        batch_order(BATCHES[1]),
        publish_order(2, new_communicator=False, verify=True),
        stop_order(),
    ]
    controller = trained(tmp_path, model, orders, on_start_publish=receiver.start)
    receiver.join()
    log = (tmp_path / "rank-0.log").read_text()
    assert controller.failures == []
    # Megatron neither says what it does without, nor decides how logs look.
    assert "/megatron/" not in log
    assert " rank 0 INFO slipstream.learner.trainer.train: registered for run " in log

    stored = load_file(model / "model.safetensors")
    final = load_file(
        tmp_path / "program" / "checkpoints" / "final" / "model.safetensors"
    )
    assert set(receiver.received[0]) == set(stored)
    assert all(torch.equal(receiver.received[0][name], stored[name]) for name in stored)
    assert all(torch.equal(receiver.received[2][name], final[name]) for name in final)
    assert not torch.equal(
        receiver.received[1]["lm_head.weight"], stored["lm_head.weight"]
    )

    assert [r.error for r in controller.results] == ["", "", ""]
    assert [list(r.bucket_digests) for r in controller.results] == receiver.digests
    assert len({s.communicator.store_port for s in controller.starts[:1]}) == 1
    hello = controller.hello
    goodbye = controller.goodbye
    assert hello.weight_digest == receiver.identities[0]
    assert hello.num_senders == 1
    assert hello.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert [s.weight_digest for s in controller.steps] == receiver.identities[1:]
    assert goodbye.weight_digest == controller.steps[1].weight_digest
    assert [(s.step, s.version.step, s.batch_id) for s in controller.steps] == [
        (0, 1, "batch-0"),
        (1, 2, "batch-1"),
    ]
    # Faults of the trajectories themselves are the controller's to tell.
    assert (
        not {"reward_mean", "lag_max", "num_tokens"}
        & controller.steps[1].metrics.keys()
    )

    check_probe(controller.results[0].probe, receiver.received[0], model, first=8)
    assert not controller.results[1].HasField("probe")
    check_probe(controller.results[2].probe, receiver.received[2], model, first=None)


def test_two_ranks_write_versions_to_storage_while_they_train(
    tmp_path, model, rank_pool
):
    root = tmp_path / "storage"
    reports = list[trainer_pb2.StoredReport]()
    found = list[bytes]()
    settings = {"storage_url": str(root)}
    server = StoredWeights(WeightsSection(storage_url=str(root)), tmp_path / "server")
    signals = [threading.Event(), threading.Event()]

    def fetch(report: trainer_pb2.StoredReport) -> None:
        # In a real run the controller answers at once, and a server fetches later.
        reports.append(report)
        if not report.error:
            fetched = server.fetch(report.stored, threading.Event())
            data = memoryview(fetched.path.read_bytes())
            by_name = {}
            for bucket in layout_from_pb(fetched.layout):
                part = data[: bucket.num_bytes]
                data = data[bucket.num_bytes :]
                names = (span.tensor.name for span in bucket.spans)
                by_name |= zip(names, bucket_tensor_digests(bucket, part), strict=True)
            found.append(weight_digest(by_name))
        signals[len(reports) - 1].set()

    def orders() -> Iterator[list[trainer_pb2.Directive]]:
        for step in range(2):
            order = trainer_pb2.StoreOrder(
                version=trajectory_pb2.PolicyVersion(step=step), folder=f"run/v{step}"
            )
            yield [trainer_pb2.Directive(store=order)]
            yield batch_order(BATCHES[step])
            # A controller orders no version before it knows the end of the last one.
            signals[step].wait(TIMEOUT_S)
        yield stop_order()

    stages = {
        "world_size": 2,
        "parallel": {"pp": 2},
        "statuses": (0, 0),
        "pool": rank_pool,
    }
    controller = trained(
        tmp_path, model, orders(), on_stored=fetch, weights=settings, **stages
    )
    assert [report.error for report in reports] == ["", ""]
    # Both stages sent their tensors, and what was fetched is what the step had made.
    assert controller.hello.num_senders == 2
    assert found == [controller.hello.weight_digest, controller.steps[0].weight_digest]
    assert reports[0].HasField("probe")
    assert reports[1].num_bytes <= reports[1].whole_bytes
    assert [p for p in root.rglob("*") if p.is_file()] == []


def test_a_trainer_of_a_failed_run_leaves_a_checkpoint_and_no_model(
    tmp_path, model, rank_pool
):
    orders = [
        batch_order(BATCHES[0]),
        stop_order("the disk is full", without_model=True),
    ]
    controller = trained(
        tmp_path, model, orders, pool=rank_pool, checkpoint={"every_steps": 50}
    )
    assert [report.version.step for report in controller.checkpoints] == [1]
    assert controller.goodbye.export_path == ""
    assert [p.name for p in (tmp_path / "program" / "checkpoints").iterdir()] == [
        "step-000001"
    ]


def test_a_replay_of_trees_gives_the_same_weights_bit_for_bit(
    tmp_path, model, rank_pool
):
    trees = [
        with_branches(leased(batch), vocab_size=32, max_tokens=24) for batch in BATCHES
    ]
    assert all(len(batch.owners) > len(batch.trajectories) for batch in trees)
    orders = [*map(batch_order, trees), stop_order()]
    sampling = {"max_total_tokens": 96}
    steps = trained(tmp_path, model, orders, pool=rank_pool, sampling=sampling).steps
    assert [s.metrics["trained_tokens"] for s in steps] == [
        sum(t.num_sampled_tokens for t in batch.trajectories) for batch in trees
    ]
    record_run(tmp_path / "journal", trees, [s.weight_digest.hex() for s in steps])
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    host = own_loopback()
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port(host))}

    def replayed(*overrides: str) -> tuple[int, list[list[str]]]:
        replay = rank_pool.start(
            "slipstream.learner.trainer.replay",
            "--config",
            str(tmp_path / "resolved.toml"),
            *overrides,
            environ={**os.environ, **environment, **place, "OMP_NUM_THREADS": "1"},
            log=tmp_path / "replay.log",
        )
        status = replay.wait(TIMEOUT_S)
        message = (tmp_path / "replay.log").read_text()
        return status, [
            line.split() for line in message.splitlines() if line.startswith("version ")
        ]

    expected = [
        ["version", str(s.step + 1), s.weight_digest.hex(), "as", "recorded"]
        for s in steps
    ]
    assert replayed() == (0, expected)
    # A run whose settings changed at a resume says what may differ.
    status, messages = replayed("algorithm.learning_rate=0.5")
    assert (status, len(messages)) == (1, len(expected) + 1)
    assert "settings:" in messages[-1]


def leased(batch: Batch) -> Batch:
    """The batch with the names that leases give to groups."""
    numbers = {
        name: i + 4 * batch.step
        for i, name in enumerate(dict.fromkeys(batch.group_ids))
    }
    trajectories = tuple(
        dataclasses.replace(t, group_id=GroupId(f"g{numbers[t.group_id]:06d}"))
        for t in batch.trajectories
    )
    return dataclasses.replace(batch, trajectories=trajectories)


def record_run(folder: Path, batches: list[Batch], digests: list[str]) -> None:
    """The journal of a run that trained these batches and made weights of these digests."""
    folder.mkdir()
    with Journal(folder) as journal:
        journal.append(kinds.Start(format=1, run_id="r", key="ab" * 32, unix_s=1.0))
        for batch, digest in zip(batches, digests, strict=True):
            for number, group in enumerate(dict.fromkeys(batch.group_ids)):
                lease = {
                    "environment": "e",
                    "number": 4 * batch.step + number,
                    "task": 0,
                    "seed": 0,
                }
                server = {"server": "s", "epoch": 1, "deadline": batch.step}
                journal.append(kinds.GroupLease(group=group, **lease, **server))
            message = trainer_pb2.RecordedBatch(
                header=batch_order(batch)[0].batch,
                trajectories=map(trajectory_to_pb, batch.trajectories),
            )
            journal.append(journal.write_batch(message))
            version = [0, batch.step + 1]
            journal.append(
                kinds.Step(
                    step=batch.step, version=version, digest=digest, lags=[], several=0
                )
            )


def check_probe(
    probe: weights_pb2.Probe,
    weights: dict[str, torch.Tensor],
    model: Path,
    *,
    first: int | None,
) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain.load_state_dict(weights)
    assert len(probe.lengths) == 8
    assert max(probe.lengths) < 24
    if first is None:
        expected = BATCHES[1].trajectories[0].token_ids[:23]
        assert (
            unpack_tokens(probe.token_ids)[: len(expected)].tolist()
            == expected.tolist()
        )
    else:
        assert probe.lengths[0] == first
    token_ids = torch.from_numpy(unpack_tokens(probe.token_ids).astype(np.int64))
    found = []
    with torch.no_grad():
        for ids in token_ids.split(list(probe.lengths)):
            logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(logprobs.gather(1, ids[1:, None])[:, 0])
    expected = torch.from_numpy(unpack_logprobs(probe.expected_logprobs).copy())
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)


def test_same_batches_give_the_same_bits_whether_they_are_profiled_or_not(
    tmp_path: Path, model: Path, rank_pool: RankPool
) -> None:
    digests = []
    metrics = {}
    for name, debug in (("plain", {}), ("profiled", {"profile": {"start_step": 2}})):
        orders = [batch_order(BATCHES[0]), batch_order(BATCHES[1]), stop_order()]
        settings = {"pool": rank_pool, "debug": debug, "export_final": False}
        controller = trained(tmp_path / name, model, orders, **settings)
        digests.append([report.weight_digest for report in controller.steps])
        metrics[name] = dict(controller.steps[1].metrics)
    assert digests[0] == digests[1]
    assert not (tmp_path / "plain" / "program" / "profile").exists()
    (trace,) = (tmp_path / "profiled" / "program" / "profile").iterdir()
    assert trace.name == "rank-0-steps-2-2.json"
    assert str(trace) in (tmp_path / "profiled" / "rank-0.log").read_text()
    check_cost(model, metrics["plain"], metrics["profiled"])


def check_cost(
    model: Path, plain: dict[str, float], profiled: dict[str, float]
) -> None:
    config = json.loads((model / "config.json").read_text())
    # Two layers of hidden size 64: queries and outputs 64 x 64, keys and values 64 x 32 each, three
    # matrices of 64 x MLP, and the vocabulary.
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * config["intermediate_size"])
    matrices += 64 * config["vocab_size"]
    lengths = [len(t.token_ids) for t in BATCHES[1].trajectories]
    flops = 6 * matrices * sum(lengths) + 6 * 2 * 64 * sum(
        length**2 for length in lengths
    )
    assert plain["model_flops"] == profiled["model_flops"] == flops
    # On a CPU there is no peak to compare with.
    assert plain.keys().isdisjoint({"mfu", "gpu_allocated_bytes"})
    assert plain["trainer_rss_bytes"] > 100e6
    for stage in ("waiting_s", "export_s", "forward_backward_s", "optimizer_s"):
        assert plain[stage] > 0
    assert plain["forward_s"] == plain["publish_s"] == 0


def until_idle(controller: FakeController, times: int) -> None:
    """Waits until the trainer has asked so often again without an order."""
    for _ in range(times):
        controller.asked.clear()
        assert controller.asked.wait(TIMEOUT_S)


def test_a_trainer_that_waits_gives_no_sign_of_life_and_ends_in_order_at_sigterm(
    tmp_path: Path, model: Path, rank_pool: RankPool
) -> None:
    with FakeController([batch_order(BATCHES[0])]) as controller:
        # Twice the time in which it tells of its last work.
        controller.idle_s = 0.5
        processes = start_trainer(
            tmp_path, model, controller.address, pool=rank_pool, world_size=2
        )
        until_idle(controller, 4)
        assert controller.num_signs > 0
        stored = load_file(model / "model.safetensors")
        assert controller.loaded_bytes == sum(
            tensor.nbytes for tensor in stored.values()
        )
        before = controller.num_signs
        until_idle(controller, 3)
        assert controller.num_signs == before
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert finish(processes, tmp_path) == [0, 0]
    assert controller.goodbye.weight_digest == controller.steps[0].weight_digest
    assert controller.goodbye.export_path == ""
    assert controller.failures == []


def test_a_killed_trainer_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path, model, rank_pool
):
    orders = [*map(batch_order, BATCHES), stop_order()]
    settings = {"checkpoint": {"every_steps": 2}, "pool": rank_pool}
    controller = trained(tmp_path / "whole", model, orders, **settings)
    expected = [report.weight_digest for report in controller.steps]
    # A checkpoint is due after two steps, and the run's end writes another.
    assert [report.version.step for report in controller.checkpoints] == [2, 3]
    assert [report.weight_digest for report in controller.checkpoints] == expected[1:]

    killed = tmp_path / "killed"
    killed.mkdir()
    settings |= {"export_final": False}
    with FakeController([*map(batch_order, BATCHES)]) as controller:
        processes = start_trainer(killed, model, controller.address, **settings)
        assert controller.saved.wait(TIMEOUT_S)
        assert controller.asked.wait(TIMEOUT_S)
        processes[0].kill()
        assert finish(processes, killed) == [-signal.SIGKILL]
    assert [report.weight_digest for report in controller.steps] == expected
    (killed / "program" / "checkpoints" / "step-000009.partial").mkdir()
    controller = trained(
        killed, model, [batch_order(BATCHES[2]), stop_order()], **settings
    )
    hello = controller.hello
    goodbye = controller.goodbye
    assert (hello.version.step, hello.weight_digest) == (2, expected[1])
    assert [report.weight_digest for report in controller.steps] == expected[2:]
    assert goodbye.weight_digest == expected[-1]
    assert (
        killed / "program" / "checkpoints" / "step-000003" / "manifest.json"
    ).is_file()
    assert not list((killed / "program" / "checkpoints").glob("*.partial"))


def test_death_of_a_rank_stops_the_others_with_the_cause(tmp_path, model, rank_pool):
    with FakeController([]) as controller:
        processes = start_trainer(
            tmp_path, model, controller.address, pool=rank_pool, world_size=2
        )
        assert controller.asked.wait(TIMEOUT_S)
        processes[1].kill()
        assert finish(processes, tmp_path) == [1, -signal.SIGKILL]
    assert [(failure.rank, failure.final) for failure in controller.failures] == [
        (0, False)
    ]
    assert controller.failures[0].message
    assert controller.goodbye is None


def test_a_trainer_that_cannot_load_its_model_says_so_at_once(
    tmp_path, model, rank_pool
):
    """The same file would fail the same way: another start is of no use."""
    damaged = shutil.copytree(model, tmp_path / "damaged")
    sizes = json.loads((damaged / "config.json").read_text())
    dtype = {"dtype": "none that is known", "torch_dtype": "none that is known"}
    (damaged / "config.json").write_text(json.dumps(sizes | dtype))
    (failure,) = trained(tmp_path, damaged, [], pool=rank_pool, statuses=(3,)).failures
    assert failure.final
    assert failure.message.startswith(
        f"ValueError: {damaged}/config.json cannot be used: "
    )
    assert "none that is known" in failure.message
    # Bridge would try the file again after 1, 2 and 4 s, as if it came from a network.
    assert "attempts" not in failure.message


def test_token_that_is_too_old_stops_the_trainer(
    tmp_path: Path, model: Path, rank_pool: RankPool
):
    orders = [
        batch_order(BATCHES[0]),
        batch_order(BATCHES[1]),
        batch_order(with_old_token()),
    ]
    controller = trained(tmp_path, model, orders, pool=rank_pool, statuses=(3,))
    assert len(controller.steps) == 2
    assert "StalenessError: step 3" in controller.failures[0].message
    assert controller.failures[0].final
    assert "a lag of 2" in controller.failures[0].message


def with_old_token():
    first, *rest = BATCHES[2].trajectories
    number = first.num_sampled_tokens
    spans = (
        VersionSpan(1, PolicyVersion(0, 0)),
        VersionSpan(number - 1, PolicyVersion(0, 2)),
    )
    old = dataclasses.replace(first, version_spans=spans)
    return dataclasses.replace(BATCHES[2], trajectories=(old, *rest))

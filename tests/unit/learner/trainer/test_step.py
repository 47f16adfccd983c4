"""A step and a client's passes on one rank in this process: what becomes of weights and moments."""

import functools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from slipstream.core.errors import RunFailed
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.opening import load_start, open_policy
from slipstream.learner.trainer.passes import Passes
from slipstream.learner.trainer.ranks.parallel import Launch
from slipstream.learner.trainer.step import TrainingStep
from slipstream.learner.trainer.tiny_model import make_model
from slipstream.v1 import trainer_pb2 as pb
from support.fakes.fake_controller import make_batch
from support.ranks.rank_program import score, settings_of, weights_of

# To import Megatron starts git, and Megatron and Bridge warn of their own calls.
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ADAM = pb.AdamNumbers(
    learning_rate=0.01,
    beta1=0.9,
    beta2=0.95,
    eps=1e-3,
)
TARGETS = (5, 7, 6)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    algorithm = {
        "loss": "reinforce",
        "weight": "none",
        "weight_args": {},
        "warmup_steps": 0,
    }
    return settings_of(folder, {"algorithm": algorithm})


@pytest.fixture(scope="module")
def opened_policy(config: Config) -> Iterator[Policy]:
    host = "127.0.0.1"
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = str(free_port(host))
    policy = open_policy(config, Launch(rank=0, world_size=1, local_rank=0))
    yield policy
    policy.ranks.close()


@pytest.fixture
def policy(opened_policy: Policy, config: Config) -> Policy:
    """The policy as a run begins with it."""
    load_start(opened_policy, config)
    opened_policy.optimizer.reload_model_params()
    opened_policy.forget_moments()
    return opened_policy


def batch_of(step: int) -> Batch:
    return make_batch(
        step,
        num_groups=2,
        group_size=4,
        vocab_size=12,
        max_tokens=16,
    )


def worth(policy: Policy, batch: Batch, advantages: dict[str, float]) -> float:
    """The sampled tokens' log-probabilities, each times the advantage of its episode."""
    total = 0.0
    for trajectory in batch.trajectories:
        token_ids = trajectory.token_ids.astype(np.int64)
        logprobs = score(policy, [token_ids])
        mask = torch.from_numpy(trajectory.sampled_mask())
        # Nothing predicts the first token.
        is_predicted = mask[len(mask) - len(logprobs) :]
        sampled_logprobs = logprobs[is_predicted]
        advantage = advantages[trajectory.trajectory_id]
        total += advantage * float(sampled_logprobs.sum())
    return total


def is_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys()
    )


def test_a_step_makes_likelier_what_earned_more_than_its_group(policy, config) -> None:
    batch = batch_of(0)
    step = TrainingStep(policy, config)
    advantages = step.run(batch).advantages
    load_start(policy, config)
    before = worth(policy, batch, advantages)
    policy.optimizer.reload_model_params()
    policy.forget_moments()
    step.run(batch)
    assert worth(policy, batch, advantages) > before
    assert step.num_updates == 1


def test_weights_that_are_not_finite_are_told_as_such_and_not_as_a_fault_of_the_batch(
    policy, config
) -> None:
    batch = batch_of(0)
    # Only sequences with this token see the weight: others stay finite.
    token = int(batch.trajectories[0].token_ids[0])
    with torch.no_grad():
        embeddings = policy.chunks[0].module.embedding.word_embeddings.weight
        embeddings[token] = torch.nan
    with pytest.raises(RunFailed, match="weights of the policy are not finite"):
        TrainingStep(policy, config).run(batch)


def cross_entropy(name: str) -> pb.Pass:
    tokens = (3, *TARGETS[:-1])
    sequence = pb.PassSequence(
        token_ids=np.array(tokens, "<u4").tobytes(),
        targets=np.array(TARGETS, "<u4").tobytes(),
        advantages=np.ones(len(TARGETS), "<f4").tobytes(),
    )
    return pb.Pass(
        id=name,
        backward=True,
        loss="reinforce",
        sequences=[sequence],
    )


def passes_of(policy: Policy, config: Config) -> Passes:
    def load(step: int, models: Sequence[object]) -> None:
        raise AssertionError(f"nobody loads version {step}")

    return Passes(policy, load, functools.partial(load_start, policy, config))


def batch_of_step(number: int, step: pb.GivenStep, *passes: pb.Pass) -> Batch:
    return Batch(
        step=number,
        batch_id="b",
        trajectories=(),
        given=step,
        passes=passes,
    )


def test_a_clients_step_makes_its_targets_likelier_by_the_loss_that_it_was_told(
    policy, config
):
    passes = passes_of(policy, config)
    losses = []
    for number in range(2):
        order = cross_entropy(f"pass-{number}")
        report = passes.compute(order)
        assert not report.error
        (logprobs,) = (np.frombuffer(data, "<f4") for data in report.logprobs)
        loss = report.metrics["loss:sum"]
        assert loss == pytest.approx(-float(logprobs.sum()), rel=1e-5)
        losses.append(loss)
        passes.run(batch_of_step(number, pb.GivenStep(adam=ADAM), order))
    assert losses[1] < losses[0]


def test_a_clients_model_that_begins_again_is_trained_as_the_first_time(
    policy, config
) -> None:
    passes = passes_of(policy, config)
    trained = []
    for number in range(2):
        begin = pb.GivenStep(begin=pb.NewAdapter())
        passes.run(batch_of_step(2 * number, begin))
        order = cross_entropy(f"pass-{number}")
        assert not passes.compute(order).error
        step = pb.GivenStep(adam=ADAM)
        passes.run(batch_of_step(2 * number + 1, step, order))
        trained.append(weights_of(policy))
    assert is_same(trained[0], trained[1])

"""The real trainer is given batches that it cannot train, on one rank and on two."""

import dataclasses
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import ImagePlace, Trajectory
from slipstream.learner.trainer.batches.batch import Batch
from support.fakes.fake_controller import (
    FakeController,
    batch_order,
    make_batch,
    stop_order,
    with_branches,
)
from support.fakes.parity_models import random_model
from support.fakes.tiny_models import make_model_folder, make_tokenizer
from support.ranks.rank_pool import RankPool

from deploy.environments.colours import COLOURS, square_png

VOCABULARY = 32
MAX_TOKENS = 24
MICRO_BATCH_TOKENS = 64
GROUPS = 4
MEMBERS = 4
# A trajectory of the third group of a batch.
FAULTY = 9


@dataclass(frozen=True)
class Job:
    """Settings of a trainer, and what spoils the batches between the two that can be trained."""

    world_size: int = 1
    learner: dict[str, object] = dataclasses.field(default_factory=dict)
    poisons: tuple[str, ...] = ()
    mini_batches: int = 1
    # Whether the weights are no numbers before the second batch.
    breaks_weights: bool = False
    # Whether gradients of one parameter are no numbers in the batch `bad-gradient`.
    breaks_gradient: bool = False
    sets_aside: bool = True
    # Whether episodes have several branches.
    trees: bool = False
    # The model's folder, and tables of the configuration besides.
    model: str = "model"
    tables: dict[str, dict[str, object]] = dataclasses.field(default_factory=dict)


def far_reward(trajectory: Trajectory) -> Trajectory:
    """Returns a trajectory whose advantage is no float32."""
    return dataclasses.replace(trajectory, reward=-1e39)


def impossible_sample(trajectory: Trajectory) -> Trajectory:
    """Makes an advantage that is finite, but not its product with the ratio of the policies."""
    logprobs = np.full_like(trajectory.behavior_logprobs, -30.0)
    return dataclasses.replace(trajectory, behavior_logprobs=logprobs, reward=-1e36)


def strange_token(trajectory: Trajectory) -> Trajectory:
    token_ids = trajectory.token_ids.copy()
    token_ids[-1] = VOCABULARY
    return dataclasses.replace(trajectory, token_ids=token_ids)


def cut_image(trajectory: Trajectory) -> Trajectory:
    """Shows an image whose header is good and whose pixels are cut."""
    png = square_png(COLOURS["red"], 0, 0)
    return dataclasses.replace(
        trajectory, images=(png[: len(png) // 2],), image_places=(ImagePlace(0, 0),)
    )


def too_long(trajectory: Trajectory) -> Trajectory:
    (prompt, *rest), missing = trajectory.run_lengths, 4 * MICRO_BATCH_TOKENS
    token_ids = np.concatenate([np.zeros(missing, np.uint32), trajectory.token_ids])
    return dataclasses.replace(
        trajectory, token_ids=token_ids, run_lengths=(prompt + missing, *rest)
    )


POISONS: dict[str, Callable[[Trajectory], Trajectory]] = {
    "rewards": far_reward,
    "loss": impossible_sample,
    "token": strange_token,
    "length": too_long,
    "pixels": cut_image,
}
JOBS = {
    "plain": Job(),
    "poisoned": Job(poisons=tuple(POISONS)),
    "empty": Job(poisons=("empty",)),
    "second-mini-batch": Job(poisons=("loss",), mini_batches=2),
    "broken-weights": Job(breaks_weights=True),
    "gradient": Job(poisons=("gradient",), breaks_gradient=True),
    "for-good": Job(poisons=("loss",), sets_aside=False),
}
for layout, learner in {
    "dp": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "tp": {"parallel": {"tp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "cp": {"parallel": {"cp": 2}},
}.items():
    JOBS |= {
        f"{layout}-plain": Job(2, learner),
        f"{layout}-poisoned": Job(2, learner, tuple(POISONS)),
    }
# State that steps change: biases that move, a critic, a layer that drafts, the scale of float16.
KINDS: dict[str, dict[str, Any]] = {
    "biases": {
        "model": "mixture",
        "learner": {
            "transformer": {
                "moe_router_bias_update_rate": 0.001,
                "moe_aux_loss_coeff": 0.01,
            }
        },
    },
    "rounded": {
        "model": "mixture",
        "learner": {"transformer": {"moe_router_bias_update_rate": 0.001}},
        "tables": {"model": {"dtype": "bfloat16"}},
    },
    "critic": {
        "tables": {"critic": {"learning_rate": 1e-3}, "algorithm": {"advantage": "gae"}}
    },
    "drafts": {"tables": {"drafts": {"tokens": 2, "learning_rate": 0.01}}},
    "float16": {"tables": {"model": {"dtype": "float16"}}},
}
# If the critic alone finds a fault, the policy has been trained.
BAD = {kind: (*POISONS, "gradient") for kind in KINDS} | {
    "critic": ("token", "pixels", "gradient")
}
for kind, told in KINDS.items():
    JOBS |= {
        f"{kind}-plain": Job(**told),
        f"{kind}-poisoned": Job(**told, poisons=BAD[kind], breaks_gradient=True),
    }
for layout in ({"dp": 1}, {"tp": 2}, {"cp": 2}):
    (name,) = layout
    parallel = {} if name == "dp" else {"parallel": layout}
    JOBS[f"biases-{name}"] = Job(
        2, KINDS["biases"]["learner"] | parallel, model="mixture"
    )
CP = {"parallel": {"cp": 2}}
JOBS |= {
    "trees-plain": Job(2, CP, trees=True),
    "trees-poisoned": Job(2, CP, tuple(POISONS), trees=True),
}


def good_batch(step: int, *, trees: bool = False) -> Batch:
    sizes = {"vocab_size": VOCABULARY, "max_tokens": MAX_TOKENS}
    batch = make_batch(step, num_groups=GROUPS, group_size=MEMBERS, **sizes)
    return with_branches(batch, **sizes) if trees else batch


def poisoned_batch(step: int, name: str, *, trees: bool = False) -> Batch:
    """A batch of which one trajectory, or with "empty" all, or with "gradient" none, is spoiled."""
    batch = good_batch(step, trees=trees)
    trajectories = list(batch.trajectories)
    if name == "empty":
        trajectories = [nothing(trajectory) for trajectory in trajectories]
    elif name != "gradient":
        trajectories[FAULTY] = POISONS[name](trajectories[FAULTY])
    return dataclasses.replace(
        batch, batch_id=f"bad-{name}", trajectories=tuple(trajectories)
    )


def nothing(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        token_ids=trajectory.token_ids[:0],
        run_lengths=(),
        behavior_logprobs=trajectory.behavior_logprobs[:0],
        version_spans=(),
        num_turns=0,
    )


def config_of(folder: Path, name: str, address: str) -> Config:
    job = JOBS[name]
    tables: dict[str, Any] = {
        "run": {"name": name, "steps": 2, "dir": str(folder / "runs")},
        "model": {"path": str(folder / job.model), "dtype": "float32"},
        "algorithm": {
            "group_size": MEMBERS,
            "groups_per_step": GROUPS,
            "max_staleness": 1,
            "learning_rate": 1e-3,
            "mini_batches": job.mini_batches,
            "loss_args": {"ratio": "behavior"},
            "advantage": "dr_grpo",
            "weight": "none",
        },
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": MAX_TOKENS},
        "controller": {"address": address},
        "learner": {
            "world_size": job.world_size,
            "timeout_s": 60.0,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "export_final": False,
            **job.learner,
        },
    }
    for table, values in job.tables.items():
        tables[table] = tables.get(table, {}) | values
    return parse_config(tables, source="test")


def run_rank(folder: Path, name: str) -> None:
    """A rank's part of a job; what rank 0 told its controller is kept."""
    from slipstream.learner.trainer.controller_client import ControllerClient
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.train import StartAgain, Trainer

    job = JOBS[name]
    launch = Launch.from_environment()
    bad = [poisoned_batch(1, poison, trees=job.trees) for poison in job.poisons]
    batches = [good_batch(0, trees=job.trees), *bad, good_batch(1, trees=job.trees)]
    orders = [*map(batch_order, batches), stop_order()]
    with FakeController(orders) as controller:
        controller.sets_aside = job.sets_aside
        config = config_of(folder, name, controller.address)
        policy = open_policy(config, launch)
        trainer = Trainer(config, policy, ControllerClient(config))
        if job.breaks_weights:
            break_weights(trainer)
        if job.breaks_gradient:
            break_gradient(trainer)
        error = ""
        try:
            trainer.run()
        except (RunFailed, StartAgain) as raised:
            error = f"{type(raised).__name__}: {raised}"
    facts = {
        "error": error,
        "state": state_of(trainer),
        "biases": [
            value.tolist()
            for name, value in policy.chunks[0].named_buffers()
            if name.endswith("expert_bias")
        ],
        "digests": [report.weight_digest.hex() for report in controller.steps],
        "steps": [report.batch_id for report in controller.steps],
        "failures": [
            (f.message, f.data.step, f.data.batch_id, list(f.data.group_ids))
            for f in controller.failures
        ],
    }
    torch.save(facts, folder / f"{name}-{launch.rank}.pt")
    policy.ranks.close()


def state_of(trainer: object) -> dict[str, int]:
    """Returns a checksum of each tensor that a step may change, and of all random numbers' state.

    Gradients, and counts of experts' tokens, are left out: each pass begins them anew.
    """
    from slipstream.learner.trainer.model.policy import optimizer_state

    policy = trainer._policy
    found = {}
    models = {"policy": policy}
    for part in trainer._parts:
        models |= part.models()
    for name, model in models.items():
        for chunk in model.chunks:
            tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
            found |= {f"{name}.{key}": value for key, value in tensors}
        if (optimizer := getattr(model, "optimizer", None)) is not None:
            state = optimizer_state(optimizer, model.chunks)
            found |= {
                f"{name}.optimizer.{place}": value for place, value in enumerate(state)
            }
            groups = [
                {k: v for k, v in g.items() if k != "params"}
                for g in optimizer.param_groups
            ]
            found[f"{name}.groups"] = repr(groups)
            found[f"{name}.scale"] = repr(model.scaler and model.scaler.state_dict())
    if policy.drafts is not None:
        found |= dict(policy.drafts.state_dict(prefix="drafts."))
    found |= {"torch": torch.get_rng_state(), "numpy": repr(np.random.get_state())}
    found["python"] = repr(random.getstate())
    return {
        name: zlib.crc32(
            value.encode()
            if isinstance(value, str)
            else value.detach()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
        for name, value in found.items()
        if not name.endswith("local_tokens_per_expert")
    }


def make_sigmoid_mixture(folder: Path) -> None:
    """A mixture of experts with biases, which choose them and do not weigh them."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}
    kinds = {"scoring_func": "sigmoid", "use_routing_bias": True, "dtype": "float32"}
    torch.manual_seed(0)
    model = random_model(
        "MiniMaxM2", sizes | heads | experts | kinds | {"pad_token_id": None}
    )
    make_tokenizer(folder)
    model.save_pretrained(folder)


def break_gradient(trainer: object) -> None:
    """Makes the last norm's gradient no number in the batch `bad-gradient`."""
    step = trainer._step
    real = step.run
    batch_ids = []

    def run(batch: Batch) -> object:
        batch_ids.append(batch.batch_id)
        return real(batch)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if batch_ids[-1] == "bad-gradient" else gradient

    step.run = run
    parameters = dict(step.policy.chunks[0].named_parameters())
    (norm,) = (
        p for name, p in parameters.items() if name.endswith("final_layernorm.weight")
    )
    norm.register_hook(spoil)


def break_weights(trainer: object) -> None:
    """Spoils a weight of every rank when the first step is done."""
    step = trainer._step
    real = step.run

    def run(batch: Batch) -> object:
        if batch.step:
            with torch.no_grad():
                next(iter(step.policy.chunks[0].parameters())).view(-1)[0] = float(
                    "nan"
                )
        return real(batch)

    step.run = run


pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = good_batch(1).trajectories[FAULTY].group_id
ID = good_batch(1).trajectories[FAULTY].trajectory_id
CAUSES = {
    "rewards": f"advantages are not finite, of rewards from -1e+39 to -1e+39 ({ID})",
    "loss": f"the loss is inf; the weights were not changed ({ID})",
    "token": f"token 32 is outside the vocabulary of 32 ({ID})",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned")
    make_model_folder(folder / "model")
    make_sigmoid_mixture(folder / "mixture")
    return folder


def told_by(pool: RankPool, folder: Path, world_size: int) -> dict[str, list[dict]]:
    """What the ranks of each job told, by rank."""
    sizes = {
        name: world_size for name, job in JOBS.items() if job.world_size == world_size
    }
    return pool.found(__file__, sizes, folder, "{}-{}.pt")


@pytest.fixture(scope="module")
def one_rank(rank_pool: RankPool, folder: Path) -> dict[str, list[dict]]:
    return told_by(rank_pool, folder, 1)


@pytest.fixture(scope="module")
def two_ranks(rank_pool: RankPool, folder: Path) -> dict[str, list[dict]]:
    return told_by(rank_pool, folder, 2)


def check_poisoned(poisoned: dict, plain: dict) -> None:
    """Each bad batch is reported with its group; the steps have the bits of a run without them."""
    assert poisoned["error"] == plain["error"] == ""
    assert poisoned["steps"] == plain["steps"] == ["batch-0", "batch-1"]
    assert poisoned["digests"] == plain["digests"]
    assert plain["failures"] == []
    assert [batch for _, _, batch, _ in poisoned["failures"]] == [
        f"bad-{n}" for n in POISONS
    ]
    assert all(
        (step, groups) == (1, [GROUP]) for _, step, _, groups in poisoned["failures"]
    )
    causes = dict(
        zip(POISONS, (message for message, *_ in poisoned["failures"]), strict=True)
    )
    assert causes.pop("length").startswith("a sequence of ")
    assert causes.pop("pixels").startswith(f"{ID}: an image cannot be read: ")
    assert causes == CAUSES


def test_a_rank_goes_on_with_the_same_weights_after_each_kind_of_bad_batch(one_rank):
    check_poisoned(one_rank["poisoned"][0], one_rank["plain"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_bad_batch(
    kind: str, one_rank: dict[str, list[dict]]
) -> None:
    poisoned = one_rank[f"{kind}-poisoned"][0]
    plain = one_rank[f"{kind}-plain"][0]
    assert poisoned["error"] == plain["error"] == ""
    assert len(poisoned["failures"]) == len(BAD[kind])
    changed = [
        name
        for name, value in plain["state"].items()
        if poisoned["state"][name] != value
    ]
    assert not changed
    assert poisoned["digests"] == plain["digests"]


@pytest.mark.parametrize("kind", ["biases", "rounded"])
def test_biases_move_once_with_each_step(
    kind: str, one_rank: dict[str, list[dict]]
) -> None:
    biases = np.float32(one_rank[f"{kind}-plain"][0]["biases"])
    steps = np.float32([-0.002, -0.001, 0.0, 0.001, 0.002])
    assert np.isin(biases, steps).all()
    assert biases.any()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp", "tp", "cp"])
def test_biases_move_alike_on_ranks_that_share_a_batch(
    layout: str, one_rank: dict[str, list[dict]], two_ranks: dict[str, list[dict]]
) -> None:
    biases = [rank_facts["biases"] for rank_facts in two_ranks[f"biases-{layout}"]]
    assert biases == [one_rank["biases-plain"][0]["biases"]] * 2


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp", "tp", "pp", "cp", "trees"])
def test_two_ranks_agree_and_go_on(
    layout: str, two_ranks: dict[str, list[dict]]
) -> None:
    main, other = two_ranks[f"{layout}-poisoned"]
    check_poisoned(main, two_ranks[f"{layout}-plain"][0])
    assert (other["error"], other["failures"]) == ("", [])


def test_the_faulty_episode_is_a_tree() -> None:
    assert len(good_batch(1, trees=True).trajectories[FAULTY].branches) > 1


def test_a_batch_without_a_sampled_token_is_reported(
    one_rank: dict[str, list[dict]],
) -> None:
    facts = one_rank["empty"][0]
    assert facts["error"] == ""
    (failure,) = facts["failures"]
    assert failure[0].startswith("no trajectory has a sampled token")
    assert len(failure[3]) == len(set(good_batch(1).group_ids))
    assert facts["digests"] == one_rank["plain"][0]["digests"]


def test_parameters_without_a_finite_gradient_are_named(
    one_rank: dict[str, list[dict]],
) -> None:
    facts = one_rank["gradient"][0]
    plain = one_rank["plain"][0]
    (failure,) = facts["failures"]
    assert failure[0].startswith("the gradient norm is nan, not finite in 1 of ")
    assert (
        " parameters, first in decoder.final_layernorm.weight; the weights were"
        in failure[0]
    )
    # Nothing of it is left.
    assert facts["digests"] == plain["digests"]


def test_a_step_that_changed_weights_before_it_failed_starts_again(
    one_rank: dict[str, list[dict]],
):
    facts = one_rank["second-mini-batch"][0]
    (failure,) = facts["failures"]
    assert failure[3] == [GROUP]
    assert facts["error"].startswith(
        "StartAgain: step 2 changed weights before it failed"
    )
    assert facts["steps"] == ["batch-0"]


def test_weights_that_are_no_numbers_are_not_the_batchs_fault(
    one_rank: dict[str, list[dict]],
):
    facts = one_rank["broken-weights"][0]
    assert facts["failures"] == []
    assert facts["error"].startswith("RunFailed: ")
    assert "weights" in facts["error"]


def test_without_another_batch_the_trainer_fails_with_the_cause(
    one_rank: dict[str, list[dict]],
):
    facts = one_rank["for-good"][0]
    assert facts["error"] == f"UntrainableBatch: {CAUSES['loss']}"
    assert facts["steps"] == ["batch-0"]

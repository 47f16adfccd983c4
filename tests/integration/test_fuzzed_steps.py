"""A step does what docs/algorithms.md says, whatever is combined with what, in every layout.

FUZZ=100 python -m pytest tests/integration/test_fuzzed_steps.py     # another thousand steps
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.config import Config
from slipstream.core.types import (
    Branch,
    PolicyVersion,
    ReferenceLogprobs,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.trainer.batches.batch import Batch
from support.fakes.fake_controller import make_trajectory
from support.fakes.parity_models import VOCAB
from support.ranks.parity_layouts import random_sets
from support.ranks.rank_program import kept, opened, weights_of
from support.references.plain_policy import PlainStep
from support.rigs.fuzz_budget import times

Table = dict[str, JsonValue]

# A mini-batch is one micro batch of this many tokens.
ALL_TOKENS = 4096
MOST_TOKENS = 40
GROUPS = 4
STEP = 2
RATE = 0.05
ENVIRONMENTS = ("a", "b", "c")
LAYOUTS: tuple[Table, ...] = ({}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2})
MIXTURE_LAYOUTS: tuple[Table, ...] = ({}, {"dp": 2}, {"ep": 2}, {"tp": 2})


class RandomStep:
    """The settings and the batch of one seed; half of the batches have few different tokens."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._random = np.random.default_rng(seed)
        # Apart from the rest, so that seeds keep what they draw.
        self._cuts = np.random.default_rng([seed, 1])
        self._folder = folder
        self._letters = VOCAB if self._is(0.5) else 6
        self.config = self._accepted()
        self.batch = self._batch()

    def _is(self, chance: float) -> bool:
        return bool(self._random.random() < chance)

    def _one(self, *values: Any) -> Any:
        return values[self._random.integers(len(values))]

    def _accepted(self) -> Config:
        while True:
            table = self._settings()
            try:
                config = parse_config(table, source="step")
            except ConfigError:
                # Some combinations have no meaning.
                continue
            return self._cut(table) if self._cuts.random() < 0.5 else config

    def _cut(self, table: Table) -> Config:
        """Returns the settings with a part of the vocabulary, unless they exclude it."""
        sampling = table["sampling"] | {"top_k": 5, "min_p": 0.1}
        try:
            return parse_config(table | {"sampling": sampling}, source="step")
        except ConfigError:
            return parse_config(table, source="step")

    def _settings(self) -> Table:
        model = self._one("llama", "llama", "qwen3", "moe")
        parallel = dict(self._one(*(MIXTURE_LAYOUTS if model == "moe" else LAYOUTS)))
        ranks = 1 + bool(parallel)
        parallel.pop("dp", None)
        algorithm = self._algorithm() | {
            "group_size": self._one(2, 3),
            "groups_per_step": GROUPS,
            "max_staleness": STEP,
            "learning_rate": RATE,
            "aggregation": self._one("token_mean", "sequence_mean", "fixed"),
            "mini_batches": self._one(1, 2, 4),
            "epochs": self._one(1, 1, 2),
        }
        names = ENVIRONMENTS[: self._one(1, 2, 3)]
        environments = [{"name": name, "reference": "module:Class"} for name in names]
        learner: Table = {
            "world_size": ranks,
            "parallel": parallel,
            "micro_batch_tokens": self._one(MOST_TOKENS, 64, 200),
            "shared_prefix_tokens": self._one(0, 1, 1, 2, 5),
            "optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0},
            "weight_decay": 0.0,
            "grad_clip": 0.0,
            "timeout_s": 300.0,
        }
        if model != "moe":
            learner["transformer"] = self._one({}, {"sequence_parallel": False})
        if model == "moe" and ranks == 1:
            learner["transformer"] = {"moe_aux_loss_coeff": 0.5}
            learner["micro_batch_tokens"] = ALL_TOKENS
        table: Table = {
            "run": {"name": "step", "steps": 5},
            "model": {"path": str(self._folder / model), "dtype": "float32"},
            "algorithm": algorithm,
            "environments": environments,
            "sampling": {
                "max_reply_tokens": 8,
                "max_episode_tokens": MOST_TOKENS,
                "max_total_tokens": 5 * MOST_TOKENS,
                "temperature": self._one(0.8, 1.0),
            },
            "learner": learner,
        }
        if "kl" in algorithm:
            table["reference"] = {"top_k": 5} | self._one(
                {"path": str(self._folder / "tied"), "parallel": {}},
                {"server": {"base_url": "http://127.0.0.1:9/v1", "model": "teacher"}},
            )
        return table

    def _algorithm(self) -> Table:
        loss = self._one("ppo", "gspo", "cispo", "sapo", "reinforce")
        table: Table = {
            "loss": loss,
            "advantage": self._one(
                "grpo",
                "dr_grpo",
                "rloo",
                "reinforce_pp",
                "reinforce_pp_baseline",
                "score",
                "none",
            ),
            "weight": "none",
            "entropy_coefficient": self._one(0.0, 0.0, 0.05),
        }
        arguments: Table = {}
        # A loss without a ratio of its own needs weights that lead to the present policy.
        bands: Table = {"to": "present"} if loss == "reinforce" else {}
        if loss in ("ppo", "gspo", "cispo"):
            low, high = self._one((0.2, 0.3), (0.001, 0.002))
            arguments = {"clip_low": low, "clip_high": high}
        if loss == "ppo" and self._is(0.3):
            arguments["dual_clip"] = 1.5
        if loss != "reinforce" and self._is(0.3):
            arguments["ratio"] = "behavior"
        else:
            weight = (
                {"weight": self._one("token", "sequence")},
                {"cap": self._one(1.1, 2.0)},
            )
            weighting, cap = self._one(weight, ({"weight": "none"}, {}))
            table |= weighting
            bands |= cap
        if self._is(0.3):
            bands["token_band"] = [0.5, 1.6]
        if self._is(0.3):
            bands["sequence_band"] = [0.7, 1.3]
        table |= {"loss_args": arguments, "weight_args": bands}
        kind = self._one("none", "loss", "top_k", "reward")
        if kind == "loss":
            table["kl"] = {"coefficient": 0.3, "estimator": self._one("k2", "k3")}
        elif kind == "top_k":
            estimator = self._one("forward_top_k", "reverse_top_k")
            table["kl"] = {"coefficient": 0.7, "estimator": estimator}
        elif kind == "reward":
            estimator = self._one("k1", "k2", "k3")
            table["kl"] = {
                "coefficient": 0.1,
                "estimator": estimator,
                "placement": "reward",
            }
        if self._is(0.3):
            penalty = {"penalty": 0.7, "cache_tokens": 4}
            table |= self._one(
                {"leave_out_truncated": True},
                {"reward": "overlong", "reward_args": penalty},
            )
        return table

    def _batch(self) -> Batch:
        config = self.config
        episodes = []
        size = config.algorithm.group_size
        settings = {
            environment.name for environment in config.environments if self._is(0.25)
        }
        own_limits = {
            environment.name: self._one(0, 0, 5) for environment in config.environments
        }
        prompt: list[int] = []
        for group in range(GROUPS):
            name = config.environments[group % len(config.environments)].name
            # Some groups begin like the one before.
            prompt = [*prompt[: self._one(0, 0, 4)], *self._tokens(self._one(2, 6, 12))]
            for member in range(size):
                bare = make_trajectory(
                    self._random,
                    group=group,
                    member=member,
                    step=STEP,
                    vocab_size=VOCAB,
                    max_tokens=MOST_TOKENS,
                )
                trajectory = dataclasses.replace(
                    self._grown(bare, prompt),
                    environment=name,
                    is_given=name in settings,
                    max_reply_tokens=own_limits[name],
                    reward=float(self._random.normal()),
                    status=Status.TRUNCATED if self._is(0.25) else Status.COMPLETED,
                )
                episodes.append(
                    self._with_sets(trajectory)
                    if config.replays_sampling
                    else trajectory
                )
        return Batch(STEP, "batch", tuple(episodes))

    def _with_sets(self, one: Trajectory) -> Trajectory:
        if one.is_given:
            return one
        sampled = one.token_ids[one.sampled_mask()].tolist()
        sets = random_sets(self._cuts, sampled, vocab_size=VOCAB)
        return dataclasses.replace(one, kept_tokens=KeptTokens.of_sets(sets).packed())

    def _grown(self, bare: Trajectory, prompt: Sequence[int]) -> Trajectory:
        """Puts random conversations behind `prompt` into an episode."""
        parts = [self._conversation(prompt)]
        for _ in range(self._one(0, 0, 1, 3)):
            earlier, _ = parts[self._random.integers(len(parts))]
            parts.append(
                self._conversation(
                    earlier[: self._random.integers(1, len(earlier) + 1)]
                )
            )
        runs = [length for _, lengths in parts for length in lengths]
        sampled = sum(length for _, lengths in parts for length in lengths[1::2])
        shares = {name: self._one(0.0, 0.5, 1.0, 2.0) for name in ("x", "y")} | {
            "": 1.0
        }
        # All branches named "x" have one reward, which is not the episode's.
        rewards = {"x": float(self._random.normal())}
        names = [self._one("", "x", "y") for _ in parts]
        branches = [
            Branch(len(lengths), shares[name], name, rewards.get(name))
            for name, (_, lengths) in zip(names, parts, strict=True)
        ]
        old = int(self._random.integers(1, sampled + 1))
        spans = [(old, self._one(0, 1, 2)), (sampled - old, STEP)]
        logprobs = self._random.normal(-np.log(VOCAB), 0.5, sampled).clip(max=-0.01)
        return dataclasses.replace(
            bare,
            token_ids=np.array(
                [t for tokens, _ in parts for t in tokens], dtype=np.uint32
            ),
            run_lengths=tuple(runs),
            behavior_logprobs=logprobs.astype(np.float32),
            version_spans=tuple(
                VersionSpan(n, PolicyVersion(0, s)) for n, s in spans if n
            ),
            branches=tuple(branches) if len(parts) > 1 else (),
            reference=self._said(sampled),
        )

    def _conversation(self, begun: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and runs of a conversation that begins so, with one to three replies."""
        tokens = [*begun[: MOST_TOKENS - 4], *self._tokens(self._one(0, 1, 3))]
        runs = [len(tokens)]
        for longest in itertools.islice(itertools.cycle((6, 3)), self._one(1, 1, 3, 5)):
            length = int(self._random.integers(1, longest + 1))
            new = self._tokens(min(MOST_TOKENS - len(tokens), length))
            tokens += new
            runs.append(len(new))
        while len(runs) % 2 or not runs[-1]:
            # A conversation ends with a reply.
            tokens = tokens[: len(tokens) - runs.pop()]
        return tokens, runs

    def _tokens(self, number: int) -> list[int]:
        return self._random.integers(0, self._letters, number).tolist()

    def _said(self, sampled: int) -> ReferenceLogprobs | None:
        """What a reference behind a server may say; its likely tokens leave a rest."""
        reference = self.config.reference
        if reference is None or reference.server is None:
            return None
        top_k = reference.top_k
        ids = self._random.random((sampled, VOCAB)).argsort(axis=-1)[:, :top_k]
        shares = self._random.dirichlet(np.ones(top_k + 1), sampled)[:, :top_k]
        logprobs = self._random.normal(-3, 1, sampled).clip(max=-0.01)
        return ReferenceLogprobs(
            logprobs.astype(np.float32),
            ids.astype(np.uint32),
            np.log(shares).astype(np.float32),
        )


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.export import hf_tensors

    step = RandomStep(int(job), folder)
    policy = opened(step.config)
    training = TrainingStep(policy, step.config, step_parts(step.config, policy))
    before = weights_of(policy)
    metrics = training.run(step.batch).metrics
    moves = {
        n: t.double() - before[n].double() for n, t in hf_tensors(policy, torch.float32)
    }
    kept(policy, {"metrics": metrics, "moves": moves}, folder / f"step-{job}.pt")


NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# Together they have every loss, advantage, aggregation and layout of `RandomStep`.
ORDINARY = (1, 3, 7, 18, 21, 22, 32, 45, 63, 68)
# A step of several updates with larger gradients than this makes rounding as large as weights: one
# seed in a thousand, by an estimate of the divergence that grows with the exponential.
DIVERGED = 1e6
SEEDS = ORDINARY if times(1) == 1 else random.sample(range(10**6), times(len(ORDINARY)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fuzzed_step_moves_the_weights_as_documented(seed, folder, rank_pool):
    step = RandomStep(seed, folder)
    config = step.config
    ranks = config.learner.world_size
    result = rank_pool.found(__file__, {str(seed): ranks}, folder, "step-{}.pt")[
        str(seed)
    ]
    plain = PlainStep(config.model.path, config)
    if config.reference is not None and config.reference.server is None:
        plain.references[""] = PlainStep(config.reference.path, config)
    before = plain.weights()
    expected = plain.step(step.batch)
    if expected["grad_norm"] > DIVERGED:
        pytest.skip(f"the step diverges (gradients of {expected['grad_norm']:.0e})")
    for name in ("loss", "grad_norm"):
        assert result["metrics"][name] == pytest.approx(
            expected[name], rel=1e-4, abs=1e-5
        ), name
    moves = {name: tensor - before[name] for name, tensor in plain.weights().items()}
    largest = max(float(move.abs().max()) for move in moves.values())
    worst = max(
        float((result["moves"][n] - moves[n]).abs().max()) for n in result["moves"]
    )
    assert worst <= 1e-3 * largest

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import Branch, RoutedExperts, Trajectory
from slipstream.extensions.router_replay.trainer import LayerReplay, Routing
from slipstream.learner.trainer.algorithms.loss import training_sequences
from slipstream.learner.trainer.batches.batch import Batch, check_experts
from slipstream.learner.trainer.batches.training_sequence import (
    TokenEstimates,
    TrainingSequence,
    share_of_rank,
)
from support.fakes.fake_controller import make_batch
from support.fakes.packed import packed
from support.fakes.small_configs import small_config
from torch import Tensor, nn

UNKNOWN = 255


class Layer(nn.Module):
    """What `LayerReplay` sees of a transformer layer; its scores are its input."""

    def __init__(self, number: int = 1, rank: int | None = None) -> None:
        """With `rank`, this rank of a tensor parallel group has its own part of the tokens."""
        super().__init__()
        self.layer_number = number
        self.config = SimpleNamespace(
            num_moe_experts=4,
            sequence_parallel=rank is not None,
            moe_router_fusion=False,
        )
        self.mlp = nn.Module()
        self.mlp.router = nn.Module()
        self.mlp.router.router_replay = None
        self.mlp.tp_group = SimpleNamespace(rank=lambda: rank)

    def forward(
        self, scores: Tensor, packed_seq_params: object
    ) -> tuple[Tensor, Tensor]:
        return self.mlp.router.router_replay.get_replay_topk(
            scores,
            2,
            None,
            None,
            lambda scores, k, num_groups, group_topk: scores.topk(k),
        )


def route(
    layer: Layer, scores: Tensor, expert_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    return layer(scores, packed_seq_params=SimpleNamespace(expert_ids=expert_ids))


# The routers' own choices are 3 and 2, and 0 and 1.
SCORES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])


def ids(*tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.uint8)[:, None]


def test_a_token_goes_to_the_experts_that_are_given_with_its_own_scores() -> None:
    scores = SCORES.clone().requires_grad_()
    layer = Layer()
    LayerReplay(layer)
    values, chosen_ids = route(layer, scores, ids([0, 3], [1, 0]))
    assert chosen_ids.tolist() == [[0, 3], [1, 0]]
    torch.testing.assert_close(values, torch.tensor([[0.1, 0.4], [0.3, 0.4]]))
    (values * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert scores.grad.tolist() == [[1, 0, 0, 2], [4, 3, 0, 0]]


@pytest.mark.parametrize("given", [[UNKNOWN, UNKNOWN], [1, UNKNOWN], [4, 1], [2, 2]])
def test_a_token_whose_experts_are_not_known_goes_where_its_router_sends_it(given):
    layer = Layer()
    replay = LayerReplay(layer)
    values, chosen_ids = route(layer, SCORES, ids(given, [2, 3]))
    assert chosen_ids.tolist() == [[3, 2], [2, 3]]
    torch.testing.assert_close(values, torch.tensor([[0.4, 0.3], [0.2, 0.1]]))
    assert replay.take_counts().tolist() == [2, 2]


def test_each_layer_replays_its_own_part() -> None:
    recorded = torch.tensor([[[0, 1], [2, 3], [0, 3]]] * 2, dtype=torch.uint8)
    for number, expected in ((1, [0, 1]), (2, [2, 3]), (3, [0, 3])):
        layer = Layer(number)
        LayerReplay(layer)
        assert route(layer, SCORES, recorded)[1].tolist() == [expected] * 2


def test_each_rank_replays_the_tokens_that_it_has() -> None:
    recorded = ids([0, 1], [0, 2], [1, 2], [1, 3])
    for rank, expected in ((0, [[0, 1], [0, 2]]), (1, [[1, 2], [1, 3]])):
        layer = Layer(rank=rank)
        LayerReplay(layer)
        assert route(layer, SCORES, recorded)[1].tolist() == expected
        # Without experts its router chooses, also behind a micro batch that had some.
        assert route(layer, SCORES, None)[1].tolist() == [[3, 2], [0, 1]]


def metrics(chunks, ranks, unrecorded):
    policy = SimpleNamespace(chunks=chunks, ranks=ranks)
    return Routing(chunks).ends(policy, recorded(unrecorded))


def recorded(
    unrecorded: float, recorded_here: frozenset[int] | None = None
) -> SimpleNamespace:
    """A batch of 100 tokens."""
    counts = (round(100 * (1 - unrecorded)), 100)
    return SimpleNamespace(recorded_here=recorded_here, recorded_tokens=lambda: counts)


def test_records_are_counted_by_the_rank_that_holds_them_and_once() -> None:
    def fraction(batch: SimpleNamespace, **place: object) -> float:
        ranks = SimpleNamespace(sum=lambda values: values, **place)
        return Routing([]).ends(SimpleNamespace(ranks=ranks), batch)[
            "routing_unrecorded"
        ]

    # All hold everything: rank 0 counts.
    assert fraction(recorded(1.0), is_main=True) == 1.0
    share = recorded(1.0, frozenset({1}))
    assert fraction(share, is_main=False, counts=True, cp_rank=0) == 1.0

    def replays(batch: SimpleNamespace, **place: object) -> bool:
        try:
            fraction(batch, **place)
        except RunFailed:
            return True
        return False

    # A rank that counts a record fails the step in which no router has replayed it.
    assert replays(recorded(0.5), is_main=True)
    assert not replays(recorded(0.5), is_main=False)
    share = recorded(0.5, frozenset({1}))
    assert replays(share, is_main=False, counts=True, cp_rank=0)
    assert not replays(share, is_main=True, counts=False, cp_rank=0)
    assert not replays(share, is_main=True, counts=True, cp_rank=1)


def test_choices_are_counted_once_where_a_layer_is_computed_twice() -> None:
    layers = [Layer(1), Layer(2)]
    for layer in layers:
        LayerReplay(layer)
    recorded = torch.tensor(
        [[[3, 0], [3, 2]], [[0, 1], [UNKNOWN, 1]]], dtype=torch.uint8
    )
    for layer in layers:
        with torch.no_grad():
            route(layer, SCORES, recorded)
        route(layer, SCORES, recorded)
    ranks = SimpleNamespace(sum=lambda values: values * 3, is_main=True)
    # In the first layer one of four choices differs, in the second none of two.
    assert metrics(layers, ranks, 1.0)["routing_difference"] == 1 / 6
    assert metrics(layers, ranks, 1.0)["routing_difference"] == 0


def test_choices_in_a_batch_that_was_set_aside_are_not_counted() -> None:
    layer = Layer()
    LayerReplay(layer)
    ranks = SimpleNamespace(sum=lambda values: values, is_main=True)
    policy = SimpleNamespace(ranks=ranks)
    batch = recorded(1.0)
    routing = Routing([layer])
    own_ids = ids([3, 2], [0, 1])
    other = ids([0, 1], [2, 3])
    routing.begins()
    route(layer, SCORES, other)
    routing.begins()
    route(layer, SCORES, own_ids)
    assert routing.ends(policy, batch)["routing_difference"] == 0


class RecomputedExperts(Layer):
    """A layer whose experts alone are recomputed in a backward pass, if there is one."""

    def forward(
        self, scores: Tensor, packed_seq_params: object
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return super().forward(scores, packed_seq_params)


def test_experts_of_a_step_that_nobody_computes_again_are_forgotten_with_it() -> None:
    layer = RecomputedExperts()
    replay = LayerReplay(layer)
    for _ in range(3):
        # There is no backward pass here, as below the first adapter.
        route(layer, SCORES, ids([0, 1], [0, 1]))
        replay.take_counts()
    assert not replay._again
    route(layer, SCORES, ids([2, 1], [2, 1]))
    _, chosen_ids = Layer.forward(layer, SCORES, None)
    assert chosen_ids.tolist() == [[2, 1], [2, 1]]


def test_routers_that_do_not_ask_are_noticed() -> None:
    layer = Layer()
    LayerReplay(layer)
    ranks = SimpleNamespace(sum=lambda values: values, is_main=True)
    assert metrics([layer], ranks, 1.0)["routing_unrecorded"] == 1.0
    with pytest.raises(RunFailed, match="no router replayed the recorded experts"):
        metrics([layer], ranks, 0.5)
    fused = Layer()
    fused.config.moe_router_fusion = True
    with pytest.raises(
        AssertionError, match="a fused router does not call RouterReplay"
    ):
        LayerReplay(fused)


def batch_with_experts(num_experts: int = 4):
    batch = make_batch(0, num_groups=1, group_size=2, vocab_size=9, max_tokens=9)
    first, second = batch.trajectories
    length = len(first.token_ids)
    dtype = np.uint8 if num_experts < 256 else np.uint16
    expert_ids = np.arange(2 * length, dtype=dtype).reshape(length, 1, 2) % num_experts
    expert_ids[-1] = np.iinfo(dtype).max
    first = dataclasses.replace(
        first, routed_experts=RoutedExperts(expert_ids, num_experts)
    )
    return dataclasses.replace(batch, trajectories=(first, second))


def config(router_replay: str) -> Config:
    return small_config(
        algorithm={"groups_per_step": 1, "router_replay": router_replay},
        sampling={"max_reply_tokens": 10, "max_episode_tokens": 64},
    )


@pytest.mark.parametrize("num_experts", [4, 300])
def test_experts_stay_with_their_token_and_missing_ones_are_marked(
    num_experts: int,
) -> None:
    batch = batch_with_experts(num_experts)
    first, second = batch.trajectories
    sequences = training_sequences(batch, config("rollout"))
    micro_batch = packed(sequences, [1, 0], multiple=8, sequence_multiple=4)
    expert_ids = micro_batch.expert_ids
    lengths = micro_batch.cu_seqlens.tolist()
    assert expert_ids.shape == (len(micro_batch.token_ids), 1, 2)
    begin = lengths[1]
    length = len(first.token_ids)
    expected = first.routed_experts.expert_ids.astype(np.int64)
    assert expert_ids[begin : begin + length].tolist() == expected.tolist()
    assert (
        micro_batch.token_ids[begin : begin + length].tolist()
        == first.token_ids.tolist()
    )
    rest = torch.cat([expert_ids[:begin], expert_ids[begin + length :]])
    assert len(rest) >= len(second.token_ids)
    assert (rest >= num_experts).all()


def test_context_parallel_ranks_get_the_experts_of_their_tokens() -> None:
    tokens = np.arange(8, dtype=np.uint32)
    sequence = dataclasses.replace(
        TrainingSequence.of_tokens(tokens),
        expert_ids=np.stack([tokens, tokens + 10], axis=-1).astype(np.uint8)[:, None],
    )
    micro_batch = packed([sequence], [0], multiple=4, sequence_multiple=4)
    for rank in range(2):
        share = share_of_rank(micro_batch, rank, 2)
        assert share.expert_ids[:, 0, 0].tolist() == share.token_ids.tolist()
        assert share.expert_ids[:, 0, 1].tolist() == (share.token_ids + 10).tolist()


def test_experts_are_left_out_when_routers_choose() -> None:
    batch = batch_with_experts()
    sequences = training_sequences(batch, config("off"))
    assert packed(sequences, [0, 1]).expert_ids is None
    plain = TrainingSequence.of_trajectories(
        batch.trajectories,
        [
            TokenEstimates(np.zeros(t.num_sampled_tokens, np.float32))
            for t in batch.trajectories
        ],
        step=0,
    )
    assert all(sequence.expert_ids is None for sequence in plain)


def unrecorded_fraction(*trajectories: Trajectory) -> float:
    num_recorded, num_tokens = Batch(0, "batch", trajectories).recorded_tokens()
    return 1 - num_recorded / num_tokens if num_tokens else 1.0


def test_unrecorded_tokens_are_counted_without_the_last_of_each_trajectory() -> None:
    first, second = batch_with_experts().trajectories
    complete = len(first.token_ids) - 1
    absent = len(second.token_ids) - 1
    assert unrecorded_fraction(first) == 0.0
    assert unrecorded_fraction(first, second) == pytest.approx(
        absent / (complete + absent)
    )
    assert unrecorded_fraction() == 1.0


def test_each_branch_has_the_experts_of_its_tokens_and_a_last_token_without() -> None:
    first = batch_with_experts().trajectories[0]
    routed = first.routed_experts
    length = len(first.token_ids)
    tree = dataclasses.replace(
        first,
        token_ids=np.tile(first.token_ids, 2),
        run_lengths=first.run_lengths * 2,
        behavior_logprobs=np.tile(first.behavior_logprobs, 2),
        version_spans=first.version_spans * 2,
        routed_experts=RoutedExperts(
            np.tile(routed.expert_ids, (2, 1, 1)), routed.num_experts
        ),
        branches=(Branch(len(first.run_lengths)),) * 2,
    )
    assert unrecorded_fraction(tree) == 0.0
    unknown_ids = tree.routed_experts.expert_ids.copy()
    unknown_ids[length] = 255
    tree = dataclasses.replace(
        tree, routed_experts=RoutedExperts(unknown_ids, routed.num_experts)
    )
    assert unrecorded_fraction(tree) == pytest.approx(1 / (2 * length - 2))
    first_sequence, other = training_sequences(
        Batch(0, "batch", (tree,)), config("rollout")
    )
    assert first_sequence.expert_ids.tolist() == unknown_ids[:length].tolist()
    assert other.expert_ids.tolist() == unknown_ids[length:].tolist()


def test_experts_of_another_model_stop_the_step() -> None:
    trajectories = batch_with_experts().trajectories
    sizes = {"num_layers": 1, "moe_router_topk": 2, "num_moe_experts": 4}
    check_experts(trajectories, SimpleNamespace(**sizes))
    for name in sizes:
        with pytest.raises(
            RunFailed, match="has experts of 1 layers, 2 of 4 each, but the model"
        ):
            check_experts(trajectories, SimpleNamespace(**sizes | {name: 3}))

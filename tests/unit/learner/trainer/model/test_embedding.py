"""The embedding whose gradient has rows of a micro batch's tokens alone, beside torch's own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from slipstream.learner.trainer.model.embedding import add_rows_alone

VOCAB = 12
SIZE = 3
# Some tokens are there several times, others never; the first and last are of the ends.
IDS = torch.tensor([[0, 5, 11, 5, 5, 6, 0, 7, 2]])


@pytest.fixture(autouse=True)
def groups_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron takes no group while torch has no default one.
    monkeypatch.setattr(
        mappings, "get_tensor_model_parallel_group_if_none", lambda group: group
    )


def make_embedding(
    weight: torch.Tensor, group: dist.ProcessGroup
) -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(layer)
    layer.vocab_start_index = group.rank() * len(weight)
    layer.tp_group = group
    layer.reduce_scatter_embeddings = False
    layer.weight = torch.nn.Parameter(weight.clone())
    layer.weight.zero_out_wgrad = True
    chunk = torch.nn.ModuleList([layer])
    assert add_rows_alone([chunk]) == [chunk]
    # Megatron would add what stands for the gradient.
    assert layer.weight.zero_out_wgrad is False
    return layer


@pytest.mark.parametrize("has_buffer", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_and_gradients_are_those_of_torch(
    num_ranks: int, has_buffer: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, SIZE, dtype=torch.float64)
    outer = torch.randn(*IDS.shape, SIZE, dtype=torch.float64)
    plain_weight = weight.clone().requires_grad_()
    expected = torch.nn.functional.embedding(IDS, plain_weight)
    (gradient,) = torch.autograd.grad(expected, plain_weight, outer)
    store = dist.HashStore()

    def work(rank: int) -> torch.Tensor:
        group = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60))
        layer = make_embedding(weight.chunk(num_ranks)[rank], group)
        if has_buffer:
            layer.weight.main_grad = torch.ones_like(layer.weight)
        rows = layer(IDS)
        torch.testing.assert_close(rows.detach(), expected.detach())
        rows.backward(outer)
        assert layer.weight.grad is not None
        if not has_buffer:
            return layer.weight.grad
        # A second micro batch is added to the first.
        layer.weight.grad = None
        layer(IDS).backward(outer)
        assert layer.weight.grad_added_to_main_grad
        return (layer.weight.main_grad - 1) / 2

    with ThreadPoolExecutor(num_ranks) as threads:
        embeddings = torch.cat(list(threads.map(work, range(num_ranks))))
    torch.testing.assert_close(embeddings, gradient)


def test_sums_of_half_precision_are_not_rounded() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    layer = make_embedding(torch.zeros(2, 1, dtype=torch.bfloat16), group)
    layer.weight.main_grad = torch.zeros(2, 1)
    ids = torch.zeros(1, 257, dtype=torch.int64)
    layer(ids).backward(torch.ones(1, 257, 1, dtype=torch.bfloat16))
    # The nearest bfloat16 is 256.
    assert layer.weight.main_grad.tolist() == [[257.0], [0.0]]


def test_other_embeddings_stay_as_they_are() -> None:
    class Other(VocabParallelEmbedding):
        """Computes something else."""

    other = Other.__new__(Other)
    add_rows_alone([SimpleNamespace(modules=lambda: [other])])
    assert "forward" not in vars(other)

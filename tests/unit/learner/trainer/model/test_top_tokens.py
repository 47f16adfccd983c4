"""The most likely tokens against a dense softmax, the vocabulary split over ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from slipstream.learner.trainer.model.logprobs import Projection, top_tokens
from torch import Tensor

ROWS, HIDDEN, VOCAB = 9, 5, 11


@pytest.mark.parametrize("chunk_logits", [1, 3 * VOCAB, 1000])
@pytest.mark.parametrize("top_k", [1, 3, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_likely_tokens_are_those_of_the_whole_vocabulary(size, top_k, chunk_logits):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    # With 4 ranks of 8 entries the vocabulary of 11 leaves two ranks with padding alone.
    weight = torch.zeros(8 * size if size > 1 else 16, HIDDEN, dtype=torch.float64)
    weight[:VOCAB] = -hidden[:1] + torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    store = dist.HashStore()

    def work(rank: int) -> Tensor:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        projection = Projection(0.7, VOCAB, group, chunk_logits=chunk_logits)
        part = weight.chunk(size)[rank]
        return top_tokens(hidden, part, top_k, projection)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(work, range(size)))
    expected = (hidden @ weight[:VOCAB].T).topk(top_k).indices.sort().values
    for ids in found:
        assert ids.dtype == torch.int64
        assert ids.sort().values.tolist() == expected.tolist()

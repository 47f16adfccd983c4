"""Log-probabilities in chunks against a dense softmax, the vocabulary split over ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from slipstream.learner.trainer.model import logprobs
from slipstream.learner.trainer.model.logprobs import (
    Projection,
    Rows,
    row_logprobs,
    top_tokens,
    vocab_parallel_logprobs,
)
from torch import Tensor

Found = TypeVar("Found")
TOKENS = 9
HIDDEN = 5
VOCAB = 11


def on_ranks(size: int, work: Callable[[dist.ProcessGroup], Found]) -> list[Found]:
    """`work` on `size` ranks, each a thread, with their group; what each returned."""
    store = dist.HashStore()

    def run(rank: int) -> Found:
        return work(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def make_case(
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype)
    # The first and the last entry, and one at the edge of each split, are targets.
    targets = torch.tensor([0, 10, 5, 6, 2, 3, 8, 9, 1])
    return hidden, weight, targets, torch.tensor([0, 1, 2, 3, 4, 6, 7])


def computed(hidden, weight, targets, rows=None, **settings):
    """Log-probabilities and entropies at temperature 1, of all rows unless some are named."""
    rows = torch.arange(len(targets)) if rows is None else rows
    projection = Projection(1.0, len(weight), **settings)
    return vocab_parallel_logprobs(hidden, weight, targets, rows, projection)


def dense(hidden, weight, targets, rows, temperature):
    """The same by torch's own functions, from all logits at one time."""
    logs = (hidden @ weight.T / temperature).log_softmax(-1)
    is_row = torch.zeros(len(targets), dtype=torch.bool).index_fill(0, rows, True)
    logprobs = logs.gather(1, targets[:, None])[:, 0]
    entropy = -(logs.exp() * logs).sum(-1)
    return torch.where(is_row, logprobs, 0), torch.where(is_row, entropy, 0)


@pytest.mark.parametrize("kept_logits", [0, 5 * VOCAB, 1000])
def test_rows_of_several_temperatures_have_values_and_gradients_of_a_dense_softmax(
    kept_logits: int,
) -> None:
    hidden, weight, targets, rows = make_case()
    places = {0.5: rows[:3], 1.0: rows[3:4], 1.7: rows[4:]}
    of_temperature = torch.ones(TOKENS, 1, dtype=torch.float64)
    parts = []
    for temperature, rows_of_part in places.items():
        of_temperature[rows_of_part] = temperature
        parts.append(Rows(rows_of_part, temperature))
    gradients = []
    for is_ours in (True, False):
        states = hidden.clone().requires_grad_()
        matrix = weight.clone().requires_grad_()
        if is_ours:
            projection = Projection(
                1.0,
                VOCAB,
                entropy_gradient=True,
                kept_logits=kept_logits,
            )
            values = row_logprobs(states, matrix, targets, parts, projection)
        else:
            values = dense(states, matrix, targets, rows, of_temperature)
        weights = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
        total = (weights * values[0]).sum() + (weights.flip(0) * values[1]).sum()
        total.backward()
        gradients.append((*values, states.grad, matrix.grad))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_others", [0, 4])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_logits", [1, 2 * VOCAB, 1000])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_split_and_padded_vocabulary_gives_values_and_gradients_of_a_dense_softmax(
    size: int, chunk_logits: int, entropy_gradient: bool, num_others: int
) -> None:
    hidden, weight, targets, rows = make_case()
    # With 4 ranks the vocabulary of 11 leaves two with padding alone.
    padded = torch.zeros(8 * size if size > 1 else 16, HIDDEN, dtype=weight.dtype)
    padded[:VOCAB] = weight
    if num_others:
        # The first target is among the others at some tokens, and not at others.
        other_ids = torch.rand(TOKENS, VOCAB, dtype=torch.float64).argsort(-1)[
            :, :num_others
        ]
        is_both = (other_ids == targets[:, None]).any(-1)
        assert is_both[rows].any()
        assert not is_both[rows].all()
        targets = torch.cat([targets[:, None], other_ids], dim=1)
    outer = torch.randn(targets.shape, dtype=torch.float64)
    bend = torch.randn(TOKENS, dtype=torch.float64)

    def loss(found: Tensor, entropy: Tensor) -> Tensor:
        total = (found * outer).sum()
        return total + (entropy * bend).sum() if entropy_gradient else total

    def work(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        states = hidden.clone().requires_grad_()
        part = padded.chunk(size)[group.rank()].clone().requires_grad_()
        before = states.detach().clone(), part.detach().clone()
        projection = Projection(0.7, VOCAB, group, entropy_gradient, chunk_logits)
        logprobs, entropy = vocab_parallel_logprobs(
            states, part, targets, rows, projection
        )
        states_grad, part_grad = torch.autograd.grad(
            loss(logprobs, entropy), (states, part)
        )
        assert torch.equal(states.detach(), before[0])
        assert torch.equal(part.detach(), before[1])
        return logprobs.detach(), entropy.detach(), states_grad, part_grad

    results = on_ranks(size, work)
    hidden.requires_grad_()
    weight.requires_grad_()
    columns = [
        dense(hidden, weight, targets_of_column, rows, 0.7)
        for targets_of_column in targets.view(TOKENS, -1).unbind(1)
    ]
    expected = torch.stack([column for column, _ in columns], 1).view(targets.shape)
    expected_entropy = columns[0][1]
    gradients = torch.autograd.grad(loss(expected, expected_entropy), (hidden, weight))
    for found, entropy, _, _ in results:
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(sum(states for _, _, states, _ in results), gradients[0])
    weight_grad = torch.cat([part for _, _, _, part in results])
    torch.testing.assert_close(weight_grad[:VOCAB], gradients[1])
    assert not weight_grad[VOCAB:].any()


@pytest.mark.parametrize("chunk_logits", [1, 3 * VOCAB, 1000])
@pytest.mark.parametrize("top_k", [1, 3, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_likely_tokens_are_those_of_the_whole_vocabulary(size, top_k, chunk_logits):
    hidden, drawn, _, _ = make_case()
    weight = torch.zeros(8 * size if size > 1 else 16, HIDDEN, dtype=torch.float64)
    weight[:VOCAB] = drawn - hidden[:1]

    def work(group: dist.ProcessGroup) -> Tensor:
        projection = Projection(0.7, VOCAB, group, chunk_logits=chunk_logits)
        return top_tokens(hidden, weight.chunk(size)[group.rank()], top_k, projection)

    expected = (hidden @ weight[:VOCAB].T).topk(top_k).indices.sort().values
    for ids in on_ranks(size, work):
        assert ids.dtype == torch.int64
        assert ids.sort().values.tolist() == expected.tolist()


def test_memory_is_that_of_a_chunk_and_not_of_all_logits() -> None:
    tokens = 512
    vocab = 1000
    hidden_size = 16
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        logprobs, _ = computed(hidden, weight, targets, chunk_logits=32 * vocab)
        logprobs.sum().backward()
    # All logits are 16 chunks.
    chunk_bytes = 4 * 32 * vocab
    other_bytes = 4 * (vocab + tokens) * hidden_size
    assert chunk_bytes < peak_bytes(profile) < 3 * chunk_bytes + 2 * other_bytes


@pytest.mark.parametrize(
    ("kept_logits", "is_trained", "projected"),
    [
        (TOKENS * VOCAB, True, [TOKENS]),
        (TOKENS * VOCAB - 1, True, [4, 4, 1] * 2),
        (TOKENS * VOCAB, False, [4, 4, 1]),
    ],
)
def test_logits_that_may_be_kept_are_projected_once(
    kept_logits: int,
    is_trained: bool,
    projected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, targets, _ = make_case()
    rows = torch.arange(TOKENS)
    make = logprobs.VocabularyShard.logits
    lengths = []

    def watched(self: logprobs.VocabularyShard, hidden: Tensor) -> Tensor:
        lengths.append(len(hidden))
        return make(self, hidden)

    monkeypatch.setattr(logprobs.VocabularyShard, "logits", watched)
    projection = Projection(0.7, VOCAB, chunk_logits=4 * VOCAB, kept_logits=kept_logits)
    hidden.requires_grad_(is_trained)
    found, _ = vocab_parallel_logprobs(hidden, weight, targets, rows, projection)
    torch.testing.assert_close(found, dense(hidden, weight, targets, rows, 0.7)[0])
    if is_trained:
        (expected,) = torch.autograd.grad(
            dense(hidden, weight, targets, rows, 0.7)[0].sum(), hidden
        )
        (first,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
        torch.testing.assert_close(first, expected)
        assert lengths == projected
        # The kept tensors are used up; a second way back is right all the same.
        (second,) = torch.autograd.grad(found.sum(), hidden)
        torch.testing.assert_close(second, expected)
    else:
        assert lengths == projected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_logits", [2 * VOCAB, 1000])
def test_the_gradient_of_the_weight_is_added_to_megatrons_buffer(
    chunk_logits: int, dtype: torch.dtype
) -> None:
    hidden, weight, targets, _ = make_case(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.ones(VOCAB, HIDDEN)
    computed(hidden, weight, targets, chunk_logits=chunk_logits)[0].sum().backward()
    wide, wide_weight = (
        tensor.detach().double().requires_grad_() for tensor in (hidden, weight)
    )
    rows = torch.arange(TOKENS)
    dense(wide, wide_weight, targets, rows, 1.0)[0].sum().backward()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        (weight.main_grad - 1).double(), wide_weight.grad, atol=limit, rtol=limit
    )
    # Megatron adds no gradient with this mark, but asks for one.
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Most that was allocated at one time, over what was before."""
    events = [
        e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    used_bytes = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used_bytes += event.nbytes()
        largest = max(largest, used_bytes)
    assert largest > 0
    return largest


def test_positions_that_are_not_trained_are_zero_and_no_logits_are_made_for_them() -> (
    None
):
    hidden, weight, targets, _ = make_case()
    nothing = torch.tensor([], dtype=torch.int64)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = computed(hidden, weight, targets, nothing)
    logprobs.sum().backward()
    # Zeros rather than nothing: the hooks that wait for gradients must run.
    assert not any(
        tensor.any() for tensor in (logprobs, entropy, hidden.grad, weight.grad)
    )


def test_frozen_projection_gets_no_gradient() -> None:
    hidden, weight, targets, rows = make_case()
    logprobs, _ = computed(hidden.requires_grad_(), weight, targets, rows)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_chunks_in_bfloat16_add_up_their_weight_gradient_in_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8, dtype=torch.bfloat16)
    weight = torch.randn(16, 8, dtype=torch.bfloat16)
    targets = torch.zeros(4096, dtype=torch.int64)
    gradients = []
    for chunk_logits in (1 << 20, 16 * 16):
        part = weight.clone().requires_grad_()
        computed(hidden, part, targets, chunk_logits=chunk_logits)[0].sum().backward()
        assert part.grad.dtype == torch.bfloat16
        gradients.append(part.grad.float())
    difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert difference < 5e-3


def test_huge_logits_give_finite_logprobs() -> None:
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    logprobs, entropy = computed(torch.ones(1, 1), weight, torch.tensor([1]))
    assert logprobs.tolist() == [-2e4]
    assert entropy.tolist() == [0.0]


def test_logits_in_float32_are_not_rounded_to_the_weights_type() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 128).bfloat16()
    weight = torch.randn(200, 128).bfloat16()
    targets = torch.randint(200, (64,))
    logs = (hidden.double() @ weight.double().T).log_softmax(-1)
    expected = logs.gather(1, targets[:, None])[:, 0]
    logprobs, _ = computed(hidden, weight, targets)
    assert float((logprobs.double() - expected).abs().max()) < 1e-4


def test_gradients_of_float32_logits_have_the_types_of_states_and_weights() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(32, 64).bfloat16()
    weight = (torch.randn(50, 64) * 0.2).bfloat16()
    targets = torch.randint(50, (32,))
    outer = torch.randn(32)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logs = (exact[0] @ exact[1].T).log_softmax(-1)
    (logs.gather(1, targets[:, None])[:, 0] * outer).sum().backward()
    ours = [tensor.requires_grad_() for tensor in (hidden, weight)]
    logprobs, _ = computed(*ours, targets, chunk_logits=500)
    (logprobs * outer).sum().backward()
    for tensor, reference in zip(ours, exact, strict=True):
        assert tensor.grad.dtype == torch.bfloat16
        difference = tensor.grad.double() - reference.grad
        assert difference.norm() < 1e-2 * reference.grad.norm()


def kept_case() -> tuple[Tensor, Tensor]:
    """Sets of the targets of `make_case`, as ids plus 1; the second result flags their tokens."""
    _, _, targets, _ = make_case()
    kept_ids = torch.zeros(TOKENS, 4, dtype=torch.int32)
    is_kept = torch.ones(TOKENS, VOCAB, dtype=torch.bool)
    # Every third token was drawn from all, and one of the others for certain.
    sizes = [0, 4, 1] * (TOKENS // 3)
    for row, size in enumerate(sizes):
        if not size:
            continue
        target = int(targets[row])
        steps = 3 * torch.arange(size)
        ids = (target + steps) % VOCAB
        kept_ids[row, :size] = ids.sort().values + 1
        is_kept[row] = False
        is_kept[row, ids] = True
    return kept_ids, is_kept


def dense_kept(
    hidden: Tensor,
    weight: Tensor,
    is_kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies over kept tokens, by torch's functions."""
    _, _, targets, _ = make_case()
    logits = hidden @ weight.T / 0.7
    every_logprob = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    surprises = -every_logprob.masked_fill(~is_kept, 0.0)
    entropies = (every_logprob.exp() * surprises).sum(-1)
    columns = targets[:, None]
    return every_logprob.gather(1, columns)[:, 0], entropies


@pytest.mark.parametrize("chunk_logits", [None, 2 * VOCAB])
def test_probabilities_and_gradients_are_over_kept_tokens(
    chunk_logits: int | None,
) -> None:
    hidden, weight, targets, _ = make_case()
    kept_ids, is_kept = kept_case()
    hidden.requires_grad_()
    weight.requires_grad_()
    projection = Projection(
        0.7,
        VOCAB,
        entropy_gradient=True,
        chunk_logits=chunk_logits,
    )
    kept_logprobs, kept_entropies = vocab_parallel_logprobs(
        hidden,
        weight,
        targets,
        torch.arange(TOKENS),
        projection,
        kept_ids=kept_ids,
    )
    expected_logprobs, expected_entropies = dense_kept(hidden, weight, is_kept)
    torch.testing.assert_close(kept_logprobs, expected_logprobs)
    torch.testing.assert_close(kept_entropies, expected_entropies)
    slopes = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
    total = slopes @ kept_logprobs + slopes.flip(0) @ kept_entropies
    expected_total = slopes @ expected_logprobs + slopes.flip(0) @ expected_entropies
    gradients = torch.autograd.grad(total, (hidden, weight))
    expected_gradients = torch.autograd.grad(expected_total, (hidden, weight))
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("size", [2, 4])
def test_kept_tokens_may_be_on_any_part_of_the_vocabulary(size: int) -> None:
    hidden, weight, targets, _ = make_case()
    kept_ids, is_kept = kept_case()
    width = -(-VOCAB // size)
    padding = torch.zeros(
        size * width - VOCAB,
        HIDDEN,
        dtype=weight.dtype,
    )
    parts = torch.cat([weight, padding]).split(width)
    slopes = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)

    def on_rank(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        part = parts[group.rank()].clone().requires_grad_()
        rank_logprobs, rank_entropies = vocab_parallel_logprobs(
            hidden,
            part,
            targets,
            torch.arange(TOKENS),
            Projection(0.7, VOCAB, group=group),
            kept_ids=kept_ids,
        )
        (part_gradient,) = torch.autograd.grad(slopes @ rank_logprobs, part)
        return rank_logprobs.detach(), rank_entropies, part_gradient

    results = on_ranks(size, on_rank)
    weight.requires_grad_()
    expected_logprobs, expected_entropies = dense_kept(hidden, weight, is_kept)
    (expected_gradient,) = torch.autograd.grad(slopes @ expected_logprobs, weight)
    for rank_logprobs, rank_entropies, _ in results:
        torch.testing.assert_close(rank_logprobs, expected_logprobs.detach())
        torch.testing.assert_close(rank_entropies, expected_entropies.detach())
    gradient = torch.cat([part_gradient for _, _, part_gradient in results])
    torch.testing.assert_close(gradient[:VOCAB], expected_gradient)


def test_a_likely_token_keeps_its_digits_where_logits_are_large() -> None:
    """Sums of exact logits, so that nothing but the normalisation rounds."""
    generator = torch.Generator().manual_seed(7)
    num_rows = 400
    vocab_size = 64
    # Quarters are exact, and so is their product with the unit matrix.
    logits = torch.randint(-8, 8, (num_rows, vocab_size), generator=generator) / 4
    targets = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    heights = torch.randint(5, 15, (num_rows,), generator=generator)
    logits[torch.arange(num_rows), targets] += heights
    projection = Projection(temperature=1.0, vocab_size=vocab_size)
    logprobs, entropies = vocab_parallel_logprobs(
        logits, torch.eye(vocab_size), targets, torch.arange(num_rows), projection
    )
    exact = logits.double().log_softmax(-1)
    expected = exact.gather(1, targets[:, None])[:, 0]
    errors = (logprobs.double() - expected).abs()
    # The rounding of a number between 8 and 16 alone is 4.8e-7, and 2.4e-7 on average.
    assert float(errors.max()) < 4e-7
    assert float(errors.mean()) < 1e-7
    spread = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(entropies.double(), spread, rtol=3e-6, atol=3e-7)

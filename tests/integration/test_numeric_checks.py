"""An attention with wrong gradients is refused before a model trains with it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slipstream.core.errors import ConfigError
from support.fakes.core_attention import GROUPS, HEADS, SIZE, core_attention
from support.ranks import attention_ranks
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "a window": {"window_size": (9, 0)},
    "sinks": {"softmax_type": "learnable"},
}


class Attention(nn.Module):
    """What the check sees of a layer's attention."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.core_attention = core_attention(torch.bfloat16, **KINDS[kind])
        self.config = self.core_attention.config
        self.layer_number = 1
        self.attn_mask_type = None
        self.num_attention_heads_per_partition = HEADS
        self.num_query_groups_per_partition = GROUPS


def check(*layers: nn.Module, is_shared: bool = False) -> None:
    from slipstream.extensions.prefix_sharing.trainer import by_paths
    from slipstream.learner.trainer.model.attention_kernels import check_attention

    sharing = SimpleNamespace(by_paths=by_paths) if is_shared else None
    ranks = SimpleNamespace(cp_rank=0, cp_size=1, device=torch.device("cpu"))
    model = SimpleNamespace(
        ranks=ranks, chunks=[nn.ModuleList(layers)], dtype=torch.bfloat16
    )
    check_attention(SimpleNamespace(**vars(model), sharing=sharing))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_right_attention_passes_and_keeps_no_trace(kind: str) -> None:
    layer = Attention(kind)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check(layer)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in layer.parameters())


class Changed(torch.autograd.Function):
    """Passes rows on; a function changes their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def with_gradients(place: int, change: Callable[[Tensor], Tensor]) -> Attention:
    """Returns an attention that changes the gradient of its argument at `place`."""
    layer = Attention()
    right = layer.core_attention.forward

    def forward(*arguments: Any, **named: Any) -> Tensor:
        inputs = list(arguments)
        inputs[place] = Changed.apply(inputs[place], change)
        return right(*inputs, **named)

    layer.core_attention.forward = forward
    return layer


def zero_a_head(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:, 0] = 0
    return gradient


def spoil_one(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    # A token of the sequence with low scores, which is not compared otherwise.
    gradient[20, 0, 0] = torch.nan
    return gradient


@pytest.mark.parametrize(
    ("place", "change", "told"),
    [
        (0, zero_a_head, "gradients of queries are [2-9][0-9]% off"),
        (1, lambda gradient: 1.1 * gradient, "gradients of keys are 10% off"),
        (
            2,
            lambda gradient: gradient.roll(1, 0),
            "gradients of values are [0-9]+% off",
        ),
        (1, spoil_one, "gradients of keys are not finite"),
    ],
)
def test_a_wrong_gradient_is_told(
    place: int, change: Callable[[Tensor], Tensor], told: str
):
    with pytest.raises(ConfigError, match=f"heads of 16 dimensions.*torch.*{told}"):
        check(Attention("sinks"), with_gradients(place, change))


def test_a_wrong_output_is_told() -> None:
    layer = Attention("a window")
    layer.core_attention.window += 1
    with pytest.raises(ConfigError, match="outputs are [0-9]+% off"):
        check(layer)


@pytest.mark.parametrize("kind", ["plain", "sinks"])
def test_a_right_attention_of_shared_prefixes_passes(kind: str) -> None:
    check(Attention(kind), is_shared=True)


def test_a_wrong_attention_of_shared_prefixes_alone_is_told() -> None:
    layer = Attention()
    right = layer.core_attention.forward

    def forward(query: Tensor, key: Tensor, *others: Any, **named: Any) -> Tensor:
        # The calls have more keys than queries, for which libraries choose kernels of their own.
        if len(key) > len(query):
            key = Changed.apply(key, zero_a_head)
        return right(query, key, *others, **named)

    layer.core_attention.forward = forward
    check(layer)
    message = (
        "shared prefixes: .*gradients of keys are [0-9]+% off.*shared_prefix_tokens = 0"
    )
    with pytest.raises(ConfigError, match=message):
        check(layer, is_shared=True)


def test_layers_of_one_kind_are_checked_once() -> None:
    layers = [Attention(), Attention(), Attention("a window"), Attention()]
    # TransformerEngine's name of the way in which ranks share a sequence.
    layers[3].core_attention.cp_comm_type = "a2a"
    calls: list[int] = []
    for number, layer in enumerate(layers):
        layer.core_attention.forward = counted(
            layer.core_attention.forward, calls, number
        )
    check(*layers)
    assert calls == [0, 2, 3]


def counted(
    right: Callable[..., Tensor], calls: list[int], number: int
) -> Callable[..., Tensor]:
    def forward(*arguments: Any, **named: Any) -> Tensor:
        calls.append(number)
        return right(*arguments, **named)

    return forward


def test_no_hook_runs() -> None:
    """Those of data parallelism would gather the sinks, and leave other parameters on the way."""
    layer = Attention("sinks")
    layer.core_attention.register_forward_pre_hook(lambda *_: pytest.fail("a hook ran"))
    check(layer)


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is computed inside."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_scores_of_many_heads_are_not_held_together() -> None:
    """Sequences lengthen with the context parallel ranks: their scores would fill a GPU."""
    layer = Attention()
    layer.num_attention_heads_per_partition = heads = 64
    with Largest() as largest:
        check(layer)
    tokens = 2 * (1 + 32 + 19 + 96 + 7)
    assert largest.elements == tokens * heads * SIZE


@pytest.mark.process
def test_models_open_with_heads_of_all_sizes(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    jobs = ("qwen3 96", "gemma3 256", "gpt-oss 64", "deepseek-v3 192")
    rank_pool.run(Path(attention_ranks.__file__), jobs, world_size=1, folder=tmp_path)
    assert [(tmp_path / f"{job}.txt").read_text() for job in jobs] == [""] * 4


@pytest.mark.process
def test_a_model_without_its_weights_is_not_judged(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    """An export opens the model so: its sinks are NaN until the checkpoint is loaded."""
    job = "gpt-oss 64 unloaded"
    rank_pool.run(Path(attention_ranks.__file__), [job], world_size=1, folder=tmp_path)
    assert not (tmp_path / f"{job}.txt").read_text()


@pytest.mark.process
def test_a_critic_with_other_heads_is_checked_too(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    job = "qwen3 96 critic"
    rank_pool.run(Path(attention_ranks.__file__), [job], world_size=1, folder=tmp_path)
    message = (tmp_path / f"{job}.txt").read_text()
    assert (
        "the critic: the attention of this machine is wrong for heads of 96 dimensions"
        in message
    )


@pytest.mark.process
def test_ranks_that_share_sequences_check_what_they_send(
    tmp_path: Path, rank_pool: RankPool
):
    jobs = ("qwen3 64", "qwen3 64 lost")
    rank_pool.run(Path(attention_ranks.__file__), jobs, world_size=2, folder=tmp_path)
    for folder in (tmp_path, tmp_path / "1"):
        assert not (folder / f"{jobs[0]}.txt").read_text()
        assert "gradients of keys are " in (folder / f"{jobs[1]}.txt").read_text()


def test_attention_with_a_mask_never_runs_in_cudnn() -> None:
    Attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()

"""The kernels of flash_attn 2.8.3 by those of torch, which are the same FlashAttention 2.

peers.py brings this file as `flash_attn_2_cuda`, which no registry has built for such a machine.
Here is what trainers ask for: causal or plain attention without dropout, slopes, cap or cache.
"""

# ruff: noqa: ANN401 - flash_attn tells no types.

from __future__ import annotations

from typing import Any

import torch


def varlen_fwd(q: Any, k: Any, v: Any, _: Any, *more: Any) -> tuple[Any, ...]:
    """Returns output, logarithms of sums, an empty mask and the state of dropout."""
    starts_q, starts_k, used, pad, blocks, slopes, longest_q, longest_k, dropout, scale = more[:10]
    causal, left, right, cap = more[11:15]
    _check((used, pad, blocks, slopes), dropout, cap, left, right, causal)
    lengths = (starts_q, starts_k, longest_q, longest_k)
    out, sums, state, _, mask = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=scale
    )
    return out, sums, mask, state


def varlen_bwd(dout: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *more: Any) -> Any:
    """Writes the gradients into the tensors that the caller gives, and returns them."""
    *into, starts_q, starts_k, slopes, longest_q, longest_k, dropout, scale, _ = more[:11]
    causal, left, right, cap = more[11:15]
    _check((slopes,), dropout, cap, left, right, causal)
    lengths = (starts_q, starts_k, longest_q, longest_k)
    state = more[-1]
    unused = torch.empty((), dtype=state.dtype, device=state.device)
    found = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, sums, *lengths, 0.0, causal, state, unused, scale=scale
    )
    for mine, theirs in zip(found, into, strict=True):
        theirs.copy_(mine)
    return (*into, torch.empty(0, device=q.device))


def fwd(q: Any, k: Any, v: Any, _: Any, slopes: Any, *more: Any) -> tuple[Any, ...]:
    """Does what `varlen_fwd` does, for sequences of one length."""
    dropout, scale, *rest = more
    starts, longest = zip(*map(_starts, (q, k)), strict=True)
    packed = [each.flatten(0, 1) for each in (q, k, v)]
    none = (None, None, None, slopes)
    out, *others = varlen_fwd(*packed, None, *starts, *none, *longest, dropout, scale, False, *rest)
    return out.view(q.shape), *others


def bwd(dout: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *more: Any) -> tuple[Any, ...]:
    """Does what `varlen_bwd` does, for sequences of one length."""
    *into, slopes, dropout, scale = more[:6]
    starts, longest = zip(*map(_starts, (q, k)), strict=True)
    given = [each.flatten(0, 1) for each in (dout, q, k, v, out)]
    views = [each.view(-1, *each.shape[2:]) for each in into]
    lengths = (*starts, slopes, *longest, dropout, scale, False)
    return *into, varlen_bwd(*given, sums, *views, *lengths, *more[6:])[-1]


def _starts(each: Any) -> tuple[Any, int]:
    """Returns where the sequences of a batch begin, and their length."""
    batch, length = each.shape[:2]
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=each.device)
    return starts, length


def _check(
    absent: tuple[Any, ...], dropout: float, cap: float, left: int, right: int, causal: bool
) -> None:
    """Raises ValueError if more is asked for than torch's kernels are called with."""
    # flash_attn itself writes causal attention as no key to the right.
    plain = left == -1 and right in ((-1, 0) if causal else (-1,))
    if dropout or cap or not plain or any(each is not None for each in absent):
        raise ValueError("torch's kernels replace causal and plain attention only")

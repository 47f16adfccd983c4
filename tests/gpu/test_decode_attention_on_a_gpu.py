"""The kernel that reads the cache of steps without prompts, beside attention in float64."""

import pytest
import torch
from slipstream.extensions.fast_decoding.server.decode_attention import decode

BLOCK = 16
# The tokens of each context; the last row of a CUDA graph holds no request.
LENGTHS = (1, 15, 16, 17, 64, 65, 500, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(16, 8, 128), (32, 8, 64), (16, 1, 256)]
)
def test_each_request_attends_to_its_own_context(
    heads: int, groups: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    requests = len(LENGTHS)
    num_blocks = -(-max(LENGTHS) // BLOCK)
    # Blocks that no context holds are no numbers, nor are the tokens behind a context's end.
    cache = (
        torch.full((requests * num_blocks + 1, groups, BLOCK, 2 * size), torch.nan)
        .to(dtype)
        .cuda()
    )
    table = torch.zeros(requests, num_blocks, dtype=torch.int32, device="cuda")
    free = (1 + torch.randperm(requests * num_blocks)).tolist()
    # A layer computes them between its keys and values.
    queries = torch.randn(requests, heads + 2, size, device="cuda").to(dtype)[:, 1:-1]
    expected = torch.zeros(requests, heads, size, dtype=torch.float64)
    for request, length in enumerate(LENGTHS):
        context = torch.randn(length, groups, 2 * size, device="cuda").to(dtype)
        for start in range(0, length, BLOCK):
            part = context[start : start + BLOCK]
            table[request, start // BLOCK] = block = free.pop()
            cache[block, :, : len(part)] = part.transpose(0, 1)
        if length:
            key, value = (
                context.cpu()
                .double()
                .repeat_interleave(heads // groups, 1)
                .split(size, 2)
            )
            scores = (
                torch.einsum("hs,ths->ht", queries[request].cpu().double(), key)
                * size**-0.5
            )
            expected[request] = torch.einsum("ht,ths->hs", scores.softmax(1), value)
    output = torch.full((requests, heads, size), torch.nan, dtype=dtype, device="cuda")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")

    decode(queries, cache, table, lengths, size**-0.5, output)

    output_on_host = output.cpu().double()
    torch.testing.assert_close(output_on_host, expected, atol=2e-2, rtol=2e-2)
    assert (output_on_host - expected).norm() < (
        0.004 if dtype == torch.bfloat16 else 0.0006
    ) * expected.norm()

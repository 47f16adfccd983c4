"""What a GPU could sample: the tokens a second by bandwidth, and by bandwidth and matrix products.

    python -m benchmarks.rollout.limits                            # one GPU, half a minute
    python -m benchmarks.rollout.limits --shape qwen3-8b --device cpu --repeats 1   # a rehearsal

A step of `--concurrent` replies reads each weight and the whole KV cache once. *By bandwidth* that
is all it does, as fast as this GPU reads a large buffer. *With products* its matrix products, run
alone as one CUDA graph with weights of their own in each layer, take their time too, and the cache
is read after them: kernels that wait for memory and kernels that compute follow each other. In a
wave, replies have half of their tokens on average; in a flow of `flow.py`, whose replies have half
to one and a half times `--reply-tokens`, those under way are longer. Prints one table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common.measure import table
from benchmarks.common.shapes import SHAPES as MODELS
from benchmarks.common.shapes import Shape
from benchmarks.rollout.setup import SHAPES, add_size_arguments, fill_sizes

BUFFER_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}


def products(shape: Shape, replies: int, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """Returns all matrix products of one step, queries, keys and values in one as engines do."""

    def some(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=dtype, device=device).mul_(0.02)

    queries = shape.heads * shape.head_dim
    keys = shape.groups * shape.head_dim
    sizes = [(shape.hidden, queries + 2 * keys), (queries, shape.hidden)]
    sizes += [(shape.hidden, 2 * shape.intermediate), (shape.intermediate, shape.hidden)]
    weights = [some(outputs, inputs) for _ in range(shape.layers) for inputs, outputs in sizes]
    weights.append(some(shape.vocab, shape.hidden))
    rows = {inputs: some(replies, inputs) for inputs in {weight.shape[1] for weight in weights}}

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    if device == "cpu":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_s(work: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_size_arguments(parser)
    arguments = parser.parse_args()
    fill_sizes(arguments)
    shape = MODELS[SHAPES[arguments.shape]]
    device = arguments.device
    replies = arguments.concurrent
    dtype = getattr(torch, arguments.dtype)
    buffer = torch.zeros(BUFFER_BYTES[device] // 4, dtype=torch.float32, device=device)
    bandwidth = 4 * buffer.numel() / median_s(buffer.sum, device, arguments.repeats)
    del buffer
    products_s = median_s(products(shape, replies, dtype, device), device, arguments.repeats)
    # A step reads a few rows of embeddings that are no head.
    read = (size for name, size in shape.tensors() if shape.tied or "embed_tokens" not in name)
    weights = sum(torch.Size(size).numel() for size in read) * dtype.itemsize
    token_bytes = 2 * shape.layers * shape.groups * shape.head_dim * dtype.itemsize
    # A reply of n tokens is under way for n steps, so those under way have E(n^2) / 2E(n).
    length = arguments.reply_tokens
    contexts = {"wave": length / 2, "flow": length / 2 * (1 + 1 / 12)}
    rows = []
    for name, sampled in contexts.items():
        cache = replies * (arguments.prompt_tokens + sampled) * token_bytes
        by_bandwidth = (weights + cache) / bandwidth
        both_s = products_s + cache / bandwidth
        cells = [f"{replies / each:,.0f}" for each in (by_bandwidth, both_s)]
        rows.append([name, f"{cache / 1e9:.1f}", *cells])
    print(f"{bandwidth / 1e12:.2f} TB/s; products {1000 * products_s:.2f} ms a step;", end=" ")
    print(f"weights {weights / 1e9:.2f} GB")
    header = ["", "cache, GB", "tokens/s by bandwidth", "with products"]
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()

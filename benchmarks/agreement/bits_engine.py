"""An engine that computes the same tokens in several ways: the program of each mode of `bits`.

It does what each line of its input names, and answers with a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.agreement import bits_forward as learner
from benchmarks.common.measure import part

KINDS = (
    *("input_layernorm", "qkv_proj", "q_norm", "k_norm", "rotary_emb", "attn", "o_proj"),
    *("post_attention_layernorm", "gate_up_proj", "act_fn", "down_proj", "norm"),
)


@dataclass(frozen=True)
class Load:
    """How much is computed."""

    requests: int
    prompt: tuple[int, int]
    replies: tuple[int, int]
    batched_tokens: int
    # Requests, prompt and reply of the flow whose tokens/s are measured.
    flow: tuple[int, int, int]
    # Sequences of a learner's pass, and tokens in each.
    learner: tuple[int, int]


LOADS = {
    "cuda": Load(12, (20, 400), (16, 48), 2048, (384, 128, 384), (8, 2048)),
    "cpu": Load(10, (8, 120), (8, 24), 96, (16, 32, 32), (4, 128)),
}


@dataclass
class Capture:
    """The outputs of the parts of a model, by the place of a token: its position and itself."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    outputs: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def note(self, kind: str, layer: int, output: Any) -> None:  # noqa: ANN401 - a tensor
        """Keeps the output of one call."""
        # A copy: the engine's layers write into each other's outputs.
        self.outputs.setdefault((kind, layer), []).append(output.detach().clone())

    def rows(self, wanted: list[tuple[int, int]]) -> dict[tuple[str, int], Any]:
        """Returns the outputs in the order of `wanted`."""
        first: dict[tuple[int, int], int] = {}
        for row, key in enumerate(self.keys):
            first.setdefault(key, row)
        rows = [first[key] for key in wanted]
        return {
            name: torch.cat([x.flatten(1) if x.dim() > 1 else x for x in parts])[rows]
            for name, parts in self.outputs.items()
        }


@contextlib.contextmanager
def captured(inner: Any) -> Iterator[Capture]:  # noqa: ANN401 - vLLM's model
    """Notes the outputs of vLLM's layers in the block; `inner` is the model without its head."""
    found = Capture()
    calls: dict[str, int] = {}

    tokens: list[int] = []

    def begin(_module: Any, args: Any) -> None:  # noqa: ANN401
        tokens[:] = args[0].tolist()
        calls.clear()

    def hook(kind: str) -> Callable[..., None]:
        def keep(_module: Any, args: Any, output: Any) -> None:  # noqa: ANN401
            layer = calls.get(kind, 0)
            calls[kind] = layer + 1
            if kind == "rotary_emb":
                if layer == 0:
                    found.keys += list(zip(args[0].tolist(), tokens, strict=True))
                output = torch.cat([x.flatten(1) for x in output], dim=-1)
            elif isinstance(output, tuple):
                output = output[0]
            if kind in ("q_norm", "k_norm"):
                output = output.flatten(1)
            found.note(kind, len(inner.layers) if kind == "norm" else layer, output)

        return keep

    # The model itself is called past its hooks.
    handles = [inner.embed_tokens.register_forward_pre_hook(begin)]
    for name, module in inner.named_modules():
        kind = name.rpartition(".")[2]
        if kind in KINDS:
            handles.append(module.register_forward_hook(hook(kind)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def compare(
    ours: Capture, theirs: Capture, sequences: list[list[int]], layers: int
) -> dict[str, Any]:
    """Counts, for each kernel, rows that differ though all of their inputs are equal.

    Only places that belong to one sequence are compared; attention reads all earlier rows.
    """
    seen = Counter(place for one in sequences for place in enumerate(one))
    known = set(ours.keys) & set(theirs.keys)
    kept = [
        [place for place in enumerate(one) if seen[place] == 1 and place in known]
        for one in sequences
    ]
    wanted = [place for one in kept for place in one]
    left, right = ours.rows(wanted), theirs.rows(wanted)
    same = {name: (left[name] == right[name]).all(-1).cpu() for name in left}
    # Rows whose residual stream is equal: all that was added to it is.
    stream = before = torch.ones(len(wanted), dtype=torch.bool)
    counts: dict[str, list[int]] = {}
    first = ""
    for layer in range(layers + 1):
        for kind in KINDS[:-1] if layer < layers else KINDS[-1:]:
            if (kind, layer) not in same:
                continue
            equal = same[kind, layer]
            if kind in ("input_layernorm", "post_attention_layernorm", "norm"):
                inputs = stream
            elif kind == "k_norm":
                inputs = same["qkv_proj", layer]
            elif kind == "rotary_emb":
                # Llama has no norms of heads.
                product = same["qkv_proj", layer]
                inputs = same.get(("q_norm", layer), product) & same.get(("k_norm", layer), product)
            elif kind == "attn":
                own = (same["rotary_emb", layer] & same["qkv_proj", layer]).int()
                parts = own.split([len(one) for one in kept])
                inputs = torch.cat([one.cummin(0).values for one in parts]).bool()
            else:
                inputs = before
            if kind in ("o_proj", "down_proj"):
                stream = stream & equal
            entry = counts.setdefault(kind, [0, 0])
            entry[0] += int(inputs.sum())
            entry[1] += int((inputs & ~equal).sum())
            if not first and not bool(equal.all()):
                first = f"{kind} of layer {layer}"
            before = equal
    return {"rows": len(wanted), "first": first or "none", "kernels": counts}


class Engine:
    """An engine of one mode in this process."""

    def __init__(self, mode: str, arguments: argparse.Namespace) -> None:
        from vllm import LLM

        self.mode, self.arguments = mode, arguments
        self.on_gpu = arguments.device == "cuda"
        self.load = LOADS[arguments.device]
        self.is_eager = mode.startswith("eager") or not self.on_gpu
        more: dict[str, Any] = {}
        if self.on_gpu:
            more["kv_cache_memory_bytes"] = (6 if self.is_eager else 24) << 30
            more["gpu_memory_utilization"] = 0.1
        if mode.startswith("graphs"):
            more["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        self.llm = LLM(
            model=str(arguments.model_folder),
            dtype=arguments.dtype,
            enforce_eager=self.is_eager,
            enable_prefix_caching=False,
            max_model_len=2048 if self.on_gpu else 256,
            max_num_seqs=self.load.flow[0],
            max_num_batched_tokens=max(self.load.batched_tokens, self.load.flow[0]),
            hf_overrides={"head_dtype": arguments.head_dtype},
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            seed=0,
            **more,
        )
        self.device = torch.device(arguments.device)
        self.model: Any = self.llm.apply_model(lambda model: model)[0]
        self.vocab = json.loads((arguments.model_folder / "config.json").read_text())["vocab_size"]
        if mode == "fixed rows":
            _fix_rows(self.model, arguments.model_folder)

    def ask(
        self, prompts: list[list[int]], replies: list[int], *, scored: bool, first_seed: int = 0
    ) -> list[tuple[list[int], list[float]]]:
        """Returns tokens and log-probabilities of each reply, or of the prompt if `scored`."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                # vLLM's runner for CPUs has no seeds for prompts that are computed in parts.
                temperature=1.0 if self.on_gpu else 0.0,
                seed=first_seed + number if self.on_gpu else None,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                **({"prompt_logprobs": 0} if scored else {"logprobs": 0}),
            )
            for number, length in enumerate(replies)
        ]
        given = [{"prompt_token_ids": one} for one in prompts]
        found = []
        for prompt, output in zip(
            prompts, self.llm.generate(given, parameters, use_tqdm=False), strict=True
        ):
            if scored:
                rows = output.prompt_logprobs
                values = [rows[n][prompt[n]].logprob for n in range(1, len(prompt))]
                found.append((prompt, values))
                continue
            reply = output.outputs[0]
            tokens = list(reply.token_ids)
            pairs = zip(reply.logprobs, tokens, strict=True)
            found.append((tokens, [row[token].logprob for row, token in pairs]))
        return found

    def check(self) -> dict[str, Any]:
        """Compares the ways to compute the same tokens."""
        draw = random.Random(1)
        load = self.load
        prompts = [
            [draw.randrange(8, self.vocab) for _ in range(draw.randint(*load.prompt))]
            for _ in range(load.requests)
        ]
        replies = [draw.randint(*load.replies) for _ in prompts]
        captures: dict[str, Capture] = {}

        def way(name: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401
            if not self.is_eager:
                return work()
            with captured(self.model.model) as captures[name]:
                return work()

        sampled = way("sampled in a batch", lambda: self.ask(prompts, replies, scored=False))
        whole = [prompt + tokens for prompt, (tokens, _) in zip(prompts, sampled, strict=True)]
        ones = [1] * len(whole)
        alone = way(
            "prompts alone",
            lambda: [self.ask([one], [1], scored=True)[0] for one in whole],
        )
        batch = way("prompts in a batch", lambda: self.ask(whole, ones, scored=True))
        by_one = way(
            "sampled alone",
            lambda: [
                self.ask([prompts[n]], [replies[n]], scored=False, first_seed=n)[0]
                for n in range(len(prompts))
            ],
        )
        values = {
            "sampled in a batch": [x for _, x in sampled],
            "prompts in a batch": [x[-n:] for (_, x), n in zip(batch, replies, strict=True)],
            "sampled alone": [
                x[: _common(tokens, other)]
                for (tokens, x), (other, _) in zip(by_one, sampled, strict=True)
            ],
        }
        base = [x[-n:] for (_, x), n in zip(alone, replies, strict=True)]
        for name, given in self.learners(whole, captures).items():
            values[name] = [x[-n:] for x, n in zip(given, replies, strict=True)]
        return {
            "rotary_table": {"gap": self.table_gap, "numbers_that_differ": self.table_differs},
            "logprobs": {name: _differences(given, base) for name, given in values.items()},
            "kernels": {
                name: compare(
                    capture, captures["prompts alone"], whole, len(self.model.model.layers)
                )
                for name, capture in captures.items()
                if name != "prompts alone"
            },
        }

    def learners(
        self, whole: list[list[int]], captures: dict[str, Capture]
    ) -> dict[str, list[list[float]]]:
        """Returns the log-probabilities of all tokens but the first by each learner's pass."""
        weights, sizes = learner.load(self.arguments.model_folder, self.device)
        dtype, head = (
            getattr(torch, self.arguments.dtype),
            getattr(torch, self.arguments.head_dtype.replace("model", self.arguments.dtype)),
        )
        usual = (sizes, dtype, self.device, head)
        kernels = {"learner, torch's kernels": learner.TorchKernels(*usual)}
        if self.mode == "fixed rows":
            kernels["learner, the engine's kernels"] = learner.CpuKernels(*usual)
        if self.on_gpu and "invariant" in self.mode:
            kernels["learner, the engine's kernels"] = learner.EngineKernels(*usual)
            kernels["learner, the engine's kernels and pages"] = learner.EngineKernels(
                *usual, paged=True
            )
        packed = learner.Packed.of(whole, self.device)
        found = {}
        engine_table = self.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        self.table_gap = float((engine_table.cpu() - exact_table(sizes)).abs().max())
        self.table_differs = int((engine_table != kernels["learner, torch's kernels"].table).sum())
        for name, own in kernels.items():
            if "engine" in name:
                own.table = engine_table
            capture = captures[name] = Capture()
            capture.keys = list(zip(packed.positions.tolist(), packed.tokens.tolist(), strict=True))

            def note(kind: str, layer: int, x: Any, capture: Capture = capture) -> None:  # noqa: ANN401
                if self.is_eager:
                    capture.note(kind, layer, x.flatten(1))

            with torch.no_grad():
                hidden = learner.forward(weights, sizes, own, packed, note)
                values = own.logprobs(hidden, learner.head(weights), packed.tokens.roll(-1))
            found[name] = [x[:-1] for x in _split(values.tolist(), packed.lengths)]
            if not self.is_eager:
                del captures[name]
        return found

    def products(self) -> dict[str, Any]:
        """Compares products of few rows with those of many, for each matrix and kernel."""
        weights, _ = learner.load(self.arguments.model_folder, self.device)
        own = "model.layers.0."
        names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        matrices = {name: weights[f"{own}{name}.weight"] for name in names}
        matrices["head"] = learner.head(weights)
        kernels: dict[str, Any] = {"usual": F.linear, "fixed rows": learner.fixed_rows}
        if self.on_gpu:
            from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

            kernels = {"usual": F.linear, "invariant": linear_batch_invariant}
            if self.arguments.dtype != "float32":
                kernels["to float32"] = lambda x, w: torch.mm(x, w.t(), out_dtype=torch.float32)
        generator = torch.Generator().manual_seed(4)
        most, repeats = (2048, 20) if self.on_gpu else (256, 3)
        found: dict[str, Any] = {}
        for name, weight in matrices.items():
            rows = torch.randn(most, weight.shape[1], generator=generator)
            rows = rows.to(self.device, weight.dtype)
            order = torch.randperm(len(weight), generator=generator).to(self.device)
            for title, kernel in kernels.items():
                whole = kernel(rows, weight)
                parts = {
                    str(count): int((kernel(rows[:count], weight) != whole[:count]).any(-1).sum())
                    for count in (1, 2, 7, 16, 33, 100, 200)
                }
                moved = kernel(rows, weight[order])
                threads = _on_threads(2, kernel, rows, weight)
                times = []
                for count in (most // 8, most):
                    _wait(self.device)
                    started = time.perf_counter()
                    for _ in range(repeats):
                        kernel(rows[:count], weight)
                    _wait(self.device)
                    times.append((time.perf_counter() - started) / repeats)
                found[f"{name}, {title}"] = {
                    "rows_that_differ": parts,
                    "of_permuted_matrix": int((moved != whole[:, order]).any(-1).sum()),
                    "with_two_threads": int((threads != whole).any(-1).sum()),
                    "seconds": dict(zip((most // 8, most), times, strict=True)),
                }
        return found

    def speed(self) -> dict[str, float]:
        """Returns the tokens/s of replies, prompts included in the time."""
        requests, prompt, reply = self.load.flow
        draw = random.Random(2)
        prompts = [[draw.randrange(8, self.vocab) for _ in range(prompt)] for _ in range(requests)]
        started = time.perf_counter()
        self.ask(prompts, [reply] * requests, scored=False)
        return {"tokens_per_s": requests * reply / (time.perf_counter() - started)}

    def learn(self) -> dict[str, Any]:
        """Times a pass with gradients of each learner, and compares their gradients."""
        count, length = self.load.learner
        draw = random.Random(3)
        sequences = [[draw.randrange(8, self.vocab) for _ in range(length)] for _ in range(count)]
        packed = learner.Packed.of(sequences, self.device)
        dtype = getattr(torch, self.arguments.dtype)
        weights, sizes = learner.load(self.arguments.model_folder, self.device)
        usual = (sizes, dtype, self.device, torch.float32)
        kernels = {"torch": learner.TorchKernels(*usual)}
        failures: dict[str, str] = {}
        if self.mode == "fixed rows":
            kernels["engine"] = learner.CpuKernels(*usual)
        elif "invariant" in self.mode:
            kernels["engine"] = learner.EngineKernels(*usual)
            kernels["engine, torch's attention backwards"] = learner.EngineKernels(
                *usual, flash_backward=False
            )
        grads: dict[str, dict[str, Any]] = {}
        seconds: dict[str, list[float]] = {}

        def once(own: Any, leaves: dict[str, Any], few: Any) -> None:  # noqa: ANN401
            hidden = learner.forward(leaves, sizes, own, few, lambda *_: None)
            values = own.logprobs(hidden, learner.head(leaves), few.tokens.roll(-1))
            values.mean().backward()

        # On the CPU, where vLLM has not replaced torch's products.
        cpu = torch.device("cpu")
        short = [one[:64] for one in sequences[:2]]
        few = learner.Packed.of(short, self.device)
        exact = {name: x.to(cpu, torch.double).requires_grad_() for name, x in weights.items()}
        exact_kernels = learner.TorchKernels(sizes, torch.double, cpu, torch.double)
        exact_kernels.table = kernels["torch"].table.to(cpu, torch.double)
        once(exact_kernels, exact, learner.Packed.of(short, cpu))
        for name, own in kernels.items():
            with part(f"learner with kernels of {name}", failures):
                leaves = {key: x.clone().requires_grad_() for key, x in weights.items()}
                once(own, leaves, few)
                grads[name] = {
                    key: _error(leaves[key].grad.to(cpu), x.grad) for key, x in exact.items()
                }
                for _ in range(4):
                    for leaf in leaves.values():
                        leaf.grad = None
                    _wait(self.device)
                    started = time.perf_counter()
                    once(own, leaves, packed)
                    _wait(self.device)
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                del leaves
        tokens = count * length
        return {
            "tokens_per_s": {
                name: [tokens / one for one in found[1:]] for name, found in seconds.items()
            },
            "largest_gradient_error": {
                name: max((error, key) for key, error in found.items())
                for name, found in grads.items()
            },
            "failures": failures,
        }


def exact_table(sizes: Any) -> Any:  # noqa: ANN401 - a tensor
    """Returns cosines and sines of all positions, of angles in double precision."""
    steps = torch.arange(0, sizes.head_dim, 2, dtype=torch.double) / sizes.head_dim
    angles = torch.arange(sizes.max_positions).double()[:, None] * sizes.theta**-steps
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _on_threads(number: int, kernel: Any, *inputs: Any) -> Any:  # noqa: ANN401
    """Returns the result of `kernel` on `number` threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return kernel(*inputs)
    finally:
        torch.set_num_threads(before)


def _error(found: Any, exact: Any) -> float:  # noqa: ANN401 - tensors
    """Returns the distance as a share of what is exact."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def _wait(device: Any) -> None:  # noqa: ANN401

    if device.type == "cuda":
        torch.cuda.synchronize()


def _fix_rows(model: Any, folder: Path) -> None:  # noqa: ANN401
    """Makes the products of vLLM's layers on CPUs those of blocks of a fixed number of rows."""
    weights, _ = learner.load(folder, torch.device("cpu"))

    def product(weight: Any) -> Any:  # noqa: ANN401
        return lambda x, _weight, _bias: learner.fixed_rows(x, weight)

    for name, module in model.named_modules():
        if f"{name}.weight" in weights and hasattr(module, "cpu_linear"):
            module.cpu_linear = product(weights[f"{name}.weight"])
    scores = model.logits_processor
    head = learner.head(weights).to(scores.head_dtype)
    scores._apply_head = lambda _head, x, _bias: learner.fixed_rows(x.to(head.dtype), head)


def _common(left: list[int], right: list[int]) -> int:
    """Returns how many tokens agree from the beginning, and one more: its logits are the same."""
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        if one != other:
            return place
    return len(left)


def _split(values: list[float], lengths: list[int]) -> list[list[float]]:
    found, begin = [], 0
    for length in lengths:
        found.append(values[begin : begin + length])
        begin += length
    return found


def _differences(given: list[list[float]], base: list[list[float]]) -> dict[str, float]:
    """Returns tokens, those whose bits differ, and the mean and largest distance in nats."""
    pairs = [(a, b) for x, y in zip(given, base, strict=True) for a, b in zip(x, y, strict=False)]
    left, right = np.asarray(pairs, dtype=np.float32).T
    gaps = np.abs(left.astype(np.float64) - right)
    return {
        "tokens": len(pairs),
        "differ": int((left != right).sum()),
        "mean": float(gaps.mean()),
        "largest": float(gaps.max()),
    }


def main() -> None:
    """Loads the engine of a mode, and serves."""
    parser = argparse.ArgumentParser()
    for name in ("mode", "device", "dtype", "head-dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model-folder", type=Path, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    # Whatever libraries print belongs into the log.
    os.dup2(2, 1)
    engine = Engine(arguments.mode, arguments)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            found = getattr(engine, line.strip())()
            gc.collect()
            if engine.on_gpu:
                torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001 - the answer says it, the log has the traceback
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""The peers of the weight broadcast; `broadcast.py` starts them as programs.

- `raw`: one rank that broadcasts one large buffer, by cupy's NCCL on GPUs, by gloo on CPUs.
- `trainer` and `server`: vLLM's own transfer, its public `nccl` backend with packed tensors.

Each reads one JSON object a line from its standard input and answers each with one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

Message = dict[str, Any]
# Trainer and workers import it, each before they join.
NCCL = "benchmarks.common.older_nccl"
# Tokens of the longest episode of a server.
MAX_MODEL_LEN = 1024


class Pipe:
    """Exchanges lines of JSON with the program that started this process."""

    def __init__(self) -> None:
        # Output of libraries goes to stderr, so that it does not come between the answers.
        self._out: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def put(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        print(json.dumps(message), file=self._out, flush=True)

    def get(self) -> Message:
        """Reads one line; EOFError at the end of the input."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        message: Message = json.loads(line)
        return message


def raw(arguments: argparse.Namespace, pipe: Pipe) -> None:
    """Commands: join (rank, world_size, meeting), broadcast (num_bytes)."""
    import torch  # noqa: F401 - early: it takes seconds, and the GPU is not touched

    broadcast: Callable[[int], dict[str, float]] | None = None
    if arguments.device == "cuda" and arguments.rank == 0:
        from cupy.cuda import nccl

        unique = nccl.get_unique_id()
        raw_id = unique if isinstance(unique, bytes) else bytes(part & 255 for part in unique)
        pipe.put(meeting=raw_id.hex())
    else:
        pipe.put(meeting="")
    while True:
        message = pipe.get()
        if message["do"] == "join":
            join = _join_nccl if arguments.device == "cuda" else _join_gloo
            broadcast = join(arguments.rank, message["world_size"], message["meeting"])
            pipe.put(joined=True)
        else:
            assert broadcast is not None
            pipe.put(**broadcast(message["num_bytes"]))


def _join_nccl(rank: int, world_size: int, meeting: str) -> Callable[[int], dict[str, float]]:
    """Returns a function that broadcasts and returns its seconds.

    `wire_s` are those of the device, `host_s` those of the host.
    """
    import cupy
    import torch
    from cupy.cuda import nccl

    torch.cuda.set_device(0)
    cupy.cuda.Device(0).use()
    communicator = nccl.NcclCommunicator(world_size, bytes.fromhex(meeting), rank)
    stream = torch.cuda.Stream()
    buffers: dict[int, torch.Tensor] = {}

    def send(tensor: torch.Tensor) -> None:
        pointer = tensor.data_ptr()
        size = tensor.numel()
        communicator.broadcast(pointer, pointer, size, nccl.NCCL_UINT8, 0, stream.cuda_stream)

    def broadcast(num_bytes: int) -> dict[str, float]:
        if num_bytes not in buffers:
            buffers.clear()
            buffers[num_bytes] = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
            # NCCL connects at the first broadcast.
            send(buffers[num_bytes])
        token = torch.zeros(1, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        send(token)
        stream.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record(stream)
        send(buffers[num_bytes])
        end.record(stream)
        stream.synchronize()
        host_s = time.perf_counter() - started
        return {"wire_s": begin.elapsed_time(end) / 1e3, "host_s": host_s}

    return broadcast


def _join_gloo(rank: int, world_size: int, meeting: str) -> Callable[[int], dict[str, float]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    buffers: dict[int, torch.Tensor] = {}

    def broadcast(num_bytes: int) -> dict[str, float]:
        buffer = buffers.setdefault(num_bytes, torch.zeros(num_bytes, dtype=torch.uint8))
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(buffer, 0)
        seconds = time.perf_counter() - started
        return {"wire_s": seconds, "host_s": seconds}

    return broadcast


class PipeClient:
    """Passes calls of vLLM's trainer engine to the servers, over the pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def init_weight_transfer_engine(self, init_info: Message) -> None:
        """Returns when all servers have joined."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", None)

    def update_weights(self, update_info: Message) -> None:
        """Returns when all servers have loaded the weights."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", None)

    def _call(self, name: str, info: Message | None) -> None:
        self._pipe.put(call=name, info=info)
        answer = self._pipe.get()
        if answer.get("error"):
            raise RuntimeError(answer["error"])


def trainer(arguments: argparse.Namespace, pipe: Pipe) -> None:
    """Commands: join (world_size, port), send.

    The weights lie on this program's GPU, in the data type of the wire.
    """
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )

    import_module(NCCL)
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(Path(arguments.model).glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cuda:0") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    class Loaded(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in weights.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(weights.items())

    pipe.put(num_bytes=sum(tensor.nbytes for tensor in weights.values()))
    engine: NCCLTrainerWeightTransferEngine | None = None
    while True:
        message = pipe.get()
        if message["do"] == "join":
            init = NCCLTrainerInitInfo(
                master_address="127.0.0.1",
                master_port=message["port"],
                world_size=message["world_size"],
                packed=True,
                rank=0,
            )
            engine = NCCLTrainerWeightTransferEngine.trainer_init(
                init, client=PipeClient(pipe), source=Loaded()
            )
            group = engine.model_update_group
            if group is None or group.disabled:
                raise RuntimeError("vLLM's communicator is switched off: it would send nothing")
            pipe.put(joined=True)
        else:
            assert engine is not None
            started = time.perf_counter()
            engine.send_weights()
            pipe.put(seconds=time.perf_counter() - started)


async def serve(arguments: argparse.Namespace, pipe: Pipe) -> None:
    """Commands: first go, then pause, resume, call (name, info), load (requests), unload."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    pipe.put(imported=True)
    # The engine starts on "go": another engine may be measuring this GPU's memory before that.
    assert pipe.get()["do"] == "go"
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=arguments.max_num_seqs,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            tensor_parallel_size=arguments.tensor_parallel_size,
            enforce_eager=arguments.enforce_eager,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="nccl"),
            worker_extension_cls=f"{NCCL}.Extension",
        )
    )
    requests: list[asyncio.Task[None]] = []
    options = {"max_tokens": MAX_MODEL_LEN - 16, "ignore_eos": True, "detokenize": False}
    parameters = SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY)

    async def generate(number: int) -> None:
        prompt = {"prompt_token_ids": [1, 4 + number % 100, 5, 3]}
        async for _ in engine.generate(prompt, parameters, request_id=f"r{number}"):
            pass

    async def carry_out(message: Message) -> None:
        if message["do"] == "pause":
            await engine.pause_generation(mode="keep", clear_cache=True)
        elif message["do"] == "resume":
            await engine.resume_generation()
        elif message["do"] == "load":
            numbers = range(len(requests), len(requests) + message["requests"])
            requests.extend([asyncio.create_task(generate(number)) for number in numbers])
        elif message["do"] == "unload":
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        elif message["name"] == "init_weight_transfer_engine":
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(message["info"]))
        elif message["name"] == "update_weights":
            await engine.update_weights(WeightTransferUpdateRequest(message["info"]))
        elif message["name"] == "start_weight_update":
            await engine.start_weight_update()
        else:
            await engine.finish_weight_update()

    pipe.put(ready=True)
    try:
        while True:
            message = await asyncio.to_thread(pipe.get)
            started = time.perf_counter()
            await carry_out(message)
            pipe.put(seconds=time.perf_counter() - started)
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("role", choices=("raw", "trainer", "server"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--model", default="")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
    arguments = parser.parse_args()
    pipe = Pipe()
    try:
        if arguments.role == "server":
            asyncio.run(serve(arguments, pipe))
        else:
            {"raw": raw, "trainer": trainer}[arguments.role](arguments, pipe)
    except EOFError:
        return
    except Exception as error:
        pipe.put(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()

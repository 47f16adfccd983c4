"""prime-rl's inference server on the vLLM that is installed, as a program of prime.py.

prime-rl of August 2026 is written for vLLM 0.26. Version 0.32 has two modules elsewhere, gives
`LogitsProcessor._get_logits` one more argument, and serves tokens in and tokens out without
prime-rl's subclass. The rest of prime-rl's server runs as it is: its settings, routes, float32
logits, and the workers that receive weights.

Replies get the lengths of the work, and the first request waits for the gate.
"""

# ruff: noqa: ANN401 - vLLM and prime-rl tell no types.

from __future__ import annotations

import asyncio
import functools
import os
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.whole_systems.work import Work

# Where prime-rl looks for a module of vLLM, and where it is.
MOVED = {
    "vllm.entrypoints.openai.cli_args": "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.engine.protocol": "vllm.entrypoints.serve.engine.protocol",
}
# The files by which compare.py leads this system.
THIS = "benchmarks.whole_systems.prime_server"
ASKED = "WHOLE_SYSTEMS_ASKED"
GATE = "WHOLE_SYSTEMS_GATE"


@functools.cache
def named(kind: Any) -> Any:
    """Returns a subclass of vLLM's answer whose log-probabilities have the names of tokens too."""

    class Named(kind):  # type: ignore[misc]
        def model_dump(self, **options: Any) -> dict[str, Any]:
            told: dict[str, Any] = super().model_dump(**options)
            for choice in told["choices"]:
                for token in choice["logprobs"]["content"]:
                    token["token"] = f"token_id:{token['token_id']}"
            return told

    return Named


def forced(serving: Any) -> Any:
    """Returns a subclass of vLLM's `ServingTokens` that samples the lengths of the work."""

    class Forced(serving):  # type: ignore[misc]
        _drawn = 0

        async def serve_tokens(self, request: Any, raw_request: Any = None) -> Any:
            place = Forced._drawn
            Forced._drawn += 1
            request.sampling_params.max_tokens = Work.of_environ().length(place)
            request.sampling_params.ignore_eos = True
            if ASKED in os.environ:
                Path(os.environ[ASKED]).touch()
                while not Path(os.environ[GATE]).exists():
                    await asyncio.sleep(0.1)
            answer = await super().serve_tokens(request, raw_request)
            if hasattr(answer, "choices"):
                answer.__class__ = named(type(answer))
            return answer

    return Forced


def adapt() -> None:
    """Lets prime-rl's server be imported and started on this vLLM."""
    for old, new in MOVED.items():
        package = old.rpartition(".")[0]
        if package not in sys.modules:
            try:
                import_module(package)
            except ModuleNotFoundError:
                sys.modules[package] = types.ModuleType(package)
        sys.modules[old] = import_module(new)
    tokens = import_module("vllm.entrypoints.scale_out.token_in_token_out.serving")
    own = types.ModuleType("prime_rl.inference.vllm.serving_tokens")
    own.PrimeRlServingTokens = forced(tokens.ServingTokens)  # type: ignore[attr-defined]
    sys.modules[own.__name__] = own
    server = import_module("prime_rl.inference.vllm.server")
    # prime-rl replaces both in vLLM's old module; `run_server` takes them from where they are now.
    entry = import_module("vllm.entrypoints.launchers.api_server.entry")
    entry.init_app_state = server.custom_init_app_state  # type: ignore[attr-defined]
    entry.build_app = server.custom_build_app  # type: ignore[attr-defined]
    for kind, name in server.WORKER_EXTENSION_CLS.items():
        server.WORKER_EXTENSION_CLS[kind] = f"{THIS}.{name.rpartition('.')[2]}"


def __getattr__(name: str) -> Any:
    """Returns prime-rl's extension of a worker; vLLM asks for it by name in the worker."""
    if not name.endswith("WeightUpdateWorker"):
        raise AttributeError(name)
    module = {"NCCLWeightUpdateWorker": "nccl", "FileSystemWeightUpdateWorker": "filesystem"}[name]
    found = getattr(import_module(f"prime_rl.inference.vllm.worker.{module}"), name)
    logits = import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
    patched = logits._get_logits

    def get_logits(self: Any, hidden: Any, head: Any, bias: Any, skip_gather: bool = False) -> Any:
        if skip_gather:
            raise NotImplementedError("prime-rl's logits are gathered")
        return patched(self, hidden, head, bias)

    logits._get_logits = get_logits
    return found


def main() -> None:
    """Runs prime-rl's `inference` with the arguments of this process."""
    adapt()
    import_module("prime_rl.entrypoints.inference").main()


if __name__ == "__main__":
    main()

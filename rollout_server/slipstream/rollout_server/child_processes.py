"""Child processes of the server: their environment variables, and how they end with the server."""

import contextlib
import importlib.util
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from slipstream.core.errors import NOT_STARTED
from slipstream.core.machine.description import installed
from slipstream.core.machine.files import MAX_SOCKET_PATH_BYTES, OwnedFolder
from slipstream.core.machine.gpus import ALL_BITS
from slipstream.core.machine.process import (
    die_with_parent,
    kernel_oom_kills,
    without_collections,
)
from slipstream.core.settings.config import Config

# Parts of the messages with which vLLM and `Engine.watch` report that the engine process is gone.
_GONE = ("See stack trace (above)", "engine process is gone")

_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The number of outputs that vLLM handles before any other task has its turn. At a pause each
    # request has an output, and the answer to the pause is queued behind these outputs: 128 of them
    # take 3 to 8 ms.
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "16",
    # Arrays up to this many bytes travel within their message. vLLM's own 256 would give each
    # reply's kept tokens and experts a frame of their own, 30 in a step.
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": "65536",
}
_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
_LOCAL_RANK = "VLLM_DP_RANK_LOCAL"

# A slash and the UUID with which vLLM names a socket.
_SOCKET_NAME_BYTES = 37


def import_engine(config: Config) -> None:
    """Imports vLLM and the modules of the server.

    Ends this process with code NOT_STARTED if that exceeds `rollout_server.start_timeout_s`.
    """
    on_cpu = is_cpu_build()
    set_engine_environment(config, on_cpu=on_cpu)
    with limited_start(config.rollout_server.start_timeout_s), without_collections():
        for name in ("vllm.engine", "episodes.renderer", "service"):
            importlib.import_module(f"slipstream.rollout_server.{name}")
        importlib.import_module("transformers")
        if on_cpu:
            # The engine would import this module at its start.
            importlib.import_module("vllm.v1.worker.cpu_worker")


def set_engine_environment(config: Config, *, on_cpu: bool) -> None:
    """Sets the environment variables that vLLM reads when it is imported."""
    # Kubernetes writes the address of a service named vllm where vLLM reads the number of a port.
    if "://" in os.environ.get("VLLM_PORT", ""):
        del os.environ["VLLM_PORT"]
    os.environ.update(engine_environment(config, on_cpu=on_cpu))


def variable_problems() -> Iterator[str]:
    """Yields one line for each environment variable that vLLM cannot read; does not import vLLM."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    readers = runpy.run_path(str(Path(str(package.origin)).with_name("envs.py")))
    # The reader that is left out looks for its own module.
    for name in readers["environment_variables"].keys() & os.environ.keys() - {_LOCAL_RANK}:
        try:
            value = readers["environment_variables"][name]()
            if name == _LOG_LEVEL:
                logging.Handler(value)
        except (KeyError, ValueError) as error:
            yield f"the environment variable {name}, which vLLM reads, is wrong: {error}"


def engine_environment(config: Config, *, on_cpu: bool) -> dict[str, str]:
    """Returns the environment variables that vLLM reads when it is imported."""
    settings = config.rollout_server
    # The user's own level shows more of vLLM in the server's log.
    variables = _VARIABLES | {_LOG_LEVEL: os.environ.get(_LOG_LEVEL, "WARNING")}
    if config.algorithm.agreement == "bits":
        # A row must not depend on the other rows of a batch, nor attention on the number of keys.
        variables |= {"VLLM_CPU_ATTN_SPLIT_KV": "0"} if on_cpu else {"VLLM_BATCH_INVARIANT": "1"}
    if not on_cpu:
        return variables | ALL_BITS if config.model.dtype == "float32" else variables
    if settings.is_eager(on_cpu=True):
        # Even in eager mode, the first request for log-probabilities would compile a kernel, which
        # fails without a compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if settings.threads:
        variables["OMP_NUM_THREADS"] = str(settings.threads)
    return variables


@contextlib.contextmanager
def engine_folder() -> Iterator[Path]:
    """Yields a folder for files that vLLM never deletes, and deletes it after the block.

    An engine started in the block has its sockets there, unless the folder's path is too long.
    """
    with contextlib.closing(OwnedFolder("sockets")) as folder:
        if len(os.fsencode(folder.path)) + _SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES:
            os.environ["VLLM_RPC_BASE_PATH"] = str(folder.path)
        yield folder.path


def store_url(folder: Path) -> str:
    """Returns where the workers of the engine with this `engine_folder` meet.

    On a CPU vLLM names the memory that they share by the last part alone: it is of no other engine.
    """
    return f"file://{folder / folder.name}"


def is_cpu_build() -> bool:
    """Returns whether the installed vLLM is the build for CPUs; does not import vLLM."""
    return bool(installed(["vllm-cpu"]))


@contextlib.contextmanager
def limited_start(limit_s: float) -> Iterator[None]:
    """Ends this process with code NOT_STARTED if the block takes more than `limit_s`.

    vLLM itself has no time limit for its start.
    """

    def abandon() -> None:
        print(f"slipstream: the engine did not start within {limit_s:g} s", file=sys.stderr)
        os._exit(NOT_STARTED)

    timer = threading.Timer(limit_s, abandon)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_engine_death(message: str, *, oom_kills: int) -> str:
    """Returns the text that says why the engine died; `message` is the text of its error.

    `oom_kills` is the value of `kernel_oom_kills` when the engine was started.
    """
    if not any(words in message for words in _GONE):
        return message
    if kernel_oom_kills() > oom_kills:
        return "memory was full, so the kernel ended a process; give the run more memory"
    return "vLLM's engine process has ended: by the error above in the log, or by a signal"


def bind_children() -> None:
    """Makes Linux kill each process that is forked from now on when its parent ends.

    vLLM's engine process does not notice the end of its parent. Forked processes also get their own
    process group, so that Ctrl-C in a terminal reaches only the server.
    """
    parent = os.getpid()

    def remember() -> None:
        nonlocal parent
        parent = os.getpid()

    def follow() -> None:
        die_with_parent()
        # Python would otherwise tell the server's event loop of the child's signals.
        signal.set_wakeup_fd(-1)
        # Ctrl-C in a terminal must reach only the server, which stops the engine after its
        # requests have ended.
        os.setpgrp()
        if os.getppid() != parent:
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=follow)

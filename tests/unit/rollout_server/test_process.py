import os
import subprocess
import sys

import pytest
from slipstream.core.errors import NOT_STARTED
from slipstream.core.machine.gpus import ALL_BITS
from slipstream.core.machine.process import kernel_oom_kills
from slipstream.rollout_server.process import (
    describe_engine_death,
    engine_environment,
    set_engine_environment,
)
from support.fakes.small_configs import small_config
from support.rigs.waiting import LIMIT_S
from vllm.v1.engine.exceptions import EngineDeadError

START = """
import sys, time
from slipstream.rollout_server.process import limited_start
with limited_start(float(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.process
def test_a_start_that_takes_too_long_ends_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", START, "0.05", "3600"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == NOT_STARTED
    assert run.stderr == "slipstream: the engine did not start within 0.05 s\n"


@pytest.mark.process
def test_a_start_in_time_goes_on() -> None:
    start = [sys.executable, "-c", START, str(LIMIT_S), "0"]
    assert subprocess.run(start, timeout=LIMIT_S).returncode == 0


FORK = """
import asyncio, os, signal
from slipstream.rollout_server.process import bind_children
import uvloop
async def main():
    loop = asyncio.get_running_loop()
    bind_children()
    told = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        # vLLM's engine does the same.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
        os.write(write, b"1")
        # signal.pause would wait for ever if the signal came just before it.
        while True:
            os.sched_yield()
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    await asyncio.sleep(0.1)
    print(told.is_set())
uvloop.run(main())
"""


@pytest.mark.process
def test_a_signal_to_the_engine_is_none_to_the_server() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (run.returncode, run.stdout) == (0, "False\n"), run.stderr


def test_the_death_of_an_engine_is_told_with_a_memory_that_was_full() -> None:
    now = kernel_oom_kills()
    gone = str(EngineDeadError())
    ended = "vLLM's engine process has ended: by the error above in the log, or by a signal"
    assert describe_engine_death(gone, oom_kills=now) == ended
    assert describe_engine_death("no answer", oom_kills=now) == "no answer"
    # The kernel seems to have ended a process since the start.
    full = "memory was full, so the kernel ended a process; give the run more memory"
    assert describe_engine_death(gone, oom_kills=now - 1) == full
    # It may have been a process of another program: an engine that is there has its own cause.
    assert describe_engine_death("no answer", oom_kills=now - 1) == "no answer"


def test_the_engine_on_a_cpu_is_told_its_threads() -> None:
    config = small_config(rollout_server={"threads": 3})
    variables = engine_environment(config, on_cpu=True)
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
    on_gpu = engine_environment(config, on_cpu=False)
    assert "OMP_NUM_THREADS" not in on_gpu
    assert on_gpu["VLLM_NO_USAGE_STATS"] == "1"


def test_products_of_float32_keep_their_bits_on_a_gpu() -> None:
    exact = small_config(model={"path": "model", "dtype": "float32"})
    half = small_config(model={"path": "model", "dtype": "bfloat16"})
    assert engine_environment(exact, on_cpu=False).items() >= ALL_BITS.items()
    assert not ALL_BITS.keys() & engine_environment(half, on_cpu=False).keys()
    assert not ALL_BITS.keys() & engine_environment(exact, on_cpu=True).keys()


def test_the_engine_on_a_cpu_compiles_where_it_is_asked_for() -> None:
    compiled = small_config(rollout_server={"enforce_eager": False})
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(compiled, on_cpu=True)


@pytest.mark.parametrize(("port", "kept"), [("tcp://10.0.0.1:8000", None), ("8000", "8000")])
def test_an_address_of_kubernetes_is_no_port_of_vllm(monkeypatch, port, kept) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {**os.environ, "VLLM_PORT": port})
        set_engine_environment(small_config(), on_cpu=True)
        assert os.environ.get("VLLM_PORT") == kept
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_vllm_logs_at_the_users_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert engine_environment(small_config(), on_cpu=True)["VLLM_LOGGING_LEVEL"] == "WARNING"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert engine_environment(small_config(), on_cpu=True)["VLLM_LOGGING_LEVEL"] == "INFO"


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_pause_is_heard_of_between_the_outputs_that_it_hands_out(on_cpu: bool) -> None:
    variables = engine_environment(small_config(), on_cpu=on_cpu)
    assert int(variables["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"]) < 128


def test_engines_with_the_learners_bits_never_split_a_row() -> None:
    config = small_config(algorithm={"agreement": "bits"})
    assert engine_environment(config, on_cpu=True)["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert engine_environment(config, on_cpu=False)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in engine_environment(small_config(), on_cpu=False)

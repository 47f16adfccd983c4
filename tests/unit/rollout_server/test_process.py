import importlib.util
import os
import subprocess
import sys

import pytest
from slipstream.core.errors import (
    FAILED,
    NOT_STARTED,
    USAGE_ERROR,
    ConfigError,
    RunFailed,
)
from slipstream.core.machine.gpus import ALL_BITS
from slipstream.core.machine.process import kernel_oom_kills
from slipstream.rollout_server.__main__ import report
from slipstream.rollout_server.child_processes import (
    describe_engine_death,
    engine_environment,
    engine_folder,
    set_engine_environment,
    store_url,
    variable_problems,
)
from support.fakes.small_configs import small_config
from support.rigs.waiting import LIMIT_S
from vllm.v1.engine.exceptions import EngineDeadError

START = """
import sys, time
from slipstream.rollout_server.child_processes import limited_start
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
from slipstream.rollout_server.child_processes import bind_children
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
    ended = (
        "vLLM's engine process has ended: by the error above in the log, or by a signal"
    )
    assert describe_engine_death(gone, oom_kills=now) == ended
    assert describe_engine_death("no answer", oom_kills=now) == "no answer"
    # The kernel seems to have ended a process since the start.
    full = "memory was full, so the kernel ended a process; give the run more memory"
    assert describe_engine_death(gone, oom_kills=now - 1) == full
    # The killed process may have been a process of another program: an engine that is there has
    # its own cause.
    assert describe_engine_death("no answer", oom_kills=now - 1) == "no answer"


ON_CPU = True
ON_GPU = False


@pytest.mark.parametrize(
    ("settings", "on_cpu", "told"),
    [
        ({}, ON_CPU, {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}),
        ({}, ON_GPU, {"OMP_NUM_THREADS": None, "VLLM_BATCH_INVARIANT": None}),
        ({"rollout_server": {"threads": 3}}, ON_CPU, {"OMP_NUM_THREADS": "3"}),
        ({"rollout_server": {"threads": 3}}, ON_GPU, {"OMP_NUM_THREADS": None}),
        (
            {"rollout_server": {"enforce_eager": False}},
            ON_CPU,
            {"TORCHDYNAMO_DISABLE": None},
        ),
        # Engines with the learner's bits never split a row.
        ({"algorithm": {"agreement": "bits"}}, ON_CPU, {"VLLM_CPU_ATTN_SPLIT_KV": "0"}),
        ({"algorithm": {"agreement": "bits"}}, ON_GPU, {"VLLM_BATCH_INVARIANT": "1"}),
        # Products of float32 keep their bits on a GPU.
        ({"model": {"path": "model", "dtype": "float32"}}, ON_GPU, ALL_BITS),
        (
            {"model": {"path": "model", "dtype": "float32"}},
            ON_CPU,
            dict.fromkeys(ALL_BITS),
        ),
        (
            {"model": {"path": "model", "dtype": "bfloat16"}},
            ON_GPU,
            dict.fromkeys(ALL_BITS),
        ),
    ],
)
def test_the_engine_is_told_what_follows_from_the_settings(
    settings, on_cpu, told
) -> None:
    variables = engine_environment(small_config(**settings), on_cpu=on_cpu)
    assert {name: variables.get(name) for name in told} == told
    # A pause is heard of between the outputs that it hands out.
    assert int(variables["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"]) < 128


@pytest.mark.parametrize(
    ("port", "kept"), [("tcp://10.0.0.1:8000", None), ("8000", "8000")]
)
def test_an_address_of_kubernetes_is_no_port_of_vllm(monkeypatch, port, kept) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {**os.environ, "VLLM_PORT": port})
        set_engine_environment(small_config(), on_cpu=True)
        assert os.environ.get("VLLM_PORT") == kept
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(
    ("name", "wrong", "right", "cause"),
    [
        (
            "VLLM_CPU_KVCACHE_SPACE",
            "lots",
            "1",
            "invalid literal for int() with base 10: 'lots'",
        ),
        ("VLLM_LOGGING_LEVEL", "LOUD", "debug", "Unknown level: 'LOUD'"),
        (
            "VLLM_WORKER_MULTIPROC_METHOD",
            "thread",
            "fork",
            "Invalid value 'thread' for ",
        ),
        # The variable's reader looks for another one in vLLM's own module, and is left out.
        ("VLLM_DP_RANK_LOCAL", None, "0", ""),
    ],
)
def test_a_variable_that_vllm_cannot_read_is_named(
    monkeypatch, name, wrong, right, cause
) -> None:
    monkeypatch.setenv(name, right)
    assert [*variable_problems()] == []
    if wrong is not None:
        monkeypatch.setenv(name, wrong)
        (problem,) = variable_problems()
        assert problem.startswith(
            f"the environment variable {name}, which vLLM reads, is wrong: "
        )
        assert cause in problem


def test_a_variable_whose_reader_looks_something_up_is_named(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    text = "environment_variables = {'VLLM_KIND': lambda: {'a': 1}['b']}"
    (tmp_path / "vllm/envs.py").write_text(text)
    spec_from_file_location = importlib.util.spec_from_file_location(
        "vllm", tmp_path / "vllm/__init__.py"
    )
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec_from_file_location
    )
    monkeypatch.setenv("VLLM_KIND", "b")
    message = "the environment variable VLLM_KIND, which vLLM reads, is wrong: 'b'"
    assert [*variable_problems()] == [message]


def test_vllm_logs_at_the_users_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert (
        engine_environment(small_config(), on_cpu=True)["VLLM_LOGGING_LEVEL"]
        == "WARNING"
    )
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert (
        engine_environment(small_config(), on_cpu=True)["VLLM_LOGGING_LEVEL"] == "INFO"
    )


def test_only_wrong_settings_alone_keep_a_server_from_being_started_again(
    capsys,
) -> None:
    wrong_setting = ConfigError("queue.kind")
    other_cause = RunFailed("no disk")
    assert report(BaseExceptionGroup("", [wrong_setting])) == USAGE_ERROR
    group = BaseExceptionGroup(
        "", [wrong_setting, BaseExceptionGroup("", [other_cause])]
    )
    assert report(group) == FAILED
    assert capsys.readouterr().err.splitlines() == [
        "slipstream: queue.kind",
        "slipstream: queue.kind",
        "slipstream: no disk",
    ]


def test_the_workers_of_two_engines_share_no_name() -> None:
    with engine_folder() as first, engine_folder() as second:
        names = {store_url(folder).rpartition("/")[2] for folder in (first, second)}
    assert len(names) == 2

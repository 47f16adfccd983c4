"""What counts in benchmarks/whole_systems/compare.py, and the work that all systems get."""

import argparse
import dataclasses
import importlib
import json
import runpy
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from slipstream.core.configuration.config_file import parse_config

from benchmarks.whole_systems import peers, prime, verl, verl_work
from benchmarks.whole_systems.compare import known
from benchmarks.whole_systems.setup import System, our_config
from benchmarks.whole_systems.tables import (
    fewest_fixed_steps,
    figures,
    table_of,
    windows,
)
from benchmarks.whole_systems.work import VARIABLE, Replies, Work


def system_of(monkeypatch, ahead, fixed_steps, steps):
    """A system whose steps take as many seconds as their number says."""
    rows = [
        {"step": step, "step_s": float(step), "trained_tokens": 10.0}
        for step in range(1, steps + 1)
    ]
    monkeypatch.setattr(System, "rows", lambda _: rows)
    none = Path("nowhere")
    return System("ours", none, ahead, none, Work(fixed=0), fixed_steps, steps), rows


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


@pytest.mark.parametrize(
    ("ahead", "wave", "steps", "fixed", "lognormal"),
    [
        # Replies are drawn up to five steps ahead; a window has five steps, and two settle.
        (4, 1, (30, 50), range(11, 26), range(36, 51)),
        # A window of fixed lengths has whole waves of replies: six steps.
        (4, 2, (30, 50), range(13, 25), range(36, 51)),
        # A synchronous system settles in one step.
        (0, 1, (5, 8), range(2, 6), range(7, 9)),
    ],
)
def test_steps_that_settle_or_hold_replies_of_both_lengths_do_not_count(
    ahead, wave, steps, fixed, lognormal, monkeypatch
):
    system, _ = system_of(monkeypatch, ahead, *steps)
    all_windows = windows(dataclasses.replace(system, wave=wave))
    assert (numbers(all_windows["fixed"]), numbers(all_windows["lognormal"])) == (
        [*fixed],
        [*lognormal],
    )


@pytest.mark.parametrize(
    ("ahead", "wave", "fewest"), [(4, 2, 24), (4, 1, 20), (0, 1, 2)]
)
def test_fewer_steps_of_fixed_lengths_have_no_window(ahead, wave, fewest, monkeypatch):
    for fixed_steps in (fewest - 1, fewest):
        system, _ = system_of(monkeypatch, ahead, fixed_steps, steps=50)
        system = dataclasses.replace(system, wave=wave)
        assert fewest_fixed_steps(system) == fewest
        assert ("fixed" in windows(system)) == (fixed_steps == fewest)


def test_a_system_that_was_cut_short_has_whole_windows_only(monkeypatch):
    system, rows = system_of(monkeypatch, ahead=4, fixed_steps=20, steps=40)
    del rows[33:]
    assert numbers(windows(system)["lognormal"]) == list(range(26, 31))
    del rows[28:]
    assert "lognormal" not in windows(system)


def test_replies_of_the_first_lengths_that_come_late_count_for_no_lengths(monkeypatch):
    system, rows = system_of(monkeypatch, ahead=4, fixed_steps=20, steps=40)
    system = dataclasses.replace(system, work=Work(fixed=20 * 16, tokens=512))
    for row in [*rows[:20], rows[25]]:
        row["trained_tokens"] = 512.0 * 16
    all_windows = windows(system)
    assert numbers(all_windows["fixed"]) == list(range(11, 16))
    assert numbers(all_windows["lognormal"]) == list(range(32, 37))


def test_a_figure_is_tokens_over_time_and_not_the_mean_of_speeds() -> None:
    rows = [
        {"step": 1, "step_s": 1.0, "trained_tokens": 100.0, "training_s": 0.5},
        {"step": 2, "step_s": 3.0, "trained_tokens": 100.0, "training_s": 1.5},
    ]
    numbers = figures(rows, 1)
    assert numbers["tokens_per_s"] == 50.0
    assert numbers["windows"] == [100.0, 100.0 / 3]
    assert numbers["training_s"] == 1.0


FLASH = {"attention_config": {"backend": "FLASH_ATTN"}}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ours", {"count": 1, "devices": None}),
        ("ours-both-off", {"count": 2, "devices": (1, 0)}),
        ("ours-fp8", {"quantization": "fp8_per_channel"}),
        (
            "ours-kv8",
            {"engine": {"kv_cache_memory_bytes": 1 << 30, "kv_cache_dtype": "fp8"}},
        ),
        ("ours-flash", {"engine": {"kv_cache_memory_bytes": 1 << 30, **FLASH}}),
    ],
)
def test_the_words_of_a_system_are_settings_of_its_run(name, settings, tmp_path):
    sizes = {"memory": 0.3, "kv_gib": 1, "episodes": 64}
    work = {
        "group": 4,
        "sequences": 16,
        "staleness": 4,
        "micro_tokens": 4096,
        "run_s": 60.0,
    }
    work |= {"learner": '{"parallel": {"ep": 1}}', "servers": 1}
    arguments = argparse.Namespace(
        device="cuda", systems=[known(name)], **sizes, **work
    )
    system = System(name, tmp_path, 4, tmp_path, Work(fixed=0), 1, 2)
    config = parse_config(
        tomllib.loads(our_config(arguments, system, tmp_path)), source="the benchmark"
    )
    fields = config.rollout_server.model_dump()
    assert {key: fields[key] for key in settings} == settings
    assert config.controller.turns == ("off" if "off" in name else "auto")
    assert (config.learner.devices == (0,)) is ("both" in name)


def test_a_system_of_an_unknown_word_is_refused() -> None:
    with pytest.raises(
        argparse.ArgumentTypeError,
        match="'ours-fast' must be trl-async or trl-colocated or prime-rl or verl",
    ):
        known("ours-fast")


def test_ours_is_compared_with_the_best_peer_at_the_same_lengths() -> None:
    def run(speed: float) -> list[dict[str, Any]]:
        return [{"tokens_per_s": speed, "windows": [speed], "step_s": 1.0}]

    lines = table_of(
        {
            "ours, fixed": run(300.0),
            "ours, lognormal": run(200.0),
            "trl-async, fixed": run(100.0),
            "trl-other, fixed": run(150.0),
            "trl-async, lognormal": run(50.0),
        }
    )
    ratios = {
        cells[1].strip(): cells[3].strip()
        for cells in (line.split("|") for line in lines)
    }
    assert ratios["ours, fixed"] == "2.00"
    assert ratios["ours, lognormal"] == "4.00"
    assert ratios["trl-async, fixed"] == ""


def test_every_system_draws_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(fixed=3, tokens=7, longest=20, median=8.0)
    for variable, value in work.environ().items():
        monkeypatch.setenv(variable, value)
    assert VARIABLE in work.environ()
    assert Work.of_environ() == work
    lengths = [work.length(place) for place in range(2000)]
    assert lengths[:3] == [7, 7, 7]
    assert 1 <= min(lengths[3:]) < 4
    assert max(lengths[3:]) == 20
    (message,) = work.prompt(5)
    assert len(message["content"].split()) == 126
    assert message != work.prompt(6)[0]


async def test_the_first_episode_of_a_process_is_a_trial_and_does_not_wait(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "asked"
    gate = tmp_path / "gate"
    environment = Replies({"fixed": 10, "tokens": 7}, str(folder), str(gate))
    assert await environment.reset(0)
    assert not folder.exists()
    gate.touch()
    await environment.reset(1)
    assert folder.exists()
    assert environment.max_reply_tokens == 7


def test_ours_is_loaded_once_a_server_has_joined_too(tmp_path: Path) -> None:
    system = System("ours", tmp_path, 4, tmp_path, Work(fixed=0), 1, 2)
    system.processes.append(Mock())
    (tmp_path / "log-0").write_text("  0.0 s  the run starts\n")
    # The run itself tries the environment, which touches this file.
    system.asked.touch()
    assert not system.is_loaded()
    (tmp_path / "log-0").write_text("  9.0 s  rollout server server-0 joined\n")
    assert system.is_loaded()


def test_a_step_of_prime_rl_lasts_from_its_trainers_last_line_to_the_next() -> None:
    def trained(step: int, time: float) -> str:
        times = {"time/forward_backward": 1.0, "time/wait_for_batch": 2.0}
        times |= {"time/broadcast_weights": 0.5, "time/step": 3.5}
        return json.dumps({"step": step, "time": time, **times})

    def collected(step: int, tokens: int) -> str:
        return json.dumps(
            {"step": step, "progress/output_tokens": tokens, "time/step": 9.0}
        )

    lines = [collected(1, 300), trained(1, 10.0), trained(2, 14.0), collected(2, 400)]
    parts = {"training_s": 1.0, "waiting_s": 2.0, "publish_s": 0.5}
    # The orchestrator has not told the tokens of step 3.
    assert prime.complete([*lines, trained(3, 20.0)]) == [
        {"step": 1, "step_s": 3.5, "trained_tokens": 300, **parts},
        {"step": 2, "step_s": 4.0, "trained_tokens": 400, **parts},
    ]


def test_prime_rl_gets_the_work_and_its_bound_and_no_offloading(tmp_path: Path) -> None:
    sizes = {
        "sequences": 64,
        "group": 8,
        "staleness": 2,
        "micro_tokens": 256,
        "kv_gib": 1,
    }
    more = {
        "episodes": 96,
        "memory": 0.3,
        "attention": "flash_attention_4",
        "as_shipped": False,
    }
    arguments = argparse.Namespace(model=tmp_path, **sizes, **more)
    settings = prime.settings(arguments, Work(fixed=0, prompt_words=126), tmp_path)
    orchestrator = settings["orchestrator"]
    model = settings["trainer"]["model"]
    assert orchestrator["batch_size"] == 64
    assert orchestrator["group_size"] == 8
    assert orchestrator["max_off_policy_steps"] == 2
    assert set(orchestrator["concurrency"].values()) == {96}
    (source,) = orchestrator["train"]["source"]
    assert source["serve"]["pool"] == {"type": "static", "num_workers": 2}
    # No sequence is cut: a micro batch holds the longest.
    assert model["seq_len"] == orchestrator["seq_len"] == 1024 + 128
    assert model["optim_cpu_offload"] is False
    arguments.as_shipped = True
    assert set(
        prime.settings(arguments, Work(fixed=0), tmp_path)["trainer"]["model"]
    ) == {
        "attn",
        "seq_len",
    }


def test_a_step_of_verl_lasts_from_its_weights_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(step: int, mean: float) -> str:
        # verl numbers what it tells of a step by the next one's weights.
        data = {"training/global_step": float(step), "response_length/mean": mean}
        times = {
            "timing_s/step": 3.0,
            "timing_s/gen": 1.0,
            "timing_s/update_actor": 2.0,
        }
        sent = {"timing_s/timing_s/param_sync": 0.5}
        return json.dumps({"step": step + 1, "data": {**data, **times, **sent}})

    def sent(step: int) -> str:
        return json.dumps(
            {"step": step, "data": {"fully_async/rollouter/idle_ratio": 0.5}}
        )

    clock = iter([1.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(verl.time, "perf_counter", lambda: next(clock))
    parts = {"training_s": 2.0, "waiting_s": 1.0, "publish_s": 0.5}
    first = {"step": 1, "step_s": 3.0, "trained_tokens": 480, **parts}
    times: dict[int, float] = {}
    assert verl.complete([sent(0), sent(1)], 16, times) == []
    lines = [sent(0), sent(1), sent(2), told(1, 30.0)]
    assert verl.complete(lines, 16, times) == [first]
    assert verl.complete([*lines, sent(3), told(2, 31.0)], 16, times) == [
        first,
        {"step": 2, "step_s": 4.0, "trained_tokens": 496, **parts},
    ]


def test_verl_gets_the_work_and_its_bound(tmp_path: Path) -> None:
    sizes = {
        "sequences": 64,
        "group": 8,
        "staleness": 2,
        "micro_tokens": 256,
        "kv_gib": 1,
    }
    arguments = argparse.Namespace(model=tmp_path, **sizes, memory=0.3, episodes=128)
    settings = verl.settings(arguments, Work(fixed=0, prompt_words=126), tmp_path)
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    assert settings[f"{actor}.ppo_mini_batch_size"] * settings[f"{rollout}.n"] == 64
    assert settings["async_training.staleness_threshold"] == 2
    assert settings["async_training.concurrent_samples_per_replica"] * 8 == 128
    # No sequence is cut: a micro batch holds the longest.
    assert settings[f"{actor}.ppo_max_token_len_per_gpu"] == 1024 + 128


def test_replies_of_verl_are_counted_across_its_processes(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "counter").write_text("9")
    monkeypatch.setenv(verl_work.COUNTER, str(tmp_path / "counter"))
    assert [verl_work.next_place(), verl_work.next_place()] == [9, 10]


def test_each_change_to_a_peers_packages_needs_its_text_once(tmp_path: Path) -> None:
    for peer, changes in peers.CHANGES.items():
        folder = tmp_path / peer
        texts: dict[str, str] = {}
        for change in changes:
            texts[change.file] = (
                texts.get(change.file, "before\n") + f"{change.old}\nafter\n"
            )
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        peers.apply(changes, folder)
        for change in changes:
            text = (folder / change.file).read_text()
            assert text.startswith("before\n") and text.endswith("\nafter\n")
            assert change.new in text
            # The text that the change adds cannot be added twice.
            (folder / change.file).write_text("another version\n")
            with pytest.raises(
                ValueError, match=f"{change.file} has 0 times, not once"
            ):
                peers.apply([change], folder)


def test_what_stands_for_an_absent_package_takes_every_call(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "absent_kernels.py").write_text(peers.ABSENT)
    monkeypatch.syspath_prepend(tmp_path)
    stand_in = importlib.import_module("absent_kernels")
    assert stand_in.jit(target="cuda")(lambda: None) is not None
    with pytest.raises(AttributeError):
        _ = stand_in.__path__


def test_the_errors_of_prime_rls_programs_are_told_when_it_fails(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    fault = "AttributeError: 'PyNcclCommunicator' object has no attribute 'device'"
    (logs / "inference.log").write_text(f"loaded\n{fault}\n{fault}\nINFO ended\n")
    (logs / "trainer.log").write_text("waits\n")
    assert prime.errors(tmp_path) == ["inference.log:", fault, "trainer.log:"]


def test_a_communicator_that_vllm_switches_off_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    pynccl = importlib.import_module("vllm.distributed.device_communicators.pynccl")
    wrapper = importlib.import_module(
        "vllm.distributed.device_communicators.pynccl_wrapper"
    )
    kind = pynccl.PyNcclCommunicator
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    monkeypatch.setattr(wrapper.NCCLLibrary, "exported_functions", [])
    # If there is no NCCL vLLM goes on without a communicator.
    monkeypatch.setattr(pynccl, "NCCLLibrary", Mock(side_effect=OSError))
    group = pynccl.StatelessProcessGroup.__new__(pynccl.StatelessProcessGroup)
    group.rank = 0
    group.world_size = 2
    assert kind(group, 0).disabled
    runpy.run_module("benchmarks.common.older_nccl")
    with pytest.raises(RuntimeError, match="switched off, and would send no weights"):
        kind(group, 0)
    group.world_size = 1
    assert kind(group, 0).disabled

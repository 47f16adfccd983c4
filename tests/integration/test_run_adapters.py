"""A run that publishes adapters alone learns, and a server that is killed gets the matrices again.

Its continuation by the same command, with another trainer, sends them once more.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from support.rigs.adapter_runs import LORA, check  # noqa: E402
from support.rigs.run_processes import (  # noqa: E402
    ROLLOUT_SERVER,
    check_ledger,
    command,
    connection,
    copy_environments,
    descendants,
    kill,
    run_command,
    until_event,
    until_gone,
    until_step,
    write_config,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("nothing_survives"),
]
STEPS = 30
SETTINGS = {
    "run__steps": STEPS,
    "lora": LORA,
    "evaluations": [],
    "algorithm__learning_rate": 5e-3,
    "controller__heartbeat_s": 0.1,
    "controller__heartbeat_timeout_s": 3.0,
    "weights__verify_every": 4,
}


async def test_a_run_learns_from_adapters_alone_through_a_killed_server_and_a_restart(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(copy_environments(tmp_path), tiny_model, **SETTINGS)
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        async with connection(config, run) as client:
            await until_step(client, 8)
            (server,) = run.find(ROLLOUT_SERVER)
            below = descendants(server.pid)
            kill(server)
            await until_gone([server, *below])
            await until_event(client, lambda event: "server-0 is gone" in event.text)
        assert await run.wait(200) == 0, run.out + run.err
    # The first one, and that to the new engine.
    summary = check(tmp_path / "run", item_bytes=4, whole=2, gap=1e-5)
    assert summary["steps"] == STEPS
    assert summary["reward_last"] > summary["reward_first"] + 0.25
    check_ledger(summary)

    more = {**SETTINGS, "run__steps": STEPS + 3}
    write_config(tmp_path, tiny_model, **more)
    result = run_command("run", "config.toml", cwd=tmp_path, limit_s=150)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = check(tmp_path / "run", item_bytes=4, whole=1, gap=1e-5)
    assert summary["steps"] == STEPS + 3


@pytest.mark.parametrize("publish", ["merged", "adapters"])
def test_a_checkpoint_with_adapters_is_exported_as_the_run_ended(
    publish: str, tmp_path: Path, tiny_model: Path
) -> None:
    settings = SETTINGS | {"run__steps": 2, "lora": LORA | {"publish": publish}}
    write_config(copy_environments(tmp_path), tiny_model, **settings)
    run = run_command("run", "config.toml", cwd=tmp_path, limit_s=200)
    assert run.returncode == 0, run.stdout + run.stderr
    export = run_command("export", tmp_path / "run", "--step", "2", limit_s=100)
    assert export.returncode == 0, export.stderr
    folder = tmp_path / "run" / "checkpoints"
    for kind, name in (
        ("", "model.safetensors"),
        ("-adapters", "adapter_model.safetensors"),
        ("-adapters", "adapter_config.json"),
    ):
        exported, final = folder / f"hf-000002{kind}" / name, folder / f"final{kind}" / name
        assert exported.read_bytes() == final.read_bytes(), name

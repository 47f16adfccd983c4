"""The settings with which one rank exports what many trained."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slipstream.client.launch import launcher
from slipstream.core.errors import CheckpointError
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import ParallelSection
from slipstream.learner.trainer import export_checkpoint
from slipstream.learner.trainer.export_checkpoint import on_one_rank
from support.fakes.small_configs import small_config
from support.rigs.run_processes import empty_model, write_config
from support.rigs.waiting import LIMIT_S, wait_until

STAGES = {
    "num_layers_in_first_pipeline_stage": 1,
    "microbatch_group_size_per_vp_stage": 2,
    "tp_comm_overlap": True,
    "cp_comm_type": "a2a",
    "moe_token_dispatcher_type": "flex",
    "hierarchical_context_parallel_sizes": [2, 2],
}


def config(learner: dict, **sections: dict) -> Config:
    model = {"path": "models/tiny"} | sections.pop("model", {})
    learner = learner | sections.pop("learner", {})
    return small_config(model=model, learner=learner, **sections)


@pytest.mark.parametrize(
    "learner",
    [
        {"world_size": 4, "parallel": {"tp": 2}, "ranks_per_node": 2},
        {"world_size": 4, "parallel": {"cp": 4}, "micro_batch_tokens": 16},
        {"world_size": 2, "parallel": {"pp": 2}, "transformer": STAGES},
        {
            "world_size": 2,
            "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
            "optimizer": {"use_precision_aware_optimizer": True},
        },
    ],
    ids=["sizes", "shared sequences", "stages", "distributed optimizer"],
)
def test_settings_of_many_ranks_do_not_keep_one_from_exporting(learner: dict) -> None:
    alone = on_one_rank(config(learner), Path("step-000001"))
    assert alone.learner.world_size == 1
    assert alone.learner.parallel == ParallelSection()
    assert alone.learner.transformer == {}
    assert not alone.learner.use_distributed_optimizer


def test_layouts_of_reference_and_critic_do_not_keep_one_rank_from_exporting() -> None:
    before = config(
        {"world_size": 4, "parallel": {"tp": 4}},
        algorithm={"advantage": "gae", "kl": {"coefficient": 0.1}},
        reference={
            "parallel": {"pp": 2},
            "teachers": {
                "t": {"environments": ["e"], "path": "p", "parallel": {"tp": 2}}
            },
        },
        critic={"learning_rate": 1e-3, "parallel": {"tp": 2}},
    )
    alone = on_one_rank(before, Path("step-000001"))
    assert alone.reference.parallel is alone.critic.parallel is None
    assert alone.reference.teachers["t"].parallel is None


def test_settings_of_the_model_are_those_of_the_run() -> None:
    settings = {"moe_router_dtype": "fp64", "fp8": "e4m3", "fp8_param": True}
    before = config({"world_size": 2, "transformer": settings}, lora={"rank": 4})
    alone = on_one_rank(before, Path("step-000001"))
    assert alone.learner.transformer == settings
    assert (alone.lora, alone.weights, alone.model) == (
        before.lora,
        before.weights,
        before.model,
    )


def test_a_checkpoint_that_its_run_removes_meanwhile_is_told_as_that(
    tmp_path, monkeypatch, capsys
):
    settings = write_config(tmp_path, empty_model(tmp_path), checkpoint__keep_last=2)
    words = ["--config", str(settings), "--step", "27", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["export", *words])
    assert export_checkpoint.main() == 2
    folder = tmp_path / "checkpoints" / "step-000027"
    assert capsys.readouterr().err == (
        f"slipstream: {folder} was removed before it was exported: its run goes on and keeps the "
        "newest 2 (checkpoint.keep_last); export again for a newer version\n"
    )


@pytest.mark.process
def test_what_only_training_reads_may_be_gone_before_an_export(
    tmp_path, monkeypatch
) -> None:
    model = empty_model(tmp_path)
    gone = tmp_path / "gone"
    settings = write_config(
        tmp_path,
        model,
        checkpoint__load=str(gone),
        reference__path=str(gone),
        critic={"learning_rate": 1e-3, "path": str(gone)},
        algorithm__advantage="gone_with_its_folder:advantage",
        algorithm__kl={"coefficient": 0.1},
        sources={},
    )
    exported: list[Config] = []
    monkeypatch.setattr(
        export_checkpoint, "export", lambda *given: exported.append(given[0])
    )
    written: list[str] = []

    async def write(name: str, *_: object, **__: object) -> None:
        written.append(name)

    monkeypatch.setattr(launcher, "run_program", write)
    monkeypatch.setattr(launcher.run_folder, "settings_of", lambda _: settings)
    monkeypatch.setattr(launcher.run_folder, "version_to_export", lambda *_: 1)
    words = ["--config", str(settings), "--step", "1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["export", *words])
    assert asyncio.run(launcher.run_export(tmp_path, None, None)) == 0
    assert export_checkpoint.main() == 0
    (config,) = exported
    assert written == ["export"]
    assert config.checkpoint.load is config.reference.path is config.critic.path is None
    assert config.critic.learning_rate == 1e-3


def test_one_process_at_a_time_writes_a_folder_and_the_other_says_so(
    tmp_path, capsys
) -> None:
    written = tmp_path / "hf-000001"

    def another() -> str:
        with (
            pytest.raises(
                CheckpointError, match="was written by another export"
            ) as raised,
            export_checkpoint._alone_at(written),
        ):
            raise AssertionError
        return str(raised.value)

    with ThreadPoolExecutor() as threads:
        with export_checkpoint._alone_at(written):
            waiting = threads.submit(another)
            message = f"another export writes {written}: waiting for its end"
            wait_until(lambda: message in capsys.readouterr().err)
            assert not waiting.done()
            written.mkdir()
        assert str(written) in waiting.result(LIMIT_S)

"""With what tokens can be scored by earlier versions, and what the copies of these take."""

import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.launch.fit import needs_of
from slipstream.client.launch.placement import Share
from slipstream.client.launch.scene import Scene, Verdict
from slipstream.core import extension
from slipstream.core.configuration.replayed_settings import comparison_problems
from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.extensions.staleness_split import launch
from slipstream.protocol.checkpoints import MANIFEST_NAME
from support.fakes.small_checkpoints import save_checkpoint
from support.fakes.small_configs import config_with, refusal_of
from support.fakes.tiny_models import make_model_folder

SPLIT: dict[str, Any] = {"algorithm.weight": "split", "algorithm.max_staleness": 3}


def is_on(changes: dict[str, Any]) -> bool:
    names = [manifest.name for manifest in extension.active(config_with(changes))]
    return "staleness_split" in names


def test_the_weight_switches_it_on() -> None:
    assert is_on(SPLIT)
    assert not is_on(SPLIT | {"algorithm.weight": "token"})
    assert not is_on(SPLIT | {"algorithm.weight": "own:weight"})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"algorithm.max_staleness": 0},
            "algorithm.weight = 'split' needs algorithm.max_staleness >= 1, got 0",
        ),
        (
            {"controller.client_loop": True, "environments": []},
            "algorithm.weight = 'split' needs controller.client_loop = False: a client's own",
        ),
        (
            {"learner.transformer": {"fp8": "hybrid"}},
            "algorithm.weight = 'split' excludes learner.transformer.fp8 with fp8_recipe = 'del",
        ),
        (
            {"learner.transformer": {"fp8_param": True}},
            "algorithm.weight = 'split' excludes learner.transformer.fp8_param: 8-bit",
        ),
    ],
)
def test_what_excludes_it_is_refused_in_one_line(
    changes: dict[str, Any], rule: str
) -> None:
    assert rule in refusal_of(SPLIT | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.mini_batches": 2, "algorithm.epochs": 2},
        {"algorithm.loss_args": {"clip_high": 0.3}},
        {"sampling.top_p": 0.9, "sampling.top_k": 8},
        {"lora.rank": 4},
        {"algorithm.kl.coefficient": 0.1},
        {"learner.transformer": {"fp8": "hybrid", "fp8_recipe": "blockwise"}},
    ],
)
def test_all_else_goes_with_it(changes: dict[str, Any]) -> None:
    assert is_on(SPLIT | changes)


def test_the_behavior_ratio_of_a_loss_excludes_it() -> None:
    line = refusal_of(SPLIT | {"algorithm.loss_args": {"ratio": "behavior"}})
    assert "weight must be 'none', got 'split'" in line


def test_without_an_extension_that_scores_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = tuple(m for m in extension.installed() if not m.scores_versions)
    monkeypatch.setattr(extension, "installed", lambda: others)
    assert "and no installed extension computes them" in refusal_of(SPLIT)


def test_a_replay_compares_no_weight_that_needs_versions_with_one_that_does_not() -> (
    None
):
    split = config_with(SPLIT)
    token = config_with(SPLIT | {"algorithm.weight": "token"})
    bounded = config_with(SPLIT | {"algorithm.weight_args": {"engine_cap": 1.5}})
    (problem,) = comparison_problems(split, token)
    assert problem.startswith(
        "algorithm.weight cannot be 'token' beside the run's 'split'"
    )
    assert [*comparison_problems(split, bounded)] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("free", "total", "verdict"),
    [
        (1 << 34, 1 << 34, Verdict.OK),
        (1 << 20, 1 << 34, Verdict.ADVICE),
        (1 << 20, 1 << 20, Verdict.PROBLEM),
    ],
)
def test_memory_of_all_kept_versions_is_asked_for(
    model: Path,
    free: int,
    total: int,
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "free_memory", lambda: (free, total))
    config = config_with(SPLIT | {"model.path": str(model), "model.dtype": "float32"})
    needs = needs_of(config)
    assert needs is not None
    assert needs.weight_bytes == 4 * needs.parameters
    finding = launch.check_copies(Scene(config, share=Share(ranks=range(2))))
    assert finding is not None
    assert finding.verdict is verdict
    # Four versions of four bytes a parameter.
    assert (
        f"{16 * needs.parameters / 1e6:,.1f} MB for each trainer rank, 2 here"
        in finding.seen
    )


def test_a_checkpoint_has_room_for_the_older_versions(model: Path) -> None:
    changes = SPLIT | {"model.path": str(model), "model.dtype": "float32"}
    split = needs_of(config_with(changes))
    token = needs_of(config_with(changes | {"algorithm.weight": "token"}))
    assert split is not None
    assert token is not None
    assert split.saved_bytes - token.saved_bytes == 3 * 4 * token.parameters


def test_adapters_alone_are_kept(model: Path) -> None:
    config = config_with(SPLIT | {"model.path": str(model), "lora.rank": 4})
    finding = launch.check_copies(Scene(config, share=Share(ranks=range(2))))
    assert finding is not None
    assert finding.seen == "the adapters of 4 versions are kept in main memory"


def checkpoint_with(folder: Path, models: list[str]) -> None:
    """A run's checkpoint of version 4, whose manifest names these models."""
    path = save_checkpoint(folder / "name" / CHECKPOINTS, 4) / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["models"] = models
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("number", [0, 2, 3, 4])
def test_a_run_goes_on_only_with_as_many_versions_as_it_has(
    tmp_path: Path, number: int
) -> None:
    config = config_with(SPLIT | {"run.dir": str(tmp_path), "run.name": "name"})
    scene = Scene(config)
    launch.check_checkpoint(scene)
    earlier = [f"earlier-{age}" for age in range(1, number + 1)]
    checkpoint_with(tmp_path, ["policy", *earlier])
    if number == 3:
        launch.check_checkpoint(scene)
        return
    with pytest.raises(
        ConfigError, match=f"needs the weights of 3 .* has {number}: go on with"
    ):
        launch.check_checkpoint(scene)

"""Own functions where engines sample from a part of the vocabulary."""

import sys
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.learner.algorithms.functions_check import check_functions
from support.fakes.small_configs import config_with

# Images are sampled with cuts that are not replayed.
NOT_REPLAYED = {"sampling.max_images": 1}


@pytest.fixture(autouse=True)
def _beside_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ("-tokens.advantages * tokens.logprobs", False),
        (
            "-tokens.advantages * (tokens.logprobs - tokens.behavior_logprobs).exp()",
            True,
        ),
        (
            "-tokens.logprobs * ((tokens.logprobs - tokens.behavior_logprobs).detach() < 1)",
            True,
        ),
    ],
)
def test_ones_own_function_that_reads_the_engines_probabilities_needs_the_whole_vocabulary(
    tmp_path: Path, body: str, is_refused: bool
) -> None:
    name = f"own_cut_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"def loss(tokens):\n    return {body}\n")
    settings = {"algorithm.loss": f"{name}:loss", "algorithm.weight": "none"}
    check_functions(config_with(settings))
    check_functions(config_with(settings | {"sampling.top_p": 0.8}))
    cut = config_with(settings | {"sampling.top_p": 0.8} | NOT_REPLAYED)
    if not is_refused:
        check_functions(cut)
        return
    with pytest.raises(ConfigError) as error:
        check_functions(cut)
    assert f"algorithm.loss {name}:loss reads behavior_logprobs" in str(error.value)
    assert "set sampling.top_p = 1.0" in str(error.value)


def test_ones_own_weight_is_asked_whether_it_reads_the_engines_probabilities(
    tmp_path: Path,
) -> None:
    name = f"own_weights_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def by_lag(tokens):\n    return 1.0 / (1.0 + tokens.lags)\n"
        "def by_ratio(tokens):\n"
        "    return (tokens.proximal_logprobs - tokens.behavior_logprobs).exp()\n"
    )
    cut = {"sampling.top_k": 5} | NOT_REPLAYED
    check_functions(config_with(cut | {"algorithm.weight": f"{name}:by_lag"}))
    with pytest.raises(ConfigError, match="by_ratio reads behavior_logprobs"):
        check_functions(config_with(cut | {"algorithm.weight": f"{name}:by_ratio"}))


def test_a_loss_that_corrects_by_itself_is_warned_of_a_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"own_double_{tmp_path.name}"
    ratio = "(tokens.logprobs - tokens.behavior_logprobs).exp()"
    (tmp_path / f"{name}.py").write_text(
        f"def loss(tokens):\n    return -tokens.advantages * {ratio}\n"
    )
    settings = {"algorithm.loss": f"{name}:loss"}
    check_functions(config_with(settings))
    warning = capsys.readouterr().err
    assert "reads behavior_logprobs, and algorithm.weight = 'token' corrects" in warning
    check_functions(config_with(settings | {"algorithm.weight": "none"}))
    assert capsys.readouterr().err == ""

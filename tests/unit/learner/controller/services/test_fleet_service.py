"""The status of a run, which clients read."""

from pathlib import Path
from types import SimpleNamespace

from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.services.fleet_service import (
    StatusServicer,
    _differing,
    without_effect,
)
from support.fakes.small_configs import config_with
from support.rigs.lease_rig import Rig


def test_the_newest_checkpoint_is_told_before_and_after_a_restart(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path / "journal") as journal:
        rig = Rig(tmp_path, journal)
        status = StatusServicer(
            rig.run, rig.books, rig.scheduler, SimpleNamespace(newest={})
        )
        assert status.status().checkpoint_step == 0
        journal.append(kinds.Checkpoint(version=PolicyVersion(0, 3)))
        assert status.status().checkpoint_step == 3
    with Journal(tmp_path / "journal") as journal:
        again = Rig(
            tmp_path, journal, state=read_history(read_records(tmp_path / "journal"))
        )
        status = StatusServicer(
            again.run, again.books, again.scheduler, SimpleNamespace(newest={})
        )
        assert status.status().checkpoint_step == 3


def vain(server: Config, run: Config) -> str:
    """What the file of a server says in vain of the algorithm of a run."""
    assert not _differing(server.engine_settings, run.engine_settings)
    return without_effect(server.engine_settings, run.algorithm)


def test_a_servers_own_word_on_the_algorithm_is_told_to_have_no_effect() -> None:
    run = config_with({"algorithm.loss": "gspo"})
    assert vain(run, run) == ""
    other = config_with({"algorithm.loss": "cispo"})
    assert vain(other, run) == "loss = cispo (the run has gspo)"
    several = config_with(
        {"algorithm.group_size": 8, "algorithm.kl": {"coefficient": 0.1}}
    )
    assert vain(several, run).startswith(
        "group_size = 8 (the run has 2), kl = {'coefficient': 0.1"
    )


def test_a_server_that_says_nothing_of_the_algorithm_is_told_nothing() -> None:
    run = config_with({"algorithm.loss": "gspo"})
    assert without_effect("", run.algorithm) == ""
    assert without_effect('{"algorithm": 3}', run.algorithm) == ""
    silent = Config.model_validate(dict(run) | {"algorithm": AlgorithmSection()})
    assert vain(silent, run) == ""


def test_engines_must_agree_on_the_settings_of_the_algorithm_that_make_them() -> None:
    run = config_with()
    assert run.algorithm.of_engines.keys() == {"agreement", "router_replay"}
    replayed = run.algorithm.model_copy(update={"router_replay": "rollout"})
    server = run.model_copy(update={"algorithm": replayed})
    assert _differing(server.engine_settings, run.engine_settings) == (
        "algorithm.router_replay = rollout, the controller has off"
    )

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import told_settings
from slipstream.core.settings.measurement_sections import (
    TrackingSection,
    check_trackers,
    tracker_named,
)
from slipstream.extensions.trackers.controller import COLUMNS, tag_of
from slipstream.extensions.trackers.mlflow_names import mlflow_names
from slipstream.learner.controller.reporting import trackers as trackers_module
from slipstream.learner.controller.reporting.trackers import (
    RunIds,
    Trackers,
    open_trackers,
)
from support.rigs import tools
from support.rigs.completed import python
from support.rigs.controller_runs import make_config

EPISODE = {
    "step": 7,
    "environment": "sums",
    "task_index": 3,
    "prompt": "1+1=",
    "reply": "<b>2",
    "answer": "2",
    "reward": 1.0,
    "advantage": 0.5,
    "lag": 0.25,
    "status": "completed",
    "sampled_tokens": 4,
    "versions": [[3, "0.6"], [1, "0.5"]],
}
ROW = [
    7,
    "sums",
    3,
    "1+1=",
    "<b>2",
    "2",
    1.0,
    0.5,
    0.25,
    "3 by 0.6, 1 by 0.5",
    "completed",
    4,
]
GROUP = {"sampled_tokens": [4, 2], "surprisal": [0.5, None]}


class FakeTracker:
    """Keeps what it is told; fails at step `fails_at`, and waits for `gate` before each entry."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.entries: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()

    def log(self, step, values) -> None:
        self.gate.wait()
        if step == self.fails_at:
            raise ConnectionError("the service is away\nand more")
        self.entries.append((step, dict(values)))

    def samples(self, step, episodes, groups) -> None:
        self.entries.append((step, episodes, groups))

    def close(self) -> None:
        self.closed = True


def test_every_tracker_gets_all_finite_numbers_in_order():
    first = FakeTracker()
    second = FakeTracker()
    complaints: list[str] = []
    trackers = Trackers({"a": lambda: first, "b": lambda: second}, complaints.append)
    trackers.log(0, {"x": 1.0, "y": float("nan")})
    trackers.log(1, {"x": 2, "y": float("inf")})
    trackers.samples(1, [EPISODE], [GROUP])
    trackers.close()
    numbers = [(0, {"x": 1.0}), (1, {"x": 2.0})]
    assert first.entries == second.entries == [*numbers, (1, [EPISODE], [GROUP])]
    assert first.closed and second.closed
    assert complaints == []


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on():
    broken = FakeTracker(fails_at=1)
    tracker = FakeTracker()
    complaints: list[str] = []
    trackers = Trackers(
        {"broken": lambda: broken, "whole": lambda: tracker}, complaints.append
    )
    for step in range(4):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert [step for step, _ in broken.entries] == [0]
    assert [step for step, _ in tracker.entries] == [0, 1, 2, 3]
    assert complaints == [
        "tracker broken gets no more numbers: ConnectionError: the service is away"
    ]


@pytest.mark.parametrize("error", [PermissionError, SystemExit])
def test_a_tracker_that_cannot_be_opened_or_whose_package_exits_is_told(error):
    def refuse():
        raise error("no key")

    complaints: list[str] = []
    trackers = Trackers({"locked": refuse}, complaints.append)
    trackers.close()
    trackers.log(0, {"x": 1.0})
    assert complaints == [
        f"tracker locked gets no more numbers: {error.__name__}: no key"
    ]


def test_the_end_of_a_run_waits_for_a_slow_tracker_only_so_long(monkeypatch):
    monkeypatch.setattr(trackers_module, "CLOSE_LIMIT_S", 0.05)
    slow = FakeTracker()
    slow.gate.clear()
    complaints: list[str] = []
    trackers = Trackers({"slow": lambda: slow}, complaints.append)
    trackers.log(0, {"x": 1.0})
    trackers.close()
    slow.gate.set()
    assert complaints == ["tracker slow was not done 0.05 s after the run"]


def test_a_tracker_that_is_too_far_behind_is_given_up_and_nothing_waits(monkeypatch):
    monkeypatch.setattr(trackers_module, "MAX_WAITING", 2)
    slow = FakeTracker()
    slow.gate.clear()
    complaints: list[str] = []
    trackers = Trackers({"slow": lambda: slow}, complaints.append)
    for step in range(10):
        trackers.log(step, {"x": 1.0})
    slow.gate.set()
    trackers.close()
    assert complaints == ["tracker slow gets no more numbers: it is 2 entries behind"]


def test_trackers_are_told_all_settings_but_secrets(tmp_path: Path):
    config = make_config(
        tmp_path,
        queue__kind="redis",
        queue__redis_url="redis://:hunter2@127.0.0.1:6379",
        security__token_file="secrets/token",
    )
    secrets = {"user": "someone", "password_file": "secrets/password"}
    users = make_config(
        tmp_path,
        queue__kind="redis",
        queue__redis_url="redis://127.0.0.1",
        queue__controller=secrets,
        queue__rollout_server=secrets,
    )
    settings = told_settings(users.model_dump(mode="json"))
    assert not any("secrets" in str(value) for value in settings.values())
    settings = told_settings(config.model_dump(mode="json"))
    assert settings["algorithm.max_staleness"] == 2
    assert settings["queue.kind"] == "redis"
    assert not any(
        "hunter2" in str(value) or "secrets" in str(value)
        for value in settings.values()
    )


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        (
            "tensorboard",
            "which needs the package tensorboard: pip install 'tensorboard>=2.20,<3'",
        ),
        ("wandb", "which needs the package wandb: pip install 'wandb>=0.20,<1'"),
        (
            "mlflow",
            "which needs the package mlflow: "
            "pip install 'mlflow-skinny>=3.17,<4' 'sqlalchemy>=2,<3' 'alembic>=1.14,<2'",
        ),
    ],
)
def test_a_missing_package_is_one_line_with_the_command_that_helps(
    monkeypatch, tracker, message
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(TrackingSection(trackers=(tracker,)))
    assert str(caught.value) == f"tracking.trackers has {tracker!r}, {message}"


def test_a_tracker_that_no_package_gives_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        check_trackers(TrackingSection(trackers=("consol",)))
    assert str(caught.value) == (
        "tracking.trackers has 'consol', which no installed package gives as an entry point of "
        "slipstream.trackers; there are mlflow, tensorboard, wandb"
    )


def installed_package(folder: Path, group: str, entry: str) -> Path:
    """The metadata of a package of somebody else, as pip writes it."""
    info = folder / f"{folder.name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return folder


@pytest.mark.parametrize(
    ("entries", "places"),
    [
        (("x=a:X", "x=b:X"), ["a:X", "b:X"]),
        (
            ("wandb=a:X",),
            ["a:X", "slipstream.extensions.trackers.controller:WandbTracker"],
        ),
    ],
)
def test_trackers_of_one_name_are_refused(
    tmp_path, monkeypatch, entries, places
) -> None:
    for number, entry in enumerate(entries):
        package = installed_package(
            tmp_path / f"other{number}", "slipstream.trackers", entry
        )
        monkeypatch.syspath_prepend(package)
    name = entries[0].partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        check_trackers(TrackingSection(trackers=(name,)))
    start, _, rest = str(caught.value).partition(": ")
    assert start == f"tracking.trackers has {name!r}, which 2 trackers are called"
    told, _, advice = rest.partition("; ")
    assert sorted(told.split(", ")) == places
    assert advice == "uninstall all but one of their packages"
    check_trackers(TrackingSection(trackers=("tensorboard",)))


def test_tensorboard_has_every_number_in_its_section(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = make_config(tmp_path, tracking__trackers=["tensorboard"])
    complaints = list[str]()
    config.run_dir.mkdir()
    for start in range(2):
        trackers = open_trackers(config, config.run_dir, complaints.append)
        trackers.log(start, {"reward_mean": 0.5 + start, "held/pass_at_1": 0.25})
        trackers.close()
    assert complaints == []
    found = []
    for file in sorted((tmp_path / "r" / "tensorboard").iterdir()):
        version, event = events_of(file)
        assert version.file_version == "brain.Event:2"
        values = {value.tag: value.simple_value for value in event.summary.value}
        found.append((event.step, values))
    assert sorted(found) == [
        (start, {"reward/reward_mean": 0.5 + start, "held/pass_at_1": 0.25})
        for start in range(2)
    ]


def events_of(path: Path) -> list:
    """The events of a file, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_file_loader import (
        RawEventFileLoader,
    )
    from tensorboard.compat.proto.event_pb2 import Event

    return list(map(Event.FromString, RawEventFileLoader(str(path)).Load()))


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("reward_mean", "reward/reward_mean"),
        ("equal_rewards_fraction", "reward/equal_rewards_fraction"),
        ("loss", "train/loss"),
        ("step_s", "time/step_s"),
        ("publish_load_s", "time/publish_load_s"),
        ("generated_tokens_per_s", "servers/generated_tokens_per_s"),
        ("trained_tokens_per_s", "train/trained_tokens_per_s"),
        ("ledger_difference", "servers/ledger_difference"),
        ("echo/right", "echo/right"),
    ],
)
def test_a_metric_is_in_a_section_of_tensorboard(name: str, tag: str) -> None:
    assert tag_of(name) == tag


@pytest.mark.process
def test_the_controller_imports_neither_torch_nor_what_brings_it():
    program = (
        "import sys, slipstream.learner.controller.application, "
        "slipstream.learner.controller.reporting.trackers;"
        "print({'torch', 'tensorboard', 'transformers'} & set(sys.modules))"
    )
    done = python(program, check=True)
    assert done.stdout == "set()\n"


HARD_NAMES = [
    "e/pass@1",
    "e/pass_1",
    "e/pass%1",
    "e//x",
    "e/./y",
    "e/../z",
    "e/",
    "/abs",
    ".",
    "..a/b",
    "e/line\nbreak",
    "e/é ü",
    "k" * 251,
    "k" * 252,
]


def test_each_name_has_one_of_its_own_at_mlflow() -> None:
    names = mlflow_names(HARD_NAMES)
    assert list(names) == HARD_NAMES
    assert len(set(names.values())) == len(HARD_NAMES)
    assert names["e/pass_1"] == "e/pass_1"
    assert names["e/é ü"] == "e/é ü"
    assert names["e//x"] == "e/_/x"
    assert names["..a/b"] == "_..a/b"
    assert mlflow_names(["e/pass@1"]) == {"e/pass@1": "e/pass_1"}
    assert max(map(len, names.values())) == 250


@pytest.mark.process
def test_mlflow_itself_takes_names_and_settings_that_are_no_paths(
    tmp_path, monkeypatch
) -> None:
    tools.add_packages("trackers", monkeypatch)
    for package in ("mlflow", "sqlalchemy"):
        pytest.importorskip(package, reason=f"{package} is not installed: {tools.HOW}")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    arguments = {"a@b": 1, "a//b": 2, "k" * 251: 3}
    environments = [{"name": "e", "reference": "m:E", "args": arguments}]
    small = make_config(tmp_path, tracking__trackers=["mlflow"])
    settings = small.model_dump(mode="json", exclude_none=True) | {
        "environments": environments
    }
    config = parse_config(settings, source="test")
    config.run_dir.mkdir()
    complaints = list[str]()
    trackers = open_trackers(config, config.run_dir, complaints.append)
    values = {name: float(number) for number, name in enumerate(HARD_NAMES)}
    trackers.log(1, values)
    trackers.close()
    assert complaints == []
    run_id = json.loads((config.run_dir / "tracking.json").read_text())["mlflow"]
    client = MlflowClient(tracking_uri=f"sqlite:///{config.run_dir}/mlflow.db")
    data = client.get_run(run_id).data
    assert data.metrics == {
        new: values[name] for name, new in mlflow_names(HARD_NAMES).items()
    }
    assert data.params["environments.0.args.a_b"] == "1"
    assert data.params["environments.0.args.a/_/b"] == "2"


class FakeService(types.ModuleType):
    """Stands in for the package wandb and its run: notes every call."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_weights_and_biases_is_told_project_name_settings_and_every_number(
    tmp_path, monkeypatch
):
    service = FakeService()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = make_config(
        tmp_path, tracking__trackers=["wandb"], tracking__project="sums"
    )
    config.run_dir.mkdir()
    RunIds(config.run_dir, print).keep("wandb", "kept")
    tracker = tracker_named("wandb").load()(
        config, config.run_dir, RunIds(config.run_dir, print)
    )
    tracker.log(7, {"loss": 0.5})
    tracker.samples(7, [EPISODE], [GROUP])
    tracker.close()
    tables = [arguments for name, _, arguments in service.calls if name == "Table"]
    assert tables == [{"columns": list(COLUMNS), "data": [ROW]}]
    drawn = [args for name, args, _ in service.calls if name == "Histogram"]
    assert drawn == [([4, 2],), ([0.5],)]
    arguments = next(kwargs for name, _, kwargs in service.calls if name == "init")
    assert (arguments["project"], arguments["name"]) == ("sums", config.run.name)
    assert (arguments["id"], arguments["resume"], arguments["dir"]) == (
        "kept",
        "allow",
        str(config.run_dir),
    )
    assert arguments["config"]["algorithm.max_staleness"] == 2
    names = [
        (name, args) for name, args, _ in service.calls if name in ("log", "finish")
    ]
    assert names[0] == ("log", ({"loss": 0.5, "step": 7},))
    assert set(names[1][1][0]) == {"samples", "sampled_tokens", "surprisal", "step"}
    assert names[2] == ("finish", ())
    assert ("define_metric", ("*",), {"step_metric": "step"}) in service.calls


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_run_goes_on_at_weights_and_biases_only_where_it_was(
    tmp_path, monkeypatch, mode
) -> None:
    service = FakeService()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setenv("WANDB_MODE", mode)
    config = make_config(tmp_path, tracking__trackers=["wandb"])
    config.run_dir.mkdir()
    for _ in range(2):
        ids = RunIds(config.run_dir, print)
        tracker_named("wandb").load()(config, config.run_dir, ids).close()
    first, second = [kwargs for name, _, kwargs in service.calls if name == "init"]
    assert first["id"] == second["id"]
    assert (first["resume"], second["resume"]) == (
        None,
        "allow" if mode == "online" else None,
    )


@pytest.mark.process
def test_packages_of_trackers_say_nothing_of_their_own(
    tmp_path, monkeypatch, capfd
) -> None:
    tools.add_packages("trackers", monkeypatch)
    for package in ("wandb", "mlflow", "sqlalchemy"):
        pytest.importorskip(package, reason=f"{package} is not installed: {tools.HOW}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = make_config(tmp_path, tracking__trackers=["wandb", "mlflow"])
    config.run_dir.mkdir()
    complaints = list[str]()
    for step in range(2):
        trackers = open_trackers(config, config.run_dir, complaints.append)
        trackers.log(step, {"reward_mean": 0.5})
        trackers.close()
    assert complaints == []
    assert capfd.readouterr() == ("", "")


class FakeMlflow:
    """Stands in for MLflow's client: one store of experiments and runs, and every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.experiments: dict[str, str] = {}

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:  # noqa: N802
        self.calls.append(("open", (tracking_uri,), {}))
        return self

    def get_experiment_by_name(self, name: str) -> types.SimpleNamespace | None:
        experiment = self.experiments.get(name)
        return (
            None
            if experiment is None
            else types.SimpleNamespace(experiment_id=experiment)
        )

    def create_experiment(self, name: str, artifact_location: str) -> str:
        assert artifact_location.endswith("/mlartifacts")
        return self.experiments.setdefault(name, f"experiment {name}")

    def create_run(self, *args: object, **kwargs: object) -> types.SimpleNamespace:
        self.calls.append(("create_run", args, kwargs))
        return types.SimpleNamespace(
            info=types.SimpleNamespace(run_id="given-by-the-service")
        )

    def get_run(self, run_id: str) -> types.SimpleNamespace:
        tags = dict(args[1:] for args, _ in self.told("set_tag"))
        return types.SimpleNamespace(data=types.SimpleNamespace(tags=tags))

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def told(self, name: str) -> list[tuple[tuple, dict]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_mlflow_goes_on_with_the_run_whose_id_lies_in_the_run_folder(
    tmp_path, monkeypatch
):
    service = FakeMlflow()
    parts = {"entities": types.ModuleType("mlflow.entities"), "tracking": service}
    parts["entities"].Metric = lambda *args: args
    parts["entities"].Param = lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, f"mlflow.{name}", module)
    config = make_config(
        tmp_path, tracking__trackers=["mlflow"], tracking__project="sums"
    )
    config.run_dir.mkdir()
    for start in range(2):
        tracker = tracker_named("mlflow").load()(
            config, config.run_dir, RunIds(config.run_dir, print)
        )
        tracker.log(start, {"held/pass@1": 0.5 + start})
        tracker.samples(start, [EPISODE], [GROUP])
        tracker.close()

    run_id = "given-by-the-service"
    parsed = json.loads((config.run_dir / "tracking.json").read_text())
    assert parsed == {"mlflow": run_id}
    assert service.told("open")[0] == (
        (f"sqlite:///{config.run_dir.resolve()}/mlflow.db",),
        {},
    )
    assert service.told("create_run") == [(("experiment sums",), {"run_name": "r"})]
    assert service.told("update_run") == [((run_id,), {"status": "RUNNING"})]
    _, table, path = service.told("log_text")[1][0]
    assert json.loads(table) == {"columns": list(COLUMNS), "data": [ROW]}
    assert path == "samples/step-000001.json"
    shown = json.loads(service.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert [file["path"] for file in shown] == [
        f"samples/step-00000{n}.json" for n in range(2)
    ]
    batches = service.told("log_batch")
    assert all(args == (run_id,) for args, _ in batches)
    params = [pair for _, batch in batches for pair in batch.get("params", [])]
    assert ("algorithm.max_staleness", "2") in params
    assert len(params) == len(dict(params)) > 100
    assert all(len(batch.get("params", [])) <= 100 for _, batch in batches)
    metrics = [metric for _, batch in batches for metric in batch.get("metrics", [])]
    assert [(name, value, step) for name, value, _, step in metrics] == [
        ("held/pass_1", 0.5, 0),
        ("held/pass_1", 1.5, 1),
    ]
    assert service.told("set_terminated") == [((run_id,), {})] * 2

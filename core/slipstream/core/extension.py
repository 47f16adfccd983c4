"""Finds what a run may do without: each option has a manifest, named by an entry point.

A package adds an option by an entry point of the group `GROUP`, whose value names an `Extension`. A
manifest imports nothing but this package's settings: what it adds is named as
"module:attribute", which the process that needs it imports when the settings ask for it.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, TypeVar

from slipstream.core.errors import ConfigError

# The group of entry points that packages add to: the first name of this package's, and a word.
GROUP = f"{__name__.partition('.')[0]}.extensions"

Row = TypeVar("Row")


@dataclass(frozen=True)
class Program:
    """A process of a run, which is started again when it dies."""

    name: str
    module: str
    # The most starts after the first one, until it gets on.
    restarts: int


@dataclass(frozen=True)
class Need:
    """A setting that must have one value while an option is on."""

    # The name of the setting, such as "algorithm.group_size".
    setting: str
    # The only value, or a tuple of the values that it may have.
    only: object
    # Why, in the words that follow a colon.
    because: str


@dataclass(frozen=True)
class Queue:
    """A queue of trajectories, which `queue.kind` names."""

    # A function of settings, gRPC channel, metadata of calls and the run's id, which returns an
    # asynchronous context of a `TrajectorySender`.
    sender: str
    # A function of the controller's `Run`, gRPC server, journal and history, which returns an
    # asynchronous context of a `TrajectoryReceiver`.
    receiver: str
    # Whether all servers write into one queue, of which each reports the whole size.
    is_shared: bool = False


@dataclass(frozen=True)
class Transport:
    """A transport of weights, which `weights.transport` names."""

    # A function of the table `weights` and the rank's device, which returns a `BucketSender`.
    sender: str
    # A function of the communicator, a rank, a deadline in seconds and the device, which returns a
    # `BucketReceiver` that has joined.
    receiver: str


@dataclass(frozen=True)
class Tracker:
    """A tracker of metrics, which `tracking.trackers` names."""

    # "module:Class".
    place: str
    # Modules that it needs, with the requirements that have them.
    packages: Mapping[str, str] = field(default_factory=dict)
    # A function that raises ConfigError where nobody is signed in to the service on this machine.
    sign_in: str = ""
    # Folder within that of a run, if a second run in there could not be told from the first.
    own_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The manifest of an option; each place is "module:attribute", or "" if it has no such part."""

    # The name of its entry point.
    name: str
    # Whether the settings of a run (`Tables`) ask for the option. None: where they have a table of
    # it.
    is_on: Callable[[Any], bool] | None = None
    # The `Section` of its table `extensions.NAME`.
    settings: str = ""
    # Its tables at the top of a file, each with its `Section`; None where a file leaves it out. The
    # module imports nothing but this package's settings, which import it.
    tables: Mapping[str, str] = field(default_factory=dict)
    # Settings of `tables` by which engines are made: servers and controller must agree on them.
    engine_settings: tuple[str, ...] = ()
    # Whether checkpoints hold a model of the option: a run that goes on keeps `tables`, or none.
    stores_model: bool = False
    # Whether one process can train steps of a run in several ways: checkpoints have all states.
    allows_trials: bool = True
    needs: tuple[Need, ...] = ()
    # The words for the option in a refusal, by default its name.
    title: str = ""
    # A function of the settings that yields a line for each rule between them that they break.
    rules: str = ""
    # A function of the settings that returns the user's own functions in its table, by their names
    # "module:function". A resume refuses others.
    own_functions: str = ""
    # Names of options whose parts of the same process come before its own.
    after: tuple[str, ...] = ()
    # A sequence of the launcher's `Check`s, which commands, dry runs and the doctor make.
    checks: str = ""
    # A function of the settings that raises ConfigError for wrong files in the model's folder.
    files_check: str = ""
    # A function of the settings that raises ConfigError where the option cannot work; trainer and
    # rollout server call it before they load anything.
    process_check: str = ""
    # A function of the controller's `Kernel` that returns a `Part`, or None.
    controller: str = ""
    # A function of the settings that returns the `EnvironmentRules` of each environment that has
    # rules of its own, by name.
    environment_rules: str = ""
    # A function of its table, as plain values, that returns how many episodes a group of each
    # environment has that does not have `algorithm.group_size`, by name.
    group_sizes: str = ""
    # Patterns, as of `fnmatch`, of settings in its table by which recorded batches are trained: a
    # replay may change them.
    training_settings: tuple[str, ...] = ()
    # Whether servers record what each token was drawn from, where `sampling` cuts, so that the
    # learner's probabilities are over the same tokens.
    replays_sampling: bool = False
    # Whether its part of the trainer estimates each token's log-probability by the learner at the
    # version that sampled it.
    scores_versions: bool = False
    # Whether its part of the controller is told of events before the publisher is.
    precedes_publisher: bool = False
    # A function of the settings and the policy that returns a `StepPart`, or None; collective.
    trainer: str = ""
    # A function of the settings that returns a `ModelPart`, before a model is opened.
    model: str = ""
    # A function of Megatron's block of layers and their places in the model. It changes the layers,
    # and returns the norm behind the last one.
    layers: str = ""
    # A function of settings, policy, published weights and the controller's client that returns a
    # `VersionWriter`, to which versions go in place of the servers.
    writer: str = ""
    # A function of the settings and the server's id that returns a `ServerPart`, or None.
    server: str = ""
    # A function of the settings, a folder for files, which is None without a server's own, and
    # whether the engine computes on a CPU. It returns arguments for vLLM.
    engine_arguments: str = ""
    # A coroutine function of the settings that starts the `Engine` of a server, in place of vLLM in
    # the server's own processes. `rollout_server.engine_url` needs an option that has one.
    engine: str = ""
    # A function of the engine's scheduler, the server's `EngineScheduler` or another extension's
    # subclass of it, that returns a subclass.
    scheduler: str = ""
    # Whether that subclass was tried with several batches in flight, as engines of stages have.
    schedules_stages: bool = False
    # A function of the settings and whether the engine computes on a CPU. It returns why the engine
    # leaves out features of the option, by their names; the run's status shows it.
    disabled_features: str = ""
    # Whether engines draft tokens with the option.
    drafts: bool = False
    # A function of the settings that returns the approximate number of parameters that are trained
    # and published beside the policy's. Each rank has them whole, in float32.
    parameters_beside_model: str = ""
    # Beginnings of the names of tensors that are published beside the policy's. Each has a class of
    # the engine's model, vLLM's runner and a function that loads tensors: a module that loads both.
    beside_model: Mapping[str, str] = field(default_factory=dict)
    # A function of vLLM's configuration and the number of tokens of a draft, in the engine's
    # process. It returns a `DraftSwitch`, or None if it does not decide about these drafts.
    draft_switch: str = ""
    # Processes of its own: a command of a run, or a check that reads the settings and ends.
    programs: Mapping[str, Program] = field(default_factory=dict)
    trackers: Mapping[str, Tracker] = field(default_factory=dict)
    # A function of the settings and the name of a process that returns the `logging.Formatter` of
    # its lines, or None for the usual text.
    log_formatter: str = ""
    # A function of the settings, the name of a process and its log's path. It returns the command
    # of a program that reads the process's output and writes the log.
    log_writer: str = ""
    # Names that `queue.kind` and `weights.transport` may have besides the built-in ones.
    queues: Mapping[str, Queue] = field(default_factory=dict)
    transports: Mapping[str, Transport] = field(default_factory=dict)
    # Functions by the settings of `algorithm` that may name them, such as "advantage". An
    # advantage's row is an `Estimator`, the others are `BuiltIn`s of `function_table`; each has its
    # `place`.
    algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@functools.cache
def installed() -> tuple[Extension, ...]:
    """Returns the manifests of all installed options, each behind those in its `after`.

    Raises ConfigError for a manifest that cannot be imported or is none, and for two of one name.
    """
    manifests: dict[str, Extension] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        place = f"the entry point {entry.name} of {GROUP} ({entry.value})"
        try:
            manifest = entry.load()
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigError(f"{place} cannot be loaded: {error}") from error
        if not isinstance(manifest, Extension) or manifest.name != entry.name:
            raise ConfigError(f"{place} must be an Extension of that name, got {manifest!r}")
        if entry.name in manifests:
            raise ConfigError(f"{place} stands beside another of that name: uninstall one of them")
        manifests[entry.name] = manifest
    return tuple(_sorted(manifests))


def _sorted(manifests: Mapping[str, Extension]) -> list[Extension]:
    """Returns the manifests by name, but each behind those in its `after` that are installed."""
    behind = {name: set(manifest.after) & set(manifests) for name, manifest in manifests.items()}
    order: list[Extension] = []
    while behind:
        free = next((name for name in sorted(behind) if not behind[name]), "")
        if not free:
            circle = ", ".join(sorted(behind))
            raise ConfigError(f"the extensions {circle} each come after another of them")
        del behind[free]
        order.append(manifests[free])
        for names in behind.values():
            names.discard(free)
    return order


def active(config: Any) -> list[Extension]:  # noqa: ANN401 - `Tables` is built from manifests
    """Returns the manifests of the options that the settings ask for."""
    return [manifest for manifest in installed() if asks_for(config, manifest)]


def asks_for(config: Any, manifest: Extension) -> bool:  # noqa: ANN401 - see `active`
    """Whether the settings ask for an option."""
    if manifest.is_on is None:
        tables = [getattr(config, name) for name in manifest.tables]
        return manifest.name in config.extensions or any(table is not None for table in tables)
    return manifest.is_on(config)


def is_of_training(setting: str) -> bool:
    """Whether an option's setting says how recorded batches are trained."""
    return any(
        fnmatchcase(setting, f"extensions.{manifest.name}.{pattern}{rest}")
        for manifest in installed()
        for pattern in manifest.training_settings
        for rest in ("", ".*")
    )


def own_functions(config: Any) -> Iterator[str]:  # noqa: ANN401 - see `active`
    """Yields the names of the user's own functions that options have in their tables."""
    for manifest in active(config):
        if manifest.own_functions:
            yield from resolve(manifest.own_functions)(config)


def unmet(config: Any) -> Iterator[str]:  # noqa: ANN401 - see `active`
    """Yields a line for each setting that an option needs otherwise."""
    for manifest in active(config):
        for need in manifest.needs:
            value = attrgetter(need.setting)(config)
            values = need.only if isinstance(need.only, tuple) else (need.only,)
            if value not in values:
                allowed = " or ".join(map(repr, values))
                title = manifest.title or manifest.name
                yield (f"{title} needs {need.setting} = {allowed}: {need.because}, got {value!r}")


def resolve(place: str) -> Any:  # noqa: ANN401 - each field of a manifest says what it names
    """Imports and returns what "module:attribute" names."""
    return pkgutil.resolve_name(place)


def program(command: str) -> Program:
    """Returns the process that `command` adds to a run; raises ConfigError if none is installed."""
    programs = _joined(manifest.programs for manifest in installed())
    if command not in programs:
        raise ConfigError(f"slipstream {command}: no installed extension gives this program")
    return programs[command]


def check_process(config: Any) -> None:  # noqa: ANN401 - see `active`
    """Raises ConfigError if an option that the settings ask for cannot work in this process."""
    for manifest in active(config):
        if manifest.process_check:
            resolve(manifest.process_check)(config)


BUILT_IN_QUEUES = {
    "grpc": Queue(
        sender="slipstream.protocol.queue.grpc:sender",
        receiver="slipstream.learner.controller.records.ledger:grpc_receiver",
    ),
}


def top_tables() -> dict[str, Any]:
    """Returns the sections of tables that extensions add at the top of a file, by their names."""
    places = _joined(manifest.tables for manifest in installed())
    return {name: resolve(place) for name, place in places.items()}


def num_parameters_beside_model(config: Any) -> int:  # noqa: ANN401 - see `active`
    """Returns the approximate number of parameters that options train beside the policy's."""
    return sum(
        resolve(manifest.parameters_beside_model)(config)
        for manifest in active(config)
        if manifest.parameters_beside_model
    )


def places_beside_model() -> dict[str, str]:
    """Returns the classes of `beside_model`, by the beginnings of tensors' names."""
    return _joined(manifest.beside_model for manifest in installed())


def queues() -> dict[str, Queue]:
    """Returns the queues that trajectories may wait in, by their names in `queue.kind`."""
    return BUILT_IN_QUEUES | _joined(manifest.queues for manifest in installed())


def transports() -> dict[str, Transport]:
    """Returns the transports that extensions add, by their names in `weights.transport`."""
    return _joined(manifest.transports for manifest in installed())


def trackers() -> dict[str, Tracker]:
    """Returns the trackers that extensions add, by their names in `tracking.trackers`."""
    return _joined(manifest.trackers for manifest in installed())


def algorithm_functions(kind: str) -> dict[str, Any]:
    """Returns the functions that extensions add, of the kind "advantage", "loss" or another."""
    return _joined(manifest.algorithms.get(kind, {}) for manifest in installed())


def _joined(tables: Iterable[Mapping[str, Row]]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for table in tables:
        for name in table:
            if name in rows:
                raise ConfigError(f"two installed extensions give {name!r}: uninstall one of them")
        rows |= table
    return rows

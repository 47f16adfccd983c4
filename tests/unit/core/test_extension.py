"""Which options are installed, in which order, and what is refused of a manifest."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from slipstream.core import extension
from slipstream.core.errors import ConfigError
from slipstream.core.extension import Extension, Program, Queue
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.sections import (
    ParallelSection,
    QueueSection,
    WeightsSection,
)
from slipstream.core.settings.tables import Tables, taken_names
from slipstream.extensions.drafts.settings import DraftsSection
from slipstream.learner.algorithms import functions
from slipstream.protocol.weights.transports import choose_transport
from support.fakes.small_configs import small_config

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "extensions" / "slipstream" / "extensions"
HEAVY = ("torch", "vllm", "megatron", "grpc", "redis", "prometheus_client", "fsspec")
# Loads all manifests and prints which heavy packages came with them.
LOADS = f"""
import sys
from slipstream.core.extension import installed
assert len(installed()) >= 16
print([name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    """Lets a test install manifests of its own."""
    extension.installed.cache_clear()
    yield
    extension.installed.cache_clear()


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, module: str
) -> None:
    """Makes a package with entry points, whose module is `outside_manifest`."""
    information = folder / "outside-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outside\nVersion: 1\n"
    )
    (information / "entry_points.txt").write_text(
        f"[slipstream.extensions]\n{entries}\n"
    )
    (folder / "outside_manifest.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "outside_manifest", raising=False)


def names() -> list[str]:
    return [manifest.name for manifest in extension.installed()]


def test_every_folder_of_an_extension_has_an_installed_manifest() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/*.py")}
    assert folders == set(names())


def place_holders(manifest: Extension) -> Iterator[object]:
    """Yields whatever of a manifest may be a place, or has one as a field."""
    yield from vars(manifest).values()
    yield from manifest.trackers.values()
    yield from manifest.tables.values()
    for row in (*manifest.queues.values(), *manifest.transports.values()):
        yield from vars(row).values()


def places(manifest: Extension) -> Iterator[str]:
    """Yields each "module:attribute" of a manifest."""
    for value in place_holders(manifest):
        text = getattr(value, "place", value)
        if isinstance(text, str) and ":" in text:
            yield text


@pytest.mark.parametrize(
    "manifest", extension.installed(), ids=lambda manifest: manifest.name
)
def test_every_place_of_a_manifest_exists(manifest: Extension) -> None:
    for place in places(manifest):
        module, _, attribute = place.partition(":")
        path = ROOT / "extensions" / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        definitions = [node.name for node in tree.body if hasattr(node, "name")]
        constants = [node for node in tree.body if isinstance(node, ast.Assign)]
        definitions += [ast.unparse(node.targets[0]) for node in constants]
        assert attribute in definitions, place


@pytest.mark.process
def test_manifests_load_no_heavy_package() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LOADS],
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout == "[]\n"


def test_parts_of_the_trainer_keep_their_order() -> None:
    trainer_parts = [
        manifest.name for manifest in extension.installed() if manifest.trainer
    ]
    assert trainer_parts == [
        "profiles",
        "turns",
        "prefix_sharing",
        "other_models",
        "drafts",
        "router_replay",
        "sampling_replay",
        "staleness_split",
    ]


@pytest.mark.usefixtures("fresh")
def test_another_package_adds_an_option(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "from slipstream.core.extension import Extension\n"
    module += 'FIRST = Extension(name="a_first", after=("a_second",))\n'
    module += 'SECOND = Extension(name="a_second", is_on=lambda config: config > 1)\n'
    entries = "a_first = outside_manifest:FIRST\na_second = outside_manifest:SECOND"
    install(tmp_path, monkeypatch, entries, module)
    assert names()[:2] == ["a_second", "a_first"]
    second = extension.installed()[0]
    assert second.is_on(2)
    assert not second.is_on(1)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("entry", "module", "cause"),
    [
        ("a = outside_manifest:NONE", "", "cannot be loaded"),
        (
            "a = outside_manifest:X",
            "import nowhere_at_all\n",
            "cannot be loaded: No module",
        ),
        (
            "a = outside_manifest:X",
            "X = 1\n",
            "must be an Extension of that name, got 1",
        ),
        (
            "a = outside_manifest:X",
            "from slipstream.core.extension import Extension\nX = Extension(name='b')\n",
            "must be an Extension of that name",
        ),
        (
            "redis = outside_manifest:X",
            "from slipstream.core.extension import Extension\nX = Extension(name='redis')\n",
            "stands beside another of that name",
        ),
        (
            "a = outside_manifest:X",
            "from slipstream.core.extension import Extension\nX = Extension(queue='b')\n",
            "cannot be loaded: Extension.__init__()",
        ),
    ],
)
def test_a_wrong_manifest_is_refused_with_its_entry_point(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    module: str,
    cause: str,
) -> None:
    install(tmp_path, monkeypatch, entry, module)
    with pytest.raises(
        ConfigError, match="the entry point .* of slipstream.extensions"
    ) as error:
        extension.installed()
    assert cause in str(error.value)


@pytest.mark.usefixtures("fresh")
def test_extensions_that_wait_for_each_other_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "from slipstream.core.extension import Extension\n"
    module += 'FIRST = Extension(name="a", after=("b",))\n'
    module += 'SECOND = Extension(name="b", after=("a",))\n'
    entries = "a = outside_manifest:FIRST\nb = outside_manifest:SECOND"
    install(tmp_path, monkeypatch, entries, module)
    with pytest.raises(
        ConfigError, match="the extensions a, b each come after another of them"
    ):
        extension.installed()


def test_a_program_is_found_by_its_command() -> None:
    program = extension.program("tinker")
    assert program == Program(
        "tinker", "slipstream.extensions.tinker.front", restarts=5
    )
    with pytest.raises(ConfigError, match="slipstream brew: no installed extension"):
        extension.program("brew")


ADDS = """
from slipstream.core.extension import Extension, Queue, Transport
from slipstream.core.settings.function_table import Estimator
from slipstream.core.settings.section import Section

class Arguments(Section):
    power: float = 2.0

MANIFEST = Extension(
    name="outside",
    queues={"folder": Queue(sender="a:b", receiver="a:c")},
    transports={"pigeon": Transport(sender="a:d", receiver="a:e")},
    algorithms={
        "advantage": {
            "median": Estimator(Arguments, compares_group=True, place="statistics:median"),
        },
    },
)
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """An extension with a queue, a transport and an advantage."""
    install(tmp_path, monkeypatch, "outside = outside_manifest:MANIFEST", ADDS)


def message(error: pytest.ExceptionInfo[ValidationError]) -> str:
    return error.value.errors()[0]["msg"]


def test_names_of_queues_and_transports_are_refused_as_before() -> None:
    with pytest.raises(ValidationError) as queue:
        QueueSection.model_validate({"kind": "folder"})
    assert message(queue) == "Input should be 'grpc' or 'redis'"
    with pytest.raises(ValidationError) as transport:
        WeightsSection.model_validate({"transport": 3})
    assert message(transport) == "Input should be 'auto', 'gloo', 'nccl' or 'ipc'"
    with pytest.raises(ValidationError) as algorithm:
        AlgorithmSection.model_validate({"filter": "median"})
    told = "input should be none, unequal_rewards or module:function, got 'median'"
    assert message(algorithm) == f"Value error, {told}"


@pytest.mark.usefixtures("added")
def test_an_extension_adds_names_of_queues_and_transports() -> None:
    assert QueueSection.model_validate({"kind": "folder"}).kind == "folder"
    assert extension.queues()["folder"] == Queue(sender="a:b", receiver="a:c")
    section = WeightsSection.model_validate({"transport": "pigeon"})
    assert (
        choose_transport(section.transport, [], {}, parallel=ParallelSection())
        == "pigeon"
    )
    with pytest.raises(ValidationError) as error:
        QueueSection.model_validate({"kind": "carrier"})
    assert message(error) == "Input should be 'grpc', 'folder' or 'redis'"


@pytest.mark.usefixtures("added")
def test_an_advantage_of_an_extension_has_its_rules_and_arguments() -> None:
    section = AlgorithmSection.model_validate({"advantage": "median"})
    assert section.advantage_args == {"power": 2.0}
    assert section.estimator is not None
    assert section.estimator.compares_group
    assert section.own_functions == {}
    alone = {"advantage": "median", "group_size": 1}
    with pytest.raises(
        ValidationError, match="'median' compares a group: group_size must be >= 2"
    ):
        AlgorithmSection.model_validate(alone)
    wrong = {"advantage": "median", "advantage_args": {"strength": 1.0}}
    with pytest.raises(
        ValidationError, match="has no argument 'strength'; known: power"
    ):
        AlgorithmSection.model_validate(wrong)
    function = functions.function_of(section, "advantage")
    assert function.call.func is statistics.median
    assert function.call.keywords == {"power": 2.0}


@pytest.mark.usefixtures("added")
def test_two_extensions_that_give_one_name_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    module = "from slipstream.core.extension import Extension, Queue\n"
    module += 'X = Extension(name="x", queues={"redis": Queue(sender="a:b", receiver="a:c")})\n'
    install(other, monkeypatch, "x = outside_manifest:X", module)
    with pytest.raises(ConfigError, match="two installed extensions give 'redis'"):
        extension.queues()


def test_tables_that_extensions_add_stand_between_the_built_in_ones() -> None:
    names_in_order = [*Tables.model_fields]
    assert names_in_order[:2] == ["run", "model"]
    places = slice(names_in_order.index("critic") + 1, names_in_order.index("lora"))
    assert sorted(names_in_order[places]) == ["drafts", "logging"]


def test_a_table_with_the_name_of_a_built_in_one_is_found() -> None:
    assert taken_names(["run", "own", "drafts", "lora"]) == ["lora", "run"]
    assert taken_names(extension.top_tables()) == []


def test_a_table_is_read_as_the_section_that_its_extension_names() -> None:
    config = small_config(drafts={"tokens": 2})
    drafts = config.top_table("drafts", DraftsSection)
    assert drafts is not None
    assert drafts.tokens == 2
    assert small_config().top_table("drafts", DraftsSection) is None
    with pytest.raises(TypeError, match="the table drafts is no QueueSection"):
        config.top_table("drafts", QueueSection)


def test_an_option_is_on_where_one_of_its_tables_is_there() -> None:
    manifests = [
        extension.active(small_config(**tables)) for tables in ({}, {"drafts": {}})
    ]
    has_drafts = [
        "drafts" in [manifest.name for manifest in active] for active in manifests
    ]
    assert has_drafts == [False, True]

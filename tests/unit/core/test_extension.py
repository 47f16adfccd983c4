"""Which options are installed, in which order, and what is refused of a manifest."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.core import extension
from slipstream.core.errors import ConfigError
from slipstream.core.extension import Extension, Program

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


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, module: str) -> None:
    """Makes a package with entry points, whose module is `outside_manifest`."""
    information = folder / "outside-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[slipstream.extensions]\n{entries}\n")
    (folder / "outside_manifest.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "outside_manifest", raising=False)


def names() -> list[str]:
    return [manifest.name for manifest in extension.installed()]


def test_every_folder_of_an_extension_has_an_installed_manifest() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/*.py")}
    assert folders == set(names())


def places(manifest: Extension) -> Iterator[str]:
    """Yields each "module:attribute" of a manifest."""
    for value in (*vars(manifest).values(), *manifest.trackers.values()):
        text = getattr(value, "place", value)
        if isinstance(text, str) and ":" in text:
            yield text


@pytest.mark.parametrize("manifest", extension.installed(), ids=lambda manifest: manifest.name)
def test_every_place_of_a_manifest_exists(manifest: Extension) -> None:
    for place in places(manifest):
        module, _, attribute = place.partition(":")
        path = ROOT / "extensions" / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        definitions = [node.name for node in tree.body if hasattr(node, "name")]
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
    trainer_parts = [manifest.name for manifest in extension.installed() if manifest.trainer]
    assert trainer_parts == [
        "profiles",
        "turns",
        "prefix_sharing",
        "other_models",
        "drafts",
        "router_replay",
    ]


@pytest.mark.usefixtures("fresh")
def test_another_package_adds_an_option(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "from slipstream.core.extension import Extension\n"
    module += 'FIRST = Extension(name="a_first", after=("b_second",))\n'
    module += 'SECOND = Extension(name="b_second", is_on=lambda config: config > 1)\n'
    entries = "a_first = outside_manifest:FIRST\nb_second = outside_manifest:SECOND"
    install(tmp_path, monkeypatch, entries, module)
    assert names()[:2] == ["b_second", "a_first"]
    second = extension.installed()[0]
    assert second.is_on(2)
    assert not second.is_on(1)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("entry", "module", "cause"),
    [
        ("a = outside_manifest:NONE", "", "cannot be loaded"),
        ("a = outside_manifest:X", "import nowhere_at_all\n", "cannot be loaded: No module"),
        ("a = outside_manifest:X", "X = 1\n", "must be an Extension of that name, got 1"),
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
    with pytest.raises(ConfigError, match="the entry point .* of slipstream.extensions") as error:
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
    with pytest.raises(ConfigError, match="the extensions a, b each come after another of them"):
        extension.installed()


def test_a_program_is_found_by_its_command() -> None:
    program = extension.program("tinker")
    assert program == Program("tinker", "slipstream.extensions.tinker.front", restarts=5)
    with pytest.raises(ConfigError, match="slipstream brew: no installed extension"):
        extension.program("brew")

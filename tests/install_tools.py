"""Installs programs and packages of others, each in a folder of its own, and runs their tests.

`make test-tools` installs them in .venv/tools, at most `LIMIT_S` long; `ONLY="s3 agents"` chooses.
A tool that cannot be had, such as without a network, is named in one line, and its tests are
skipped.
"""

import argparse
import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
FOLDER = Path(sys.prefix) / "tools"
# On two cores all of them take one minute.
LIMIT_S = 180.0
# An index that does not answer is asked once more; no word about newer versions of a client.
ENVIRON = {
    "PIP_RETRIES": "1",
    "PIP_DEFAULT_TIMEOUT": "15",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "npm_config_fetch_retries": "1",
    "npm_config_fetch_timeout": "15000",
    "npm_config_update_notifier": "false",
}
APT = ("apt-get", "--quiet", "-o=APT::Sandbox::User=root", "-o=Acquire::Retries=1")
# promtool and prometheus; redis-server, which is in redis-tools, and what it links to.
DEBIAN_PACKAGES = ("prometheus", "redis-tools", "libjemalloc2", "liblzf1")
PROGRAMS = ("promtool", "prometheus")
# No agent reaches anything but the endpoint of its test.
ALONE = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


class NotInstalled(Exception):
    """A tool cannot be had here; the message is one line."""


Run = Callable[[Sequence[str | Path], Path], None]


@dataclass(frozen=True)
class Tool:
    """What is installed in `FOLDER/name`, and the tests that need it."""

    name: str
    tests: tuple[str, ...]
    pins: tuple[str, ...]
    install: Callable[[Path, Run], None]

    def stamp(self) -> str:
        """The content of the file that says that this tool is installed as listed."""
        texts = [(REQUIREMENTS / f"{name}.txt").read_text() for name in self.pins]
        return "\n".join([" ".join(DEBIAN_PACKAGES), *texts])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns pytest's exit code, whatever could not be installed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    names = [tool.name for tool in TOOLS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="TOOL"
    )
    parser.add_argument("pytest", nargs="*", help="options of pytest, behind --")
    options = parser.parse_args(arguments)
    tools = [tool for tool in TOOLS if tool.name in options.only]
    causes = install(tools, FOLDER, limit_s=LIMIT_S)
    if causes:
        text = "; ".join(f"{name} ({cause})" for name, cause in causes.items())
        print(f"not to be had here, so their tests are skipped: {text}", flush=True)
    tests = dict.fromkeys(test for tool in tools for test in tool.tests)
    command = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", *tests]
    may_be_alone = subprocess.run([*ALONE, "true"], capture_output=True, check=False)
    prefix = ALONE if may_be_alone.returncode == 0 else ()
    return subprocess.run(
        [*prefix, *command, *options.pytest], cwd=ROOT, check=False
    ).returncode


def install(tools: Iterable[Tool], folder: Path, *, limit_s: float) -> dict[str, str]:
    """Installs tools side by side, and returns why some could not be, by name."""
    until = time.monotonic() + limit_s

    def run(command: Sequence[str | Path], within: Path) -> None:
        completed(command, within, until=until)

    with ThreadPoolExecutor(max_workers=3) as pool:
        causes = {
            tool.name: pool.submit(install_one, tool, folder / tool.name, run)
            for tool in tools
        }
        return {
            name: cause for name, future in causes.items() if (cause := future.result())
        }


def install_one(tool: Tool, folder: Path, run: Run) -> str:
    """Returns why the tool could not be installed; what is there of it is then removed."""
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == tool.stamp():
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        tool.install(folder, run)
    except NotInstalled as error:
        shutil.rmtree(folder)
        return str(error)
    stamp.write_text(tool.stamp())
    return ""


def completed(command: Sequence[str | Path], within: Path, *, until: float) -> None:
    """Runs a command in a folder; ends it and all that it started when the time is over.

    Raises:
        NotInstalled: the program is missing, has failed, or was ended.
    """
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            cwd=within,
            env=os.environ | ENVIRON,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise NotInstalled(f"there is no {name} here") from None
    try:
        _, errors = process.communicate(timeout=max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise NotInstalled("the time for installing is over") from None
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        cause = lines[-1].strip() if lines else f"exit code {process.returncode}"
        raise NotInstalled(f"{name}: {cause}")


def install_packages(list_name: str, folder: Path, run: Run) -> None:
    """Makes a virtual environment of a list in requirements/, without pip in it."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    listed = REQUIREMENTS / f"{list_name}.txt"
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    options = ["--quiet", "--no-deps", "--no-compile", "--requirement", listed]
    run([*pip, "install", *options], folder)


def programs(folder: Path, run: Run) -> None:
    """Unpacks packages of Debian: nothing of this machine changes, and no daemon is started."""
    if shutil.which("promtool") and shutil.which("redis-server"):
        return
    try:
        run([*APT, "download", *DEBIAN_PACKAGES], folder)
    except NotInstalled:
        # A new machine has no list of what there is.
        run([*APT, "update"], folder)
        run([*APT, "download", *DEBIAN_PACKAGES], folder)
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "--extract", package, folder], folder)
        package.unlink()
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        (folder / "bin" / name).symlink_to(folder / "usr" / "bin" / name)
    # The name by which a program is called says whether it is the server.
    server = folder / "usr" / "bin" / "redis-server"
    server.symlink_to("redis-check-rdb")
    (libraries,) = (folder / "usr" / "lib").glob("*-linux-gnu")
    script = folder / "bin" / server.name
    path = f"LD_LIBRARY_PATH={shlex.quote(str(libraries))}"
    script.write_text(f'#!/bin/sh\n{path} exec {shlex.quote(str(server))} "$@"\n')
    script.chmod(0o755)


def browser(_folder: Path, _run: Run) -> None:
    """Chromium of this machine: its libraries cannot be unpacked into a folder."""
    if shutil.which("chromium") is None:
        raise NotInstalled(
            "there is no chromium here, such as of apt-get install chromium"
        )


def kubernetes(folder: Path, run: Run) -> None:
    """Helm, kubectl and the schemas of Kubernetes."""
    install_packages("kubernetes", folder, run)
    (package,) = folder.glob("lib/python*/site-packages/aws_cdk/*/_jsii/*.tgz")
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        programs_of_layer = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm", "kubectl"):
        (folder / name).write_bytes(programs_of_layer.read(f"{name}/{name}"))
        (folder / name).chmod(0o755)


def frameworks(folder: Path, run: Run) -> None:
    """verifiers, with the environments of its own tests."""
    environment = folder / "verifiers"
    environment.mkdir()
    install_packages("verifiers", environment, run)
    pins = dict(pin.split("==") for pin in listed_pins("verifiers"))
    pin = f"verifiers=={pins['verifiers']}"
    options = ["--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    run([sys.executable, "-m", "pip", "download", *options, pin], folder)
    (source,) = folder.glob("verifiers-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (packages,) = environment.glob("lib/python*/site-packages")
    fixtures = (
        folder / source.name.removesuffix(".tar.gz") / "tests" / "v1" / "fixtures"
    )
    (packages / "fixtures.pth").write_text(f"{fixtures}\n")


def agents(folder: Path, run: Run) -> None:
    """Agents in Python, and those of npm, which run no script when they are installed."""
    (folder / "py").mkdir()
    install_packages("agents", folder / "py", run)
    options = [
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix=node",
    ]
    run(["npm", "install", *options, *listed_pins("agents-npm")], folder)
    run(["node", "install.cjs"], folder / "node/node_modules/@anthropic-ai/claude-code")


def packages_alone(list_name: str) -> Callable[[Path, Run], None]:
    """A tool that is a list in requirements/ and nothing else."""

    def install_list(folder: Path, run: Run) -> None:
        install_packages(list_name, folder, run)

    return install_list


def listed_pins(name: str) -> list[str]:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


# The slowest first.
TOOLS = (
    Tool(
        "frameworks",
        ("tests/integration/test_other_frameworks.py",),
        ("verifiers",),
        frameworks,
    ),
    Tool(
        "agents",
        ("tests/integration/test_other_agents.py",),
        ("agents", "agents-npm"),
        agents,
    ),
    Tool(
        "kubernetes",
        ("tests/integration/test_kubernetes_schemas.py",),
        ("kubernetes",),
        kubernetes,
    ),
    Tool(
        "trackers",
        (
            "tests/integration/test_tracking.py",
            "tests/unit/extensions/trackers/test_export_metrics.py",
            "tests/unit/learner/controller/reporting/test_trackers.py",
        ),
        ("trackers",),
        packages_alone("trackers"),
    ),
    Tool(
        "programs",
        (
            "tests/integration/test_alerts.py",
            "tests/integration/test_prometheus.py",
            "tests/unit/extensions/redis/test_redis_losses.py",
        ),
        (),
        programs,
    ),
    Tool("browser", ("tests/integration/test_page_in_browser.py",), (), browser),
    Tool(
        "s3", ("tests/integration/test_storage_s3.py",), ("s3",), packages_alone("s3")
    ),
    Tool(
        "skypilot",
        ("tests/integration/test_skypilot.py",),
        ("skypilot",),
        packages_alone("skypilot"),
    ),
)


if __name__ == "__main__":
    sys.exit(main())

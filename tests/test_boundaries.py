"""Rules on which package may import which, and on what no source may contain."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import slipstream

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = (
    "protos",
    "core",
    "client",
    "environments",
    "rollout_server",
    "learner",
    "extensions",
)
MAX_LINES = 600

# Package prefix -> packages of ours that it may import; itself always.
LAYERS = {
    "slipstream.v1": (),
    "slipstream.core": ("slipstream.v1",),
    "slipstream.protocol": ("slipstream.core", "slipstream.v1"),
    "slipstream.client": ("slipstream.protocol", "slipstream.core", "slipstream.v1"),
    "slipstream.environments": (
        "slipstream.client",
        "slipstream.core",
        "slipstream.v1",
    ),
    "slipstream.rollout_server": (
        "slipstream.protocol",
        "slipstream.core",
        "slipstream.v1",
    ),
    "slipstream.learner": ("slipstream.protocol", "slipstream.core", "slipstream.v1"),
    "slipstream.extensions": (
        "slipstream.client",
        "slipstream.rollout_server",
        "slipstream.learner",
        "slipstream.protocol",
        "slipstream.core",
        "slipstream.v1",
    ),
}
EXTENSIONS = "slipstream.extensions"
# A module of an extension with such a name is a part of that process, and imports what it may.
PARTS = {
    "controller": "slipstream.learner.controller",
    "trainer": "slipstream.learner.trainer",
    "server": "slipstream.rollout_server",
}
# The controller's modules and folders from the ground up: each imports only what stands before it.
STAIRS = (
    "events",
    "run",
    "servers",
    "records",
    "tasks",
    "leasing",
    "trajectories",
    "part",
    "publishing",
    "loop",
    "set_aside_batch",
    "watch",
    "reporting",
    "services",
    "results",
    "kernel",
    "application",
    "__main__",
)
# Packages whose modules and folders form no circle either.
FLIGHTS = (
    "slipstream.learner.controller",
    "slipstream.learner.trainer",
    "slipstream.rollout_server",
    "slipstream.client",
    "slipstream.environments",
    "slipstream.protocol",
    "slipstream.core",
)
# Packages and modules of what a run may do without.
OPTIONAL = (
    "slipstream.client.agent_episodes",
    "slipstream.client.agent_exchange",
    "slipstream.client.agent_gateway",
    "slipstream.client.agent_socket",
    "slipstream.environments",
    "slipstream.extensions",
    "slipstream.learner.controller.reporting",
    "slipstream.rollout_server.agents",
    "slipstream.rollout_server.episodes.agent_talk",
    "slipstream.rollout_server.vllm.agent_application",
    "slipstream.rollout_server.vllm.agent_services",
    "slipstream.rollout_server.vllm.reply_reader",
)
# Package of others -> the only modules of ours that may import it.
OWNERS = {
    "vllm": (
        "slipstream.rollout_server.vllm",
        "slipstream.extensions.engine_bits",
        "slipstream.extensions.fast_decoding.server",
    ),
    "slipstream.rollout_server.vllm": (
        "slipstream.rollout_server.vllm",
        "slipstream.rollout_server.__main__",
        "slipstream.rollout_server.engine_check",
        "slipstream.extensions.fast_decoding.server",
    ),
    "megatron": ("slipstream.learner.trainer",),
    "transformer_engine": ("slipstream.learner.trainer",),
    "redis": (
        "slipstream.extensions.redis.queue",
        "slipstream.extensions.redis.connection",
        "slipstream.extensions.redis.receiver",
    ),
    "fsspec": ("slipstream.extensions.stored_weights.storage",),
    "sandlock": ("slipstream.environments.sandbox",),
    "cupy": (
        "slipstream.protocol.weights.digests",
        "slipstream.protocol.weights.nccl_group",
        "slipstream.protocol.weights.shared_buffers",
        "slipstream.learner.trainer",
    ),
    "torch": (
        "slipstream.learner.trainer",
        "slipstream.rollout_server",
        "slipstream.extensions.engine_bits.row_kernels",
        "slipstream.extensions.proofs",
        "slipstream.extensions.prefix_sharing.path_sums",
        "slipstream.extensions.drafts.layer",
        *(f"slipstream.learner.algorithms.{name}" for name in ("inputs", "losses")),
    ),
}
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "jsonpickle",
}
# The modules' pipes, queues and files pickle what goes through them.
PICKLING_MODULES = {"multiprocessing", "joblib", "torch.multiprocessing", "pandas"}
# torch's collectives of any object pickle it.
PICKLING_CALLS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "read_pickle",
    "to_pickle",
}
# The one reader of a pickle that torch insists on; it lets only plain records out.
UNPICKLER = "slipstream.learner.trainer.checkpoints.restricted_pickle"
# A handler of gRPC owns the wait of its reader.
ALLOWED = {"slipstream.protocol.queue.grpc": "no limit"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "yaml.load", "os.system", "os.popen"}
# A source that unpickles or runs text as code has one of these. Few have, and the syntax tree of
# all sources takes seconds.
SUSPICIOUS = re.compile(
    rf"\b(?:{'|'.join(FORBIDDEN_MODULES)})\b|"
    rf"\b(?:{'|'.join(name.rpartition('.')[2] for name in FORBIDDEN_CALLS)}|load)\s*\(|\bshell\b"
)
ALL_INTERFACES = ".".join("0000")


def module_name(path: Path) -> str:
    for root in SOURCE_ROOTS:
        if path.is_relative_to(ROOT / root):
            parts = path.relative_to(ROOT / root).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    if path.is_relative_to(ROOT / "benchmarks"):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return path.stem


def part_of(module: str) -> str:
    """The part of an extension in which a module lies, or ""."""
    names = module.split(".")
    return names[3] if within(module, EXTENSIONS) and len(names) > 3 else ""


def process_of(path: Path) -> str:
    """The name of a module, or of the process whose part it is."""
    name = module_name(path)
    return PARTS.get(part_of(name), name)


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def package_sources() -> list[Path]:
    return sorted(
        path
        for root in SOURCE_ROOTS
        # All packages are below "slipstream" itself, whose names are imported on their first use.
        for path in (ROOT / root / "slipstream").glob("*/**/*.py")
        if not is_generated(path)
    )


def all_sources() -> list[Path]:
    other_parts = [
        path
        for folder in ("deploy", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return [*package_sources(), ROOT / "protos" / "generate.py", *sorted(other_parts)]


@functools.cache
def nodes(text: str) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """The imports and calls of a module, at any depth; most rules look at the same modules."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported, at any depth of the module."""
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path.read_text()) if isinstance(node, ast.Call))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_packages_import_only_what_lies_below_them() -> None:
    wrong = []
    for path in package_sources():
        layer = next(package for package in LAYERS if within(process_of(path), package))
        allowed = (layer, *LAYERS[layer])
        wrong += [
            f"{where(path, line)}: {name}"
            for line, name in imports(path)
            if within(name, "slipstream")
            and not any(within(name, package) for package in allowed)
            # Imports of extensions have tests of their own.
            and not within(name, EXTENSIONS)
        ]
    assert not wrong


def test_the_kernel_names_no_extension() -> None:
    """Manifests at entry points tell it which options there are."""
    wrong = [
        where(path, line)
        for path in package_sources()
        if not within(module_name(path), EXTENSIONS)
        for line, text in enumerate(path.read_text().splitlines(), 1)
        if EXTENSIONS in text
    ]
    assert not wrong


def test_an_extension_imports_no_other_one_and_each_process_its_own_part_only() -> None:
    wrong = []
    for path in package_sources():
        module = module_name(path)
        if not within(module, EXTENSIONS) or module == EXTENSIONS:
            continue
        package = ".".join(module.split(".")[:3])
        part = part_of(module)
        foreign = PARTS.keys() - {part} if part in PARTS else ()
        for line, name in imports(path):
            is_foreign = within(name, EXTENSIONS) and not within(name, package)
            if is_foreign or any(
                within(name, f"{package}.{other}") for other in foreign
            ):
                wrong.append(f"{where(path, line)}: {name}")
    assert not wrong


def test_the_controller_does_not_import_the_trainer_which_would_bring_torch() -> None:
    wrong = [
        f"{where(path, line)}: {name}"
        for path in package_sources()
        if within(process_of(path), "slipstream.learner.controller")
        for line, name in imports(path)
        if within(name, "slipstream.learner.trainer")
    ]
    assert not wrong


def kernel() -> list[str]:
    """Returns the modules that docs/architecture.md calls the kernel, in their order there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("\n## The kernel") : text.index("\n## Words")]
    return re.findall(r"^\| `(slipstream\.[\w.]+)` \|", section, re.MULTILINE)


def test_the_kernel_imports_no_extension() -> None:
    paths = {module_name(path): path for path in package_sources()}
    for optional in OPTIONAL:
        assert any(within(module, optional) for module in paths), f"{optional} is gone"
    wrong = [
        f"{where(paths[module], line)}: {name}"
        for module in kernel()
        for line, name in imports(paths[module])
        if any(within(name, optional) for optional in OPTIONAL)
    ]
    assert not wrong


def own_imports(sources: Sequence[Path]) -> dict[str, set[str]]:
    """Returns for each of these modules those among them that it imports, at any depth."""
    modules = {module_name(path): path for path in sources}
    imports_by_module = {}
    for module, path in modules.items():
        names = {name for _, name in imports(path)}
        parents = {name.rpartition(".")[0] for name in names - modules.keys()}
        imports_by_module[module] = ((names | parents) & modules.keys()) - {module}
    return imports_by_module


def circle(graph: dict[str, set[str]]) -> set[str]:
    """Returns the nodes that lie on a circle of the graph or lead to one."""
    remaining = dict(graph)
    while free := [
        node for node, imports in remaining.items() if not imports & remaining.keys()
    ]:
        for node in free:
            del remaining[node]
    return set(remaining)


def stairs(package: str) -> dict[str, set[str]]:
    """Returns for each module or folder of a package those of the package that it imports."""
    arrows: dict[str, set[str]] = {}
    for module, imports in own_imports(package_sources()).items():
        if not within(module, package) or module == package:
            continue
        step = module.removeprefix(f"{package}.").split(".")[0]
        below = {
            other.removeprefix(f"{package}.").split(".")[0]
            for other in imports
            if within(other, package) and other != package
        }
        arrows.setdefault(step, set()).update(below - {step})
    return arrows


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(own_imports(package_sources())) == set()


def test_no_benchmarks_import_each_other_in_a_circle() -> None:
    imports_of_benchmarks = own_imports(sorted((ROOT / "benchmarks").rglob("*.py")))
    assert (
        "benchmarks.common.measure" in imports_of_benchmarks["benchmarks.common.report"]
    )
    assert circle(imports_of_benchmarks) == set()


@pytest.mark.parametrize("package", FLIGHTS)
def test_no_folders_import_each_other_in_a_circle(package: str) -> None:
    assert circle(stairs(package)) == set()


def test_the_controllers_folders_import_downwards_only() -> None:
    steps = stairs("slipstream.learner.controller")
    assert steps.keys() == set(STAIRS)
    upwards = {
        (step, other)
        for step, imports in steps.items()
        for other in imports
        if STAIRS.index(other) > STAIRS.index(step)
    }
    assert upwards == set()


def test_circles_are_noticed() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def test_only_its_own_methods_change_the_progress_of_the_run() -> None:
    wrong = [
        f"{where(path, node.lineno)}: {dotted(node)}"
        for path in all_sources()
        if re.search(r"progress\s*\.", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and dotted(node.value).rpartition(".")[2].removeprefix("_") == "progress"
    ]
    assert not wrong


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_are_imported_by_their_owners_only(package: str) -> None:
    wrong = [
        f"{where(path, line)}: {name}"
        for path in package_sources()
        for line, name in imports(path)
        if within(name, package)
        and not any(
            within(name, owner)
            for owner in OWNERS[package]
            for name in (module_name(path), process_of(path))
        )
    ]
    assert not wrong


def test_only_the_clients_source_root_holds_the_package_itself_which_finds_the_others() -> (
    None
):
    holders = [
        r for r in SOURCE_ROOTS if (ROOT / r / "slipstream" / "__init__.py").exists()
    ]
    assert holders == ["client"]
    assert {Path(folder).parent.name for folder in slipstream.__path__} == {
        *SOURCE_ROOTS
    }


def test_every_package_is_typed() -> None:
    for package in LAYERS:
        (folder,) = (
            ROOT / root / package.replace(".", "/")
            for root in SOURCE_ROOTS
            if (ROOT / root / package.replace(".", "/")).is_dir()
        )
        assert (folder / "py.typed").is_file(), f"{folder} has no py.typed"


def unpickling(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of what unpickles, or runs text as code."""
    if not SUSPICIOUS.search(path.read_text()):
        return
    for line, name in imports(path):
        if name.split(".")[0] in FORBIDDEN_MODULES:
            yield line, name
    for call in calls(path):
        name = dotted(call.func)
        if name in FORBIDDEN_CALLS:
            yield call.lineno, f"{name}("
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        shell = keywords.get("shell")
        if isinstance(shell, ast.Constant) and shell.value:
            yield call.lineno, "shell=True"
        if name in ("torch.load", "numpy.load", "np.load"):
            safe = keywords.get(
                "weights_only" if name == "torch.load" else "allow_pickle"
            )
            value = safe.value if isinstance(safe, ast.Constant) else None
            if value is not (name == "torch.load"):
                yield call.lineno, f"{name} may unpickle"


def test_nothing_unpickles_or_runs_text_as_code() -> None:
    wrong = [
        f"{where(path, line)}: {what}"
        for path in all_sources()
        for line, what in unpickling(path)
        if (module_name(path), what) != (UNPICKLER, "pickle")
    ]
    assert not wrong


def doubtful_calls(path: Path) -> Iterator[tuple[int, str]]:
    """Line and complaint of calls that trust what they are given, or wait without a limit."""
    for call in calls(path):
        name = dotted(call.func).rpartition(".")[2]
        if name in PICKLING_CALLS:
            yield call.lineno, f"{name} pickles"
        for keyword in call.keywords:
            value = (
                keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
            )
            if keyword.arg == "trust_remote_code" and value is not False:
                yield call.lineno, "code of a model's folder"
            if keyword.arg in ("timeout", "timeout_s", "limit_s") and value is None:
                yield call.lineno, "no limit"
            if keyword.arg in ("verify", "check_hostname") and value is False:
                yield call.lineno, "whoever answers"


def test_no_package_pickles_by_another_name_or_trusts_what_it_reads() -> None:
    wrong = [
        f"{where(path, line)}: {name}"
        for path in package_sources()
        for line, name in imports(path)
        if any(within(name, module) for module in PICKLING_MODULES)
    ]
    for path in package_sources():
        allowed = ALLOWED.get(module_name(path))
        wrong += [
            f"{where(path, line)}: {what}"
            for line, what in doubtful_calls(path)
            if what != allowed
        ]
    assert not wrong


def test_json_is_read_as_bytes_which_no_locale_decodes_otherwise() -> None:
    wrong = [
        where(path, call.lineno)
        for path in package_sources()
        for call in calls(path)
        if dotted(call.func) == "json.loads" and ".read_text()" in ast.unparse(call)
    ]
    assert not wrong


def test_nothing_listens_on_all_interfaces() -> None:
    wrong = [
        where(path, line)
        for path in all_sources()
        for line, text in enumerate(path.read_text().splitlines(), start=1)
        if ALL_INTERFACES in text
    ]
    assert not wrong


def test_modules_can_be_read_in_one_sitting() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in package_sources()}
    long = {
        str(path.relative_to(ROOT)): length
        for path, length in lengths.items()
        if length > MAX_LINES
    }
    assert not long


def judged_times(path: Path) -> Iterator[tuple[int, str]]:
    """Each assertion that a length of time is short, and each processor clock."""
    for line, text in enumerate(path.read_text().splitlines(), start=1):
        if match := re.search(
            r"\b(thread|process)_time\(|assert .*\b[a-z_]+\(\) - \w+ <", text
        ):
            yield line, match[0]


def test_no_test_judges_time() -> None:
    wrong = [
        f"{where(path, line)}: {what}: count the work instead (support/rigs/counted_work.py)"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for line, what in judged_times(path)
    ]
    assert not wrong


def test_asyncios_processes_are_signalled_without_taking_their_exit_code() -> None:
    sources = {path: path.read_text() for path in package_sources()}
    wrong = [
        where(path, line)
        for path, text in sources.items()
        if "create_subprocess_exec" in text
        for line, code in enumerate(text.splitlines(), start=1)
        if re.search(r"\.(send_signal|kill|terminate)\(", code)
        and "os.kill" not in code
    ]
    assert not wrong, "slipstream.core.machine.process.send_signal does it"


@pytest.mark.process
def test_the_generated_code_is_what_the_proto_files_say() -> None:
    pytest.importorskip("grpc_tools")
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "protos" / "generate.py"),
            "--check",
            str(ROOT / "protos"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_rules_notice_what_they_forbid(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import pickle\ndef f():\n    from vllm import LLM\n    eval('1')\n"
    )
    assert list(imports(file)) == [(1, "pickle"), (3, "vllm.LLM")]
    assert [dotted(call.func) for call in calls(file)] == ["eval"]
    assert [what for _, what in unpickling(file)] == ["pickle", "eval("]
    for text, expected in (
        ("import dill.source", "dill.source"),
        ("from cloudpickle import loads", "cloudpickle.loads"),
        ("yaml.load(x)", "yaml.load("),
        ("os.system (x)", "os.system("),
        ("run(x, shell=True)", "shell=True"),
        ("torch.load(x)", "torch.load may unpickle"),
        ("np.load(x, allow_pickle=True)", "np.load may unpickle"),
    ):
        file.write_text(text)
        assert [what for _, what in unpickling(file)] == [expected]
    file.write_text(
        "a = time.process_time()\nassert time.monotonic() - a < 3\nb() - a < 3\n"
    )
    assert [line for line, _ in judged_times(file)] == [1, 2]
    file.write_text(
        "dist.all_gather_object(x, y)\nload(trust_remote_code=True)\nwait(timeout=None)\n"
        "get(verify=False)\nload(trust_remote_code=False)\nwait(timeout=1)\n"
    )
    assert [line for line, _ in doubtful_calls(file)] == [1, 2, 3, 4]


@pytest.mark.parametrize("start", [lambda: subprocess.run(["true"]), os.fork])
def test_a_test_without_the_marker_may_start_no_process(
    start: Callable[[], object],
) -> None:
    with pytest.raises(RuntimeError, match="give it the marker `process`"):
        start()

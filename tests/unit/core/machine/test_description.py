"""Free memory in control groups of both versions, with and without a namespace."""

from pathlib import Path

import psutil
import pytest
from slipstream.core.machine.description import free_memory

MIB = 1 << 20
V1 = {
    "limit": "limit_in_bytes",
    "used": "usage_in_bytes",
    "cached": "total_inactive_file",
}
V2 = {"limit": "max", "used": "current", "cached": "inactive_file"}


def write(group: Path, names: dict[str, str], limit: str) -> None:
    """A group that uses 300 MiB, of which 100 are cached files."""
    group.mkdir(parents=True, exist_ok=True)
    (group / f"memory.{names['limit']}").write_text(f"{limit}\n")
    (group / f"memory.{names['used']}").write_text(f"{300 * MIB}\n")
    (group / "memory.stat").write_text(f"cache 5\n{names['cached']} {100 * MIB}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_a_machine_without_a_limit_has_all_its_memory(root: Path) -> None:
    machine = psutil.virtual_memory().total
    for names, line, limit in (
        (V1, "4:cpu,memory:/", str(1 << 62)),
        (V2, "0::/", "max"),
    ):
        (root / "proc/self/cgroup").write_text(f"{line}\n")
        write(root / "sys/fs/cgroup" / ("memory" if names is V1 else "."), names, limit)
        assert free_memory(root)[1] == machine
    (root / "proc/self/cgroup").unlink()
    assert free_memory(root)[1] == machine


@pytest.mark.parametrize(
    ("line", "group", "names"),
    [
        ("0::/", "", V2),
        (
            "0::/system.slice/slurmstepd.scope/job_7",
            "system.slice/slurmstepd.scope/job_7",
            V2,
        ),
        # The limit of a group holds for what is below it.
        ("0::/job_7/step_0/task_0", "job_7", V2),
        ("9:memory:/slurm/uid_0/job_7/step_0", "memory/slurm/uid_0/job_7", V1),
        # A container of version 1 names its group as the host does, and sees it at the top.
        ("9:memory:/docker/0123", "memory", V1),
    ],
)
def test_a_control_group_bounds_what_is_free(
    root: Path, line: str, group: str, names
) -> None:
    (root / "proc/self/cgroup").write_text(f"12:cpuset:/other\n{line}\n")
    write(root / "sys/fs/cgroup" / group, names, str(900 * MIB))
    assert free_memory(root) == (700 * MIB, 900 * MIB)


def test_the_group_that_leaves_least_decides(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/outer/inner\n")
    write(root / "sys/fs/cgroup/outer", V2, str(400 * MIB))
    write(root / "sys/fs/cgroup/outer/inner", V2, str(900 * MIB))
    assert free_memory(root) == (200 * MIB, 400 * MIB)
    write(root / "sys/fs/cgroup/outer", V2, str(100 * MIB))
    assert free_memory(root) == (0, 100 * MIB)

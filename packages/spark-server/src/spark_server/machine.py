"""What the machine lets this process use: memory and CPUs, control groups included."""

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """available_memory_bytes: free now or at once; num_cpus: CPUs that the process may run on, at least 1."""

    available_memory_bytes: int
    num_cpus: int


def read_machine(root: Path = Path("/")) -> Machine:
    """`root` is where proc and sys are looked for."""
    available = [_meminfo_available(root / "proc/meminfo")]
    group = root / "sys/fs/cgroup"
    limit, used = _read_int(group / "memory.max"), _read_int(group / "memory.current")
    if limit is not None and used is not None:
        available.append(max(0, limit - used))
    return Machine(min(available), min(len(os.sched_getaffinity(0)), _cpu_quota(group / "cpu.max")))


def _meminfo_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024  # the file counts in KiB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # kernels before 3.14


def _cpu_quota(path: Path) -> int:
    """CPUs that the control group's quota amounts to, rounded up; a great many without one."""
    try:
        quota, period = path.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such controller, or "max": no quota
        return 1 << 16


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller, or "max": no limit
        return None

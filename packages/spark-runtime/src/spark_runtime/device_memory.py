"""What this process holds of a device's memory right now."""

from pathlib import Path

import torch


def allocated_bytes(device: torch.device | str) -> int:
    """Bytes that belong to this process: live tensors on a GPU; on the CPU private pages, mapped files not counted."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon line; Linux 4.5 or later has it")

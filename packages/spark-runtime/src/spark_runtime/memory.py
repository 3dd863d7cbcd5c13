"""The memory plan: weights, workspace and KV cache under one bound, decided before the first request. No torch."""

from dataclasses import dataclass

from spark_runtime.errors import OutOfMemoryError

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of the printed table."""

    name: str
    num_bytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory is used for; the rows sum up to at most bound_bytes."""

    rows: tuple[MemoryRow, ...]
    bound_bytes: int
    num_blocks: int

    @property
    def used_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    def lines(self) -> list[str]:
        """The plan as a table, one line a row, sizes in MiB."""
        rows = (*self.rows, MemoryRow("free", self.bound_bytes - self.used_bytes, f"of {self.bound_bytes // _MIB} MiB"))
        return [f"{row.name:<10} {row.num_bytes / _MIB:>10.1f} MiB  {row.detail}" for row in rows]


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What sequences may ask of the KV pool; sizes in tokens."""

    bytes_per_block: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)


def plan_memory(
    *,
    bound_bytes: int,
    weight_bytes: int,
    workspace_bytes: int,
    kv: KvDemand,
    kv_cache_bytes: int = 0,
    num_blocks: int | None = None,
) -> MemoryPlan:
    """Give the KV pool what weights and workspace leave of bound_bytes, at most what max_num_seqs full sequences need.

    kv_cache_bytes   bounds the KV pool as well, though never below one sequence of max_model_len tokens; 0 = no bound
    num_blocks       asks for just so many blocks instead

    Raises OutOfMemoryError, naming numbers and options, if the wanted blocks do not fit, or if they are fewer than one
    sequence of max_model_len tokens needs.
    """
    left = bound_bytes - weight_bytes - workspace_bytes
    fitting = max(left, 0) // kv.bytes_per_block
    needed = kv.blocks_per_sequence
    wanted = min(fitting, needed * kv.max_num_seqs) if num_blocks is None else num_blocks
    if kv_cache_bytes and num_blocks is None:
        wanted = min(wanted, max(needed, kv_cache_bytes // kv.bytes_per_block))
    if wanted < needed or wanted > fitting:
        raise OutOfMemoryError(
            _does_not_fit(bound_bytes, weight_bytes, workspace_bytes, kv, max(wanted, needed), wanted)
        )
    rows = (
        MemoryRow("weights", weight_bytes, ""),
        MemoryRow("workspace", workspace_bytes, "activations, attention scores and logits of one step"),
        MemoryRow(
            "kv cache",
            wanted * kv.bytes_per_block,
            f"{wanted} blocks of {kv.block_size} tokens, {wanted * kv.block_size} tokens in all",
        ),
    )
    return MemoryPlan(rows, bound_bytes, wanted)


def _does_not_fit(
    bound_bytes: int, weight_bytes: int, workspace_bytes: int, kv: KvDemand, num_blocks: int, wanted: int
) -> str:
    purpose = (
        f"one sequence of {kv.max_model_len} tokens" if wanted < kv.blocks_per_sequence else f"{num_blocks} blocks"
    )
    kv_bytes = num_blocks * kv.bytes_per_block
    total = weight_bytes + workspace_bytes + kv_bytes
    if total <= bound_bytes:  # memory suffices, the caller's number of blocks does not
        return f"kv cache: {wanted} blocks of {kv.block_size} tokens cannot hold {purpose}, which needs {num_blocks} blocks"
    longest = (bound_bytes - weight_bytes - workspace_bytes) // kv.bytes_per_block * kv.block_size
    hint = "raise --gpu-memory-utilization"
    if longest > 0:
        hint += f" or lower --max-seq-len to {longest}"
    return (
        f"not enough memory: weights {weight_bytes / _MIB:.1f} MiB + workspace {workspace_bytes / _MIB:.1f} MiB + "
        f"kv cache {kv_bytes / _MIB:.1f} MiB for {purpose} = {total / _MIB:.1f} MiB, "
        f"the bound is {bound_bytes / _MIB:.1f} MiB\n  hint: {hint}"
    )

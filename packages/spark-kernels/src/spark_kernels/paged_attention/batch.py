"""What paged attention needs to know of one step, whatever the layer."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError

if TYPE_CHECKING:
    from spark_kernels.paged_attention.plan import CpuPlan


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """B sequences that run T tokens together; each has 1 or more tokens, those of one sequence lie side by side.

    slots            int64 [T]     where each token's key and value go: block * block_size + offset in the block
    block_table      int64 [B, P]  the blocks of each sequence in order; what lies past its end is not read
    query_starts     B + 1 numbers: sequence b runs tokens query_starts[b] .. query_starts[b + 1] - 1
    context_lengths  B numbers: tokens of each sequence in the cache once this step's are written
    """

    slots: Tensor
    block_table: Tensor
    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    _plans: dict[int, "CpuPlan"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise UnsupportedShapeError where the counts do not go together."""
        num_sequences = len(self.context_lengths)
        if len(self.query_starts) != num_sequences + 1 or self.query_starts[0] != 0:
            raise UnsupportedShapeError(
                f"PagedBatch: query_starts {self.query_starts} for {num_sequences} sequences; wanted 0 and {num_sequences} ends"
            )
        if self.slots.shape != (self.query_starts[-1],) or self.block_table.shape[:1] != (num_sequences,):
            raise UnsupportedShapeError(
                f"PagedBatch: slots {tuple(self.slots.shape)}, block_table {tuple(self.block_table.shape)}; "
                f"wanted [{self.query_starts[-1]}] and [{num_sequences}, P]"
            )
        for start, end, context in zip(self.query_starts, self.query_starts[1:], self.context_lengths, strict=False):
            if not 0 < end - start <= context:
                raise UnsupportedShapeError(
                    f"PagedBatch: a sequence runs {end - start} tokens with {context} in the cache; wanted 1 to that many"
                )

    def cpu_plan(self, block_size: int) -> "CpuPlan":
        """What the CPU's attention works out once a step and uses in every layer."""
        from spark_kernels.paged_attention.plan import CpuPlan

        if block_size not in self._plans:
            self._plans[block_size] = CpuPlan(self, block_size)
        return self._plans[block_size]

"""What paged attention needs to know of one step, whatever the layer."""

from dataclasses import dataclass

from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError


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

    @property
    def is_decode(self) -> bool:
        """Every sequence runs exactly one token."""
        return self.query_starts[-1] == len(self.context_lengths)

"""Block types of GGUF files: name, id in the file, weights in a block, bytes of a block. Imports no torch."""

from enum import Enum


class GgmlType(Enum):
    """A storage type of a GGUF tensor. A row is a whole number of blocks; a block carries its own scales.

    block_size   weights in a block (1 for the dense types)
    type_size    bytes of a block
    """

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    BF16 = (30, 1, 2)
    MXFP4 = (39, 32, 17)

    def __init__(self, id: int, block_size: int, type_size: int) -> None:
        self.id = id
        self.block_size = block_size
        self.type_size = type_size

    @property
    def is_dense(self) -> bool:
        return self.block_size == 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; raises ValueError if that is not a whole number of blocks."""
        blocks, rest = divmod(columns, self.block_size)
        if rest:
            raise ValueError(f"{self.name}: a row of {columns} is not a multiple of the block size {self.block_size}")
        return blocks * self.type_size


TYPES_BY_ID: dict[int, GgmlType] = {entry.id: entry for entry in GgmlType}

# Types that exist in GGUF and that this build does not read, so that the error can name them.
UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}

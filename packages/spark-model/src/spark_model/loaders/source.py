"""The weights of a checkpoint, whatever its format: names, shapes and tensors that stay mapped until they are used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from spark_kernels.ggml import GgmlTensor
from torch import Tensor

from spark_model.errors import WeightMissingError
from spark_model.nearest import nearest


class WeightSource(Protocol):
    """An open checkpoint. Names are the file's own: Hugging Face's for safetensors, llama.cpp's for GGUF.

    `tensor` and `blocks` may give views of a private mapping of the file: clone before writing. Asking for a name that
    is not there raises WeightMissingError. What is handed out counts as consumed and moves the progress bar.
    """

    path: Path

    def names(self) -> Sequence[str]:
        """Every tensor's name, in the order of the files: reading in this order is fastest."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor:
        """A dense tensor on the CPU, in its stored dtype; blocks are dequantised to fp32."""
        ...

    def blocks(self, name: str) -> GgmlTensor | None:
        """The tensor in its stored blocks, without a copy; None if it is stored dense."""
        ...

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        ...

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""
        ...


def missing_weight(source: WeightSource, name: str, expected: Sequence[int] | None = None) -> WeightMissingError:
    """The error for a tensor that is not there, or whose shape is not `expected`; to be raised by the caller."""
    names = source.names()
    if name in names:
        wanted = f", wanted {list(expected)}" if expected is not None else ""
        return WeightMissingError(f"{source.file(name)}: `{name}` has shape {list(source.shape(name))}{wanted}")
    wanted = f" (wanted with shape {list(expected)})" if expected is not None else ""
    close = [f"`{match}`" for match in nearest(name, names)]
    hint = f"; the nearest are {', '.join(close)}" if close else ", none with a similar name"
    return WeightMissingError(
        f"{source.path}: `{name}` is missing{wanted}\n  hint: the checkpoint has {len(names)} tensors{hint}"
    )

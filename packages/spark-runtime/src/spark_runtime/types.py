"""What the scheduler and a model runner say to each other. No torch here: the scheduler's tests run without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the logits.

    temperature 0 is greedy. top_k 0, top_p 1.0 and min_p 0.0 switch their filter off.
    The draw is a pure function of (seed, position), so a sequence's tokens do not depend on its neighbours.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step: a decode token or a prefill chunk.

    token_ids    tokens to run now, at positions start, start + 1, ...; never empty
    start        tokens of this sequence that are in the KV cache already
    block_ids    every block of the sequence in order; they cover start + len(token_ids) tokens. Steps of one sequence
                 share the list, and more blocks are appended to it between steps
    sampling     how to draw the token after the last one; None for an inner prefill chunk, which draws none
    forbidden    token ids that may not be drawn (EOS while min_tokens is not reached)
    """

    sequence: SequenceId
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[BlockId]
    sampling: SamplingParams | None
    forbidden: Sequence[int] = ()


class Runner(Protocol):
    """A model on a device, as the scheduler sees it. One thread calls it."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool; block ids are 0 .. num_blocks - 1."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    def step(self, steps: Sequence[SequenceStep]) -> list[int | None]:
        """Run one forward pass over all steps and draw tokens; result i belongs to steps[i], None where sampling is None.

        Raises DeviceError when the device failed; the engine process then ends.
        """

    def release(self, sequence: SequenceId) -> None:
        """Forget what is kept for a sequence that ended or lost its blocks; the latter starts again at 0, in other blocks.

        Its blocks are the scheduler's.
        """

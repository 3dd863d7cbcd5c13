"""One request while the scheduler has it: how far it is, what it holds, and its share of the next step."""

from dataclasses import dataclass, field

from spark_runtime.types import BlockId, SamplingParams, SequenceId, SequenceStep
from spark_server.engine.frames import FinishReason, Submit


@dataclass(slots=True)
class LiveSequence:
    """A request that waits or runs.

    token_ids        the prompt and every token drawn so far; the newest is not in the cache yet
    num_prompt       tokens of the prompt
    max_tokens       new tokens at most, bounded by the context
    deadline         on the scheduler's clock; None = none
    max_blocks       KV blocks that it needs if it makes max_tokens
    block_ids        the blocks it holds, appended to as it grows; empty while it waits
    num_cached       its tokens that are in the KV cache
    num_to_prefill   its tokens when it was started, which are run in chunks; one a step follows
    was_admitted     it has run before, even if it waits now
    """

    id: SequenceId
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float | None
    block_size: int
    max_blocks: int
    block_ids: list[BlockId] = field(default_factory=list)
    num_cached: int = 0
    num_to_prefill: int = 0
    was_admitted: bool = False

    @classmethod
    def from_submit(cls, request: Submit, *, context: int, block_size: int, now: float) -> "LiveSequence":
        """`context` is the largest number of tokens, prompt and answer together; the prompt is shorter."""
        max_tokens = min(request.max_tokens, context - len(request.token_ids))
        return cls(
            id=SequenceId(request.request_id),
            token_ids=list(request.token_ids),
            num_prompt=len(request.token_ids),
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            sampling=request.sampling,
            deadline=now + request.deadline_s if request.deadline_s > 0 else None,
            block_size=block_size,
            # The last token drawn is never run, so it needs no place in the cache.
            max_blocks=-(-(len(request.token_ids) + max_tokens - 1) // block_size),
        )

    @property
    def num_made(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_first_blocks(self) -> int:
        """Blocks to start with: those of its tokens and one to grow into, unless it ends before that one."""
        return min(-(-len(self.token_ids) // self.block_size) + 1, self.max_blocks)

    @property
    def can_grow(self) -> bool:
        return len(self.block_ids) < self.max_blocks

    @property
    def needs_block(self) -> bool:
        """The next token has no place; never so while it prefills, since it starts with blocks for all its tokens."""
        return self.num_cached == len(self.block_ids) * self.block_size

    @property
    def is_prefilling(self) -> bool:
        return self.num_cached < self.num_to_prefill

    @property
    def num_unprefilled(self) -> int:
        return self.num_to_prefill - self.num_cached

    def start(self, block_ids: list[BlockId]) -> None:
        """Run from now on in these blocks, from its first token: what it has made is prefilled like the prompt."""
        self.block_ids = block_ids
        self.num_to_prefill = len(self.token_ids)
        self.was_admitted = True

    def give_up_blocks(self) -> list[BlockId]:
        """Back to waiting with the tokens it has; the blocks, which are the caller's now."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_cached = 0
        return block_ids

    def decode_step(self) -> SequenceStep:
        return SequenceStep(
            self.id,
            (self.token_ids[-1],),
            self.num_cached,
            self.block_ids,
            self.sampling,
            self._forbidden_now(),
            self.token_ids,
            self.num_prompt,
        )

    def prefill_step(self, num_tokens: int) -> SequenceStep:
        """The next `num_tokens` tokens of those it started with; the chunk that reaches their end draws a new token."""
        end = self.num_cached + num_tokens
        is_last = end == self.num_to_prefill
        return SequenceStep(
            self.id,
            self.token_ids[self.num_cached : end],
            self.num_cached,
            self.block_ids,
            self.sampling if is_last else None,
            self._forbidden_now() if is_last else (),
            self.token_ids,
            self.num_prompt,
        )

    def take(self, token: int) -> FinishReason | None:
        """Note a drawn token; the reason if it is the last one."""
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            return "stop"
        return "length" if self.num_made >= self.max_tokens else None

    def _forbidden_now(self) -> tuple[int, ...]:
        return self.stop_token_ids if self.num_made < self.min_tokens else ()

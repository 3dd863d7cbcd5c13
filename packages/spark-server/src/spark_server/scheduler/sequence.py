"""One request while the scheduler has it: how far it is, what it holds, and its share of the next step."""

from dataclasses import dataclass, field

from spark_runtime.types import BlockId, SamplingParams, SequenceId, SequenceStep
from spark_server.engine.frames import FinishReason, Submit


@dataclass(slots=True)
class LiveSequence:
    """A request that waits or runs.

    max_tokens   new tokens at most, bounded by the context
    deadline     on the scheduler's clock; None = none
    num_blocks   KV blocks that it needs from admission to its end
    block_ids    the blocks it holds; empty while it waits, then one list that never changes
    num_cached   its tokens that are in the KV cache; below the prompt's length it is prefilling
    num_made     tokens drawn so far
    last_token   the newest token, drawn and not in the cache yet; -1 before the first
    """

    id: SequenceId
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float | None
    num_blocks: int
    block_ids: list[BlockId] = field(default_factory=list)
    num_cached: int = 0
    num_made: int = 0
    last_token: int = -1

    @classmethod
    def from_submit(cls, request: Submit, *, context: int, block_size: int, now: float) -> "LiveSequence":
        """`context` is the largest number of tokens, prompt and answer together; the prompt is shorter."""
        max_tokens = min(request.max_tokens, context - len(request.token_ids))
        return cls(
            id=SequenceId(request.request_id),
            prompt=request.token_ids,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            sampling=SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                seed=request.seed,
            ),
            deadline=now + request.deadline_s if request.deadline_s > 0 else None,
            # The last token drawn is never run, so it needs no place in the cache.
            num_blocks=-(-(len(request.token_ids) + max_tokens - 1) // block_size),
        )

    @property
    def is_prefilling(self) -> bool:
        return self.num_cached < len(self.prompt)

    @property
    def num_unprefilled(self) -> int:
        return len(self.prompt) - self.num_cached

    def decode_step(self) -> SequenceStep:
        return SequenceStep(
            self.id, (self.last_token,), self.num_cached, self.block_ids, self.sampling, self._forbidden_now()
        )

    def prefill_step(self, num_tokens: int) -> SequenceStep:
        """The next `num_tokens` tokens of the prompt; the chunk that reaches its end draws the first new token."""
        end = self.num_cached + num_tokens
        is_last = end == len(self.prompt)
        return SequenceStep(
            self.id,
            self.prompt[self.num_cached : end],
            self.num_cached,
            self.block_ids,
            self.sampling if is_last else None,
            self._forbidden_now() if is_last else (),
        )

    def take(self, token: int) -> FinishReason | None:
        """Note a drawn token; the reason if it is the last one."""
        self.last_token = token
        self.num_made += 1
        if token in self.stop_token_ids:
            return "stop"
        return "length" if self.num_made >= self.max_tokens else None

    def _forbidden_now(self) -> tuple[int, ...]:
        return self.stop_token_ids if self.num_made < self.min_tokens else ()

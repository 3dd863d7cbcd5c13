"""Which requests can be served at all, said before they wait for something that cannot happen, and which can start now."""

from collections.abc import Iterable

from spark_server.config import SchedulerConfig
from spark_server.engine.frames import Submit
from spark_server.scheduler.sequence import LiveSequence


def context_tokens(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The largest prompt and answer together: the model's context, or what the KV pool holds if that is less.

    One token more than the pool's slots, because the last token drawn is never run.
    """
    return min(max_model_len, num_blocks * block_size + 1)


def refusal(request: Submit, config: SchedulerConfig, *, num_blocks: int, block_size: int) -> str | None:
    """Why this request can never run, or None. The HTTP side checks first; this is what holds if it did not."""
    num_tokens = len(request.token_ids)
    pool_tokens = num_blocks * block_size
    if num_tokens == 0:
        return "prompt is empty, at least 1 token is needed"
    if request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}, at least 1 is needed"
    if num_tokens >= config.max_model_len:
        return (
            f"prompt has {num_tokens} tokens, the limit is {config.max_model_len - 1}:"
            f" --max-model-len {config.max_model_len} less one token of answer"
        )
    if num_tokens > pool_tokens:
        return (
            f"prompt has {num_tokens} tokens, the KV cache holds {pool_tokens}"
            f" ({num_blocks} blocks of {block_size}); give it more memory or shorten the prompt"
        )
    return None


def can_start(sequence: LiveSequence, running: Iterable[LiveSequence], num_free: int) -> bool:
    """Whether the free blocks are enough for its first ones and one more for each running sequence that may yet grow.

    Without the latter, the next block that a running sequence needs would take this one's away again. True when nothing
    runs, since no sequence is let in that needs more than the pool.
    """
    return sequence.num_first_blocks + sum(other.can_grow for other in running) <= num_free

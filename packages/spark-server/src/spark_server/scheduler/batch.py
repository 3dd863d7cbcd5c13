"""What one forward pass runs: a token of every sequence that decodes, and beside them chunks of prompts."""

from collections.abc import Iterable, Iterator

from spark_runtime.types import SequenceStep
from spark_server.scheduler.sequence import LiveSequence


def decode_steps(running: Iterable[LiveSequence]) -> list[SequenceStep]:
    """Every sequence whose prompt is done, always: a prompt of any length never pauses them for more than one chunk."""
    return [sequence.decode_step() for sequence in running if not sequence.is_prefilling]


def prefill_steps(ordered: Iterable[LiveSequence], max_prefill_tokens: int, max_model_len: int) -> list[SequenceStep]:
    """Chunks of the prompts in this order, `max_prefill_tokens` tokens in all; decode tokens are not counted.

    max_prefill_tokens 0 cuts no prompt: the first is taken whole, and those after it that fit into one context with it.
    """
    cuts_prompts = max_prefill_tokens > 0
    budget = max_prefill_tokens if cuts_prompts else max_model_len
    return list(_fill(ordered, budget, cuts_prompts))


def _fill(ordered: Iterable[LiveSequence], budget: int, cuts_prompts: bool) -> Iterator[SequenceStep]:
    for sequence in ordered:
        if not sequence.is_prefilling:
            continue
        wanted = sequence.num_unprefilled
        if budget == 0 or (wanted > budget and not cuts_prompts):
            return
        num_tokens = min(wanted, budget)
        budget -= num_tokens
        yield sequence.prefill_step(num_tokens)

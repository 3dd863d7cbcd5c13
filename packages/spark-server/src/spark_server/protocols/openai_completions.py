"""OpenAI's legacy completions: the body, its way to the internal requests, and the deltas' way back.

Each prompt of the body is one internal request and one choice.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.protocols.openai_body import UNAVAILABLE, OpenAiBody, lower_body, refuse_unavailable
from spark_server.protocols.openai_response import (
    DONE_FRAME,
    SYSTEM_FINGERPRINT,
    ResponseHead,
    Usage,
    encode_frame,
    sum_usage,
)
from spark_server.request import Delta, Ending, EndReason, GenerationRequest, TextDelta, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's; a chat goes on to the end of its turn instead

Prompt = str | list[str | int | list[int]]


class CompletionBody(OpenAiBody, frozen=True, kw_only=True):
    prompt: Prompt

    suffix: Any = None
    echo: Any = None
    best_of: Any = None


COMPLETION_UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    **UNAVAILABLE,
    "suffix": lambda value: value == "",
    "echo": lambda value: value is False,
    "best_of": lambda value: value == 1,
}


def lower_completion(body: CompletionBody, config: HttpConfig) -> list[GenerationRequest]:
    """One request for each prompt. Raises InvalidRequestError naming the field that is wrong or not available."""
    refuse_unavailable(body, COMPLETION_UNAVAILABLE)
    prompts = _lower_prompts(body.prompt)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return [lower_body(body, prompt, config, max_tokens=max_tokens) for prompt in prompts]


def _lower_prompts(prompt: Prompt) -> list[TextPrompt | TokenPrompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequestError("Invalid 'prompt': the array is empty, expected at least one prompt.", "prompt")
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return [TokenPrompt(token_ids)]
    if token_ids:
        raise InvalidRequestError(
            "Invalid 'prompt': the array mixes token ids with prompts; send ids of one prompt, or prompts.", "prompt"
        )
    return [
        TextPrompt(item) if isinstance(item, str) else TokenPrompt(item) for item in prompt if not isinstance(item, int)
    ]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: None = None
    finish_reason: EndReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk of one. `usage` is absent from chunks unless the client asked for it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


async def raise_completion(
    head: ResponseHead, deltas: AsyncIterable[tuple[int, Delta]], num_choices: int
) -> Completion:
    """Collect whole answers. `deltas` carries the index of the choice with each delta."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    endings: dict[int, Ending] = {}
    async for index, delta in deltas:
        if isinstance(delta, TextDelta):
            texts[index].append(delta.text)
        elif isinstance(delta, Ending):
            endings[index] = delta
    choices = [
        Choice(text="".join(texts[index]), index=index, finish_reason=endings[index].reason)
        for index in range(num_choices)
    ]
    usage = sum_usage(list(endings.values()))
    return Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


async def raise_chunks(
    head: ResponseHead, deltas: AsyncIterable[tuple[int, Delta]], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream: text and finish reason of each choice, the usage if asked for, the end mark."""
    endings: list[Ending] = []
    unused = None if include_usage else UNSET

    def frame(choices: list[Choice], usage: Usage | UnsetType | None = unused) -> bytes:
        return encode_frame(
            Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        )

    async for index, delta in deltas:
        if isinstance(delta, TextDelta):
            yield frame([Choice(text=delta.text, index=index, finish_reason=None)])
        elif isinstance(delta, Ending):
            endings.append(delta)
            yield frame([Choice(text="", index=index, finish_reason=delta.reason)])
    if include_usage:
        yield frame([], sum_usage(endings))
    yield DONE_FRAME

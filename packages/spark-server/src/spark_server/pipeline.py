"""From internal requests to running generations.

`Pipeline.start` renders, tokenises, checks and submits, and returns once the engine took the requests; until then every
refusal is a plain HTTP error.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

from spark_runtime.types import SamplingParams
from spark_server.answer_format import AnswerFormat, AnswerPlan
from spark_server.config import HttpConfig
from spark_server.engine.client import EngineClient
from spark_server.engine.frames import Submit
from spark_server.errors import (
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
)
from spark_server.generation import Generation, Vocabulary, close_generations
from spark_server.messages import ChatTemplate
from spark_server.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

# A prompt up to this many characters is rendered and tokenised in about a millisecond, less than a thread's round trip
# under load is worth; longer ones go to the executor so that the event loop never blocks.
INLINE_CHARACTERS = 4096


class Tokenizer(Protocol):
    """What is needed of spark_model.tokenizer.Tokenizer."""

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ModelText:
    """Between text and ids.

    eos_token_ids   every id that ends a turn
    chat_template   None: the model has none, so only prompts without messages work
    """

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    eos_token_ids: Sequence[int]
    chat_template: ChatTemplate | None
    answer_format: AnswerFormat


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`text` is what the template made of messages, or the prompt's own; "" where it came as ids."""

    token_ids: list[int]
    text: str


class Pipeline:
    """One event loop; text work may run in the executor."""

    def __init__(self, engine: EngineClient, text: ModelText, config: HttpConfig, executor: Executor) -> None:
        self._engine = engine
        self._text = text
        self._config = config
        self._executor = executor
        self._num_waiting = 0

    @property
    def text(self) -> ModelText:
        return self._text

    @property
    def num_waiting(self) -> int:
        """Requests submitted and not yet taken by the engine."""
        return self._num_waiting

    @property
    def max_model_len(self) -> int:
        """The context as it is: the engine may have found less room than was asked for."""
        ready = self._engine.ready
        return self._config.max_model_len if ready is None else min(self._config.max_model_len, ready.max_model_len)

    async def start(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Render, tokenise, check and submit all requests or none, and return when the engine took them.

        Raises NotReadyError, QueueFullError, InvalidRequestError, PromptTooLongError, TemplateError, RequestTimeoutError
        and EngineFailedError; nothing then stays behind in the engine.
        """
        self._check_room(len(requests))  # before the work of tokenising
        prompts = await self._encode_each_once(requests)
        plans = [
            self._text.answer_format.plan(request, prompt.text)
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        submits = [
            self._to_submit(request, prompt.token_ids, plan)
            for request, prompt, plan in zip(requests, prompts, plans, strict=True)
        ]
        self._check_room(len(requests))
        generations: list[Generation] = []
        try:
            for request, submit, plan in zip(requests, submits, plans, strict=True):
                stream = self._engine.submit(submit)
                generations.append(Generation(stream, self._text.vocabulary, request, plan.parser, submit.token_ids))
            await self._wait_admitted(generations)
        except BaseException:
            await close_generations(generations)
            raise
        return generations

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """The prompt as the engine would get it. Raises InvalidRequestError and TemplateError."""
        if request.prompt.num_characters() <= INLINE_CHARACTERS:
            return encode_prompt(self._text, request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, encode_prompt, self._text, request)

    async def _encode_each_once(self, requests: Sequence[GenerationRequest]) -> list[EncodedPrompt]:
        """Choices of one prompt share its object, and then its encoding."""
        encoded: list[EncodedPrompt] = []
        for place, request in enumerate(requests):
            if place and request.prompt is requests[place - 1].prompt:
                encoded.append(encoded[-1])
            else:
                encoded.append(await self.encode(request))
        return encoded

    async def _wait_admitted(self, generations: Sequence[Generation]) -> None:
        waiting = len(generations)
        self._num_waiting += waiting
        try:
            for generation in generations:
                await generation.wait_admitted()
                self._num_waiting -= 1
                waiting -= 1
        finally:
            self._num_waiting -= waiting

    def _check_room(self, num_requests: int) -> None:
        if self._engine.state != "ready":
            raise NotReadyError(f"the model is not ready: the engine is {self._engine.state}")
        depth = self._config.max_queue_depth
        if depth and num_requests > depth:
            raise InvalidRequestError(
                f"{num_requests} prompts in one request, at most {depth} may wait (--max-queue-depth)"
            )
        if depth and self._num_waiting + num_requests > depth:
            raise QueueFullError(
                f"{self._num_waiting} requests wait, the limit is {depth} (--max-queue-depth); try again later"
            )

    def _to_submit(self, request: GenerationRequest, token_ids: list[int], plan: AnswerPlan) -> Submit:
        """Check lengths and ids against the model and make the engine's frame."""
        context = self.max_model_len
        room = context - len(token_ids)
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens, expected at least one", param=_prompt_param(request))
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, the context is {context} (--max-seq-len) "
                "and must hold one new token too",
                param=_prompt_param(request),
            )
        ready = self._engine.ready
        if ready is not None:
            _check_ids(token_ids, ready.vocab_size, _prompt_param(request))
            _check_ids(request.stop_token_ids, ready.vocab_size, "stop_token_ids")
            _check_ids([token_id for token_id, _ in request.sampling.logit_bias], ready.vocab_size, "logit_bias")
        eos = () if request.ignore_eos else self._text.eos_token_ids
        ceiling = min(self._config.max_output_tokens, room)
        max_tokens = ceiling if request.max_tokens is None else min(request.max_tokens, ceiling)
        return Submit(
            request_id=self._engine.new_request_id(),
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._break_repetitions(request),
            stop_token_ids=sorted({*eos, *request.stop_token_ids}),
            min_tokens=min(request.min_tokens, max_tokens),
            deadline_s=_remaining(request),
            priority=request.priority,
            grammar=plan.grammar,
            reasoning_end_ids=self._reasoning_end_ids(plan),
            thinking_budget=request.thinking.budget if plan.reasoning_end_text is not None else None,
        )

    def _break_repetitions(self, request: GenerationRequest) -> SamplingParams:
        """DRY works on ids. A text's last id differs with what stands before it, so it is looked at alone and in a word."""
        sampling = request.sampling
        if not sampling.dry_multiplier or not request.dry_breakers:
            return sampling
        encode = self._text.tokenizer.encode
        spelt = [
            encode(text, parse_special=False) for breaker in request.dry_breakers for text in (breaker, f"a{breaker}")
        ]
        return replace(
            sampling, dry_breakers=tuple(sorted({*sampling.dry_breakers, *(ids[-1] for ids in spelt if ids)}))
        )

    def _reasoning_end_ids(self, plan: AnswerPlan) -> list[int]:
        return [] if plan.reasoning_end_text is None else self._text.tokenizer.encode(plan.reasoning_end_text)


def encode_prompt(text: ModelText, request: GenerationRequest) -> EncodedPrompt:
    """A chat template writes BOS itself; a plain prompt gets what the tokenizer puts in front.

    Raises TemplateError when the template refuses the conversation, InvalidRequestError when there is no template.
    """
    prompt = request.prompt
    if isinstance(prompt, TokenPrompt):
        return EncodedPrompt(list(prompt.token_ids), "")
    if isinstance(prompt, TextPrompt):
        return EncodedPrompt(text.tokenizer.encode(prompt.text, add_special=True), prompt.text)
    rendered = render_chat(text, text.answer_format.prepare(prompt, request))
    return EncodedPrompt(text.tokenizer.encode(rendered, add_special=False), rendered)


def render_chat(text: ModelText, prompt: ChatPrompt) -> str:
    if text.chat_template is None:
        raise InvalidRequestError(
            "the model has no chat template; use /v1/completions or start the server with --chat-template",
            param="messages",
        )
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in prompt.tools
    ]
    return text.chat_template.render(
        prompt.messages,
        tools=tools or None,
        add_generation_prompt=prompt.add_generation_prompt,
        **prompt.template_kwargs,
    )


def _prompt_param(request: GenerationRequest) -> str:
    """The field that a complaint about the prompt names."""
    return "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"


def _check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"{param} has token id {wrong}, the vocabulary is 0 to {vocab_size - 1}", param=param)


def _remaining(request: GenerationRequest) -> float:
    """Seconds left of the request's time; 0 = no limit."""
    if not request.timeout_s:
        return 0.0
    remaining = request.received + request.timeout_s - time.monotonic()
    if remaining <= 0:
        raise RequestTimeoutError("the request's time ran out before it reached the engine")
    return remaining

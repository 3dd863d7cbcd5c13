"""What the responses of OpenAI's two generating endpoints share: the head, the usage, and how a frame looks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from spark_server.request import Delta, Ending, PromptDelta

DONE_FRAME = b"data: [DONE]\n\n"
MIN_DECODE_S = 0.001  # answers of one token have no decode time; the rate stays finite

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every part of one response repeats."""

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))


def create_head(prefix: str, model: str, system_fingerprint: str) -> ResponseHead:
    """`prefix` is the protocol's own, such as "chatcmpl"."""
    return ResponseHead(f"{prefix}-{uuid.uuid4().hex}", model, system_fingerprint)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The stop token counts as a completion token. Times start when the request arrived; absent until it ended.

    ttft_ms        to the first token of any choice
    generation_ms  to the end of the last choice
    decode_tps     completion tokens per second after the first one
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    ttft_ms: float | UnsetType = UNSET
    generation_ms: float | UnsetType = UNSET
    decode_tps: float | UnsetType = UNSET


class UsageMeter:
    """What one response used: prompts once, however many choices they have.

    prompt_lengths   of each prompt
    num_choices      of each prompt; choices of one prompt stand together
    """

    def __init__(self, prompt_lengths: Sequence[int], num_choices: int) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._num_choices = num_choices
        self._num_seen = 0
        self._endings: dict[int, Ending] = {}

    def push(self, index: int, delta: Delta) -> None:
        if isinstance(delta, Ending):
            self._endings[index] = delta
        if not isinstance(delta, PromptDelta):
            self._num_seen += len(delta.tokens)

    def so_far(self) -> Usage:
        """Right where deltas carry their tokens."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._num_seen,
            total_tokens=self._prompt_tokens + self._num_seen,
        )

    def total(self) -> Usage:
        """When every choice ended."""
        endings = self._endings.values()
        completion_tokens = sum(ending.completion_tokens for ending in endings)
        cached = sum(ending.cached_tokens for index, ending in self._endings.items() if index % self._num_choices == 0)
        ttft_s = min((ending.ttft_s for ending in endings if ending.ttft_s), default=0.0)
        generation_s = max((ending.generation_s for ending in endings), default=0.0)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(sum(ending.reasoning_tokens for ending in endings)),
            ttft_ms=round(ttft_s * 1000, 3),
            generation_ms=round(generation_s * 1000, 3),
            decode_tps=round(completion_tokens / max(generation_s - ttft_s, MIN_DECODE_S), 3),
        )


def encode_json(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value)


def encode_frame(value: msgspec.Struct) -> bytes:
    """One server-sent event. The JSON holds no line break, so one data line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"

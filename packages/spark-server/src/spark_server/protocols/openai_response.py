"""What the responses of OpenAI's two generating endpoints share: the head, the usage, and how a frame looks."""

import time
import uuid
from dataclasses import dataclass, field

import msgspec

from spark_server.request import Ending

SYSTEM_FINGERPRINT = "fp_spark"
DONE_FRAME = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every part of one response repeats."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


def create_head(prefix: str, model: str) -> ResponseHead:
    """`prefix` is the protocol's own, such as "chatcmpl"."""
    return ResponseHead(f"{prefix}-{uuid.uuid4().hex}", model)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The stop token counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


def sum_usage(endings: list[Ending]) -> Usage:
    prompt_tokens = sum(ending.prompt_tokens for ending in endings)
    completion_tokens = sum(ending.completion_tokens for ending in endings)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def encode_json(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value)


def encode_frame(value: msgspec.Struct) -> bytes:
    """One server-sent event. The JSON holds no line break, so one data line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"

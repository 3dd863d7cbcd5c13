"""What travels between the HTTP process and the engine process.

One socket pair; each frame is a 4-byte little-endian length and a msgpack body. Every struct is tagged, so a decoder
takes the union. The engine sends at most one `StepFrame` per step, with the tokens of all its requests.
"""

from typing import Literal

import msgspec

from spark_runtime.types import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length", "timeout", "abort", "error"]


class Submit(msgspec.Struct, tag="submit", frozen=True, omit_defaults=True):
    """A request for the engine.

    request_id         unique while the HTTP process lives
    token_ids          the prompt
    max_tokens         new tokens at most; the HTTP process has bounded it by the context already
    stop_token_ids     ids that end the sequence: EOS (unless ignore_eos) and the client's own
    min_tokens         while fewer tokens were made, stop_token_ids may not be drawn
    deadline_s         seconds from now until the request ends with "timeout"; 0 = none
    priority           smaller goes first among those who wait; equal ones in order of arrival
    grammar            llguidance grammar that the answer follows; None = none. It begins after the reasoning
    reasoning_end_ids  the ids that close the reasoning which the prompt opened; empty = the answer begins at once
    thinking_budget    reasoning tokens until reasoning_end_ids are forced; None = no limit
    """

    request_id: int
    token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    deadline_s: float = 0.0
    priority: int = 0
    grammar: str | None = None
    reasoning_end_ids: list[int] = []
    thinking_budget: int | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Free the request's slot within one step. No frame about it follows. Unknown ids are ignored (it may just have ended)."""

    request_id: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the engine process at once with exit code 0."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """What the engine does while it loads, for the log."""

    message: str


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves from now on. Sizes are in tokens and blocks."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    load_seconds: float
    memory_bytes: int


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot after a step. `steps` only grows: it is how health sees progress.

    waiting      requests that were not admitted yet, and those that lost their blocks and wait to go on
    preemptions  how often a running request lost its blocks, since the engine started
    """

    steps: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    preemptions: int = 0


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. `finish` set: this is the request's last output, sent exactly once.

    The stop token itself is in token_ids (it is counted in usage, its text is not shown).
    A request's first output comes from the step that admitted it; its token_ids are empty while the prompt is not done.

    logprobs         one for each of token_ids where the request asked for them, else empty
    prompt_logprobs  of the next tokens of the prompt, its second first; all of them come before the first new token
    cached_tokens    tokens of the prompt that came from the prefix cache; only the first output's counts
    """

    request_id: int
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0


class StepFrame(msgspec.Struct, tag="step", frozen=True):
    """One step's outputs; also sent without outputs as a heartbeat, at least once a second."""

    outputs: list[Output]
    stats: EngineStats


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The engine cannot go on and exits after this frame. `message` is one line for the operator."""

    message: str


ToEngine = Submit | Abort | Stop
FromEngine = Progress | Ready | StepFrame | Fatal

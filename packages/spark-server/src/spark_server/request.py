"""The internal request and the internal deltas: what every protocol lowers its body to, and raises its answer from.

Nothing here, and nothing below, knows a protocol.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_runtime.types import SamplingParams

EndReason = Literal["stop", "length", "timeout"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON Schema; strict: arguments follow it exactly."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode "named" calls the tool `name`; "required" one or more of all tools; "none" hides them from the model."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that the whole answer has to have.

    kind     value
    json     a JSON Schema; {} is any value, {"type": "object"} any object
    regex    a regular expression that the answer matches from its first to its last character
    choice   a list of strings, of which the answer is one
    grammar  a grammar in Lark's or GBNF's notation
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any


@dataclass(frozen=True, slots=True)
class Thinking:
    """What was decided about reasoning. enabled None = what the template does when it is not told.

    budget   reasoning tokens at most; None = no limit
    effort   for templates that know `reasoning_effort`
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template takes them, content as one string each."""

    messages: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    tools: Sequence[Tool] = ()

    def num_characters(self) -> int:
        return sum(len(str(message)) for message in self.messages)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str

    def num_characters(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]

    def num_characters(self) -> int:
        return 0


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One choice to generate, whatever protocol asked for it. Choices of one prompt share the prompt object.

    max_tokens     new tokens at most; None = as many as --max-output-tokens and the context allow, which bound it anyway
    timeout_s      from `received`, a time.monotonic() value; 0 = none
    include_stop   the text ends with the stop string that ended it
    shows_special  special tokens are part of the text
    echo           the prompt comes first, as a PromptDelta
    wants_tokens   deltas carry their tokens; so they do when log probabilities were asked for
    priority       smaller goes first among those who wait
    cache_salt     prompts of different salts share nothing in the prefix cache
    dry_breakers   texts that end a repetition; they become the ids that sampling.dry_breakers wants
    """

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None
    received: float
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    timeout_s: float = 0.0
    include_stop: bool = False
    shows_special: bool = False
    echo: bool = False
    wants_tokens: bool = False
    priority: int = 0
    cache_salt: str | None = None
    dry_breakers: Sequence[str] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    thinking: Thinking = Thinking()


@dataclass(frozen=True, slots=True)
class Token:
    """One token of prompt or answer. logprob None: not asked for, or the first of a prompt.

    spelling   what it spells in UTF-8, maybe a part of a character
    top        the likeliest tokens in its place, best first, as (id, bytes, log probability)
    """

    id: int
    spelling: bytes
    logprob: float | None = None
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt, first of all deltas; only for requests with `echo`."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`tokens` are those that came since the delta before, if asked for; joined over all deltas they are the answer's."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first of a call has its id and name, and may have arguments; the others have arguments.

    index      place of the call in the answer, from 0; calls do not interleave
    arguments  JSON text; joined over the call's deltas it is one object
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """The last delta.

    completion_tokens  counts the stop token, and nothing after a stop string
    reasoning_tokens   those of completion_tokens that were reasoning
    stop_string        the one that ended the text
    stop_token_id      the token that ended it: EOS, or one of the request's own
    ttft_s             from the request's arrival to its first token; 0 if there was none
    generation_s       from the request's arrival to its end
    tokens             what came since the last delta, and at their end the stop token
    """

    reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    num_tool_calls: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_s: float = 0.0
    generation_s: float = 0.0
    tokens: tuple[Token, ...] = ()


AnswerDelta = TextDelta | ReasoningDelta | ToolCallDelta
Delta = PromptDelta | AnswerDelta | Ending

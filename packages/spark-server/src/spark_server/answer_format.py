"""How one model writes reasoning and tool calls: what that does to prompts, what it makes of the answer's text."""

from dataclasses import dataclass
from typing import Protocol

from spark_server.request import AnswerDelta, ChatPrompt, GenerationRequest, TextDelta


class AnswerParser(Protocol):
    """Cuts one answer's text into text, reasoning and tool calls, however it arrives.

    is_reasoning   what comes next is reasoning, as far as is known
    """

    is_reasoning: bool

    def push(self, text: str) -> list[AnswerDelta]:
        """What is certain now; an undecided rest waits."""

    def finish(self) -> list[AnswerDelta]:
        """The rest, once no more text comes."""


class PlainText:
    """An AnswerParser for answers that are nothing but text."""

    is_reasoning = False

    def push(self, text: str) -> list[AnswerDelta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[AnswerDelta]:
        return []


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What the engine and the reader of one request's answer need.

    grammar            an llguidance grammar; None = the answer is free
    reasoning_end_text   closes the reasoning that the prompt opened; None = the answer begins at once
    """

    parser: AnswerParser
    grammar: str | None = None
    reasoning_end_text: str | None = None


class AnswerFormat:
    """One model's ways. Methods may be called from several threads."""

    def prepare(self, prompt: ChatPrompt, request: GenerationRequest) -> ChatPrompt:
        """The conversation as this model's template has to get it. Raises InvalidRequestError for what it cannot have."""
        return prompt

    def plan(self, request: GenerationRequest, rendered: str) -> AnswerPlan:
        """`rendered` is the prompt's text, "" for token ids. Raises InvalidRequestError for a structure that is none."""
        return AnswerPlan(PlainText())

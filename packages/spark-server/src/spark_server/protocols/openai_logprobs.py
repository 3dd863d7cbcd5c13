"""Log probabilities in OpenAI's two shapes.

All tokens that the model made are there, those of reasoning and tool calls too; the token that ended the answer is not,
since its text is not shown.
"""

import codecs
from collections.abc import Sequence

import msgspec

from spark_server.request import Ending, PromptDelta, Token


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class LegacyLogprobs(msgspec.Struct, frozen=True):
    """Lists of one length. text_offset counts characters of the choice's text, the echoed prompt included."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def shown_tokens(ending: Ending) -> Sequence[Token]:
    """The ending's tokens without the one that ended the answer."""
    tokens = ending.tokens
    if tokens and ending.stop_token_id is not None and tokens[-1].id == ending.stop_token_id:
        return tokens[:-1]
    return tokens


def chat_logprobs(tokens: Sequence[Token]) -> ChoiceLogprobs:
    return ChoiceLogprobs([_chat_token(token) for token in tokens])


def _chat_token(token: Token) -> TokenLogprob:
    top = [TopLogprob(_chat_text(spelling), logprob, list(spelling)) for _, spelling, logprob in token.top]
    return TokenLogprob(_chat_text(token.spelling), token.logprob or 0.0, list(token.spelling), top)


def _chat_text(spelling: bytes) -> str:
    """Bytes that are no whole character are written \\xNN, as OpenAI's chat endpoint does."""
    return spelling.decode(errors="backslashreplace")


def _legacy_text(spelling: bytes) -> str:
    """Tokens with a part of a character are written bytes:\\xNN…, as OpenAI's legacy endpoint does."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class LegacyWriter:
    """One choice's log probabilities, piece by piece; it keeps the place in the choice's text."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write_prompt(self, prompt: PromptDelta) -> LegacyLogprobs:
        """Tokens at the front that the text does not show (a BOS) stand at 0."""
        whole = b"".join(token.spelling for token in prompt.tokens).decode(errors="replace")
        self._offset = len(prompt.text) - len(whole)
        written = self.write(prompt.tokens)
        self._offset = len(prompt.text)
        self._decoder.reset()
        return written

    def write(self, tokens: Sequence[Token]) -> LegacyLogprobs:
        offsets = [self._advance(token) for token in tokens]
        return LegacyLogprobs(
            text_offset=offsets,
            token_logprobs=[token.logprob for token in tokens],
            tokens=[_legacy_text(token.spelling) for token in tokens],
            top_logprobs=[_legacy_top(token) for token in tokens],
        )

    def _advance(self, token: Token) -> int:
        place = max(self._offset, 0)
        self._offset += len(self._decoder.decode(token.spelling))
        return place


def _legacy_top(token: Token) -> dict[str, float] | None:
    """The likeliest tokens and the token itself; None for the first token of a prompt, which nothing predicts."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for _, spelling, logprob in token.top:
        top.setdefault(_legacy_text(spelling), logprob)  # two tokens may spell the same: the likelier one stays
    top.setdefault(_legacy_text(token.spelling), token.logprob)
    return top


def join_legacy(pieces: Sequence[LegacyLogprobs]) -> LegacyLogprobs:
    return LegacyLogprobs(
        text_offset=[offset for piece in pieces for offset in piece.text_offset],
        token_logprobs=[logprob for piece in pieces for logprob in piece.token_logprobs],
        tokens=[token for piece in pieces for token in piece.tokens],
        top_logprobs=[top for piece in pieces for top in piece.top_logprobs],
    )

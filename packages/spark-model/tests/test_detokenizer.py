"""Incremental detokenizing: any cut gives the text that decoding at once gives, and never half a character."""

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_model.detokenizer import IncrementalDetokenizer
from spark_model.token_bytes import BYTE_OF_CHARACTER
from spark_model.tokenizer import Tokenizer
from spark_model.tokenizer_gguf import tokenizer_from_gguf

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def spell(data: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in data)


@cache
def byte_level() -> Tokenizer:
    """Single bytes, pieces that end or start inside a character, and two control tokens at 256 and 257."""
    emoji = "🙂".encode()
    pieces = [
        *CHARACTER_OF_BYTE.values(),
        "<s>",
        "<|im_end|>",
        spell(emoji[:3]),
        spell(emoji[1:]),
        spell("é ".encode()),
    ]
    order = [CHARACTER_OF_BYTE[byte] for byte in range(256)] + pieces[256:]
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": order,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + [1] * 3,
            "tokenizer.ggml.merges": [],
        }
    )


@cache
def sentencepiece() -> Tokenizer:
    """Byte tokens at 3 + byte, then "▁", "▁a", "b"."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 3,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
        }
    )


TOKENIZERS = {"byte_level": byte_level, "sentencepiece": sentencepiece}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_push_and_finish_equal_decode_for_every_cut(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10).map(sorted))
    skip_special, at_start = data.draw(st.booleans()), data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special, at_start=at_start)
    parts = [detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join(parts) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special=skip_special, at_start=at_start)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_push_emits_only_whole_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    detokenizer = IncrementalDetokenizer(tokenizer, at_start=False)
    offset = 0 if name == "byte_level" else 3
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push([offset + byte])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def test_push_emoji_over_two_tokens() -> None:
    detokenizer = IncrementalDetokenizer(byte_level())
    assert detokenizer.push([258]) == ""
    assert detokenizer.push([256]) == ""  # a skipped control token does not end the character
    assert detokenizer.push(["🙂".encode()[3]]) == "🙂"


def test_finish_shows_an_unfinished_character_once() -> None:
    detokenizer = IncrementalDetokenizer(byte_level())
    assert detokenizer.push([258]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_push_broken_bytes_then_text() -> None:
    detokenizer = IncrementalDetokenizer(byte_level())
    assert detokenizer.push([259]) == "\ufffd\ufffd\ufffd"
    assert detokenizer.push([ord("a")]) == "a"


def test_push_sentencepiece_leading_space() -> None:
    assert IncrementalDetokenizer(sentencepiece()).push([260, 260]) == "a a"
    detokenizer = IncrementalDetokenizer(sentencepiece())
    assert [detokenizer.push([index]) for index in (1, 259, 260)] == ["", "", " a"]
    assert IncrementalDetokenizer(sentencepiece(), at_start=False).push([260]) == " a"


def test_push_costs_the_same_late_as_early() -> None:
    """Ten times the tokens take about ten times as long; a whole-text decode would take a hundred times."""

    def seconds(count: int) -> float:
        detokenizer = IncrementalDetokenizer(byte_level())
        start = time.perf_counter()
        for _ in range(count):
            detokenizer.push([97])
        return time.perf_counter() - start

    short = min(seconds(3_000) for _ in range(3))
    assert min(seconds(30_000) for _ in range(2)) < 40 * short

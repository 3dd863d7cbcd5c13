"""Tokenizers from a directory with tokenizer.json."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from spark_model.checkpoint import Checkpoint
from spark_model.errors import TokenizerError
from spark_model.token_bytes import BYTE_OF_CHARACTER, decode_byte_level, decoder_from_json
from spark_model.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["", "Hello  world\n", "e\u0301 café", "你好 🙂\tx", "<|im_end|> a <tool>", "a" * 300, "\u2581 \x00"]


def small_backend() -> tokenizers.Tokenizer:
    """All bytes, one merge, NFC, BOS in front, one special and one other added token."""
    vocabulary = {character: index for index, character in enumerate(BYTE_OF_CHARACTER)}
    vocabulary["he"] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<|im_end|>")])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return backend


def write_checkpoint(directory: Path, config: dict[str, Any] | None = None) -> Checkpoint:
    small_backend().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint(reference="small", name="small", kind="safetensors", path=directory)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "pad_token": None, "model_max_length": 9}
    return load_tokenizer(write_checkpoint(tmp_path, config))


def test_encode_equals_the_library(tokenizer: Tokenizer) -> None:
    backend = small_backend()
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=True) == backend.encode(text).ids
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")  # the file says NFC


def test_encode_plain_keeps_other_added_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s><|im_end|><tool>", parse_special=False)
    assert 257 not in ids
    assert 258 not in ids
    assert ids[-1] == 259
    assert tokenizer.decode(ids) == "<s><|im_end|><tool>"
    assert tokenizer.encode("a", parse_special=False, add_special=True) == [257, *tokenizer.encode("a")]


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(
        tmp_path, {"added_tokens_decoder": {"260": {"content": "<late>", "special": True}}, "eos_token": "<late>"}
    )
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("a<late>")[-1] == 260
    assert tokenizer.eos_token_ids == (260,)
    assert 260 not in tokenizer.encode("a<late>", parse_special=False)
    assert tokenizer.vocab_size == 261


def test_decode_skips_special_and_replaces_broken_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>he 你<|im_end|>")
    assert tokenizer.decode(ids) == "he 你"
    assert tokenizer.decode(ids, skip_special=False) == "<s>he 你<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("你")[:2]) == "\ufffd"
    assert tokenizer.decode([10**6, -1]) == ""


def test_properties(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 260
    assert dict(tokenizer.special_tokens) == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (257, (258,))
    assert tokenizer.special_ids == {257, 258}
    assert tokenizer.token_to_id("nowhere") is None
    assert tokenizer.id_to_token(256) == "he"
    assert tokenizer.token_bytes(259) == b"<tool>"
    assert tokenizer.chat_template is None
    assert not tokenizer.strips_leading_space


def test_no_config_means_no_special_names(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_checkpoint(tmp_path))
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, None, ())


def test_chat_template_as_string_list_and_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, {"chat_template": "string"})
    assert load_tokenizer(checkpoint).chat_templates == {"default": "string"}
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    checkpoint = write_checkpoint(tmp_path, {"chat_template": named})
    assert load_tokenizer(checkpoint).chat_templates == {"default": "one", "tool_use": "two"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.chat_template == "file"
    assert tokenizer.chat_templates == {"default": "file", "tool_use": "two", "rag": "more"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json is missing\n  hint"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "[1]"}, "expected an object, got list"),
        ({"tokenizer.json": '{"model": {}}'}, "not a tokenizer that this build can read"),
        ({"tokenizer.json": '{"decoder": {"type": "CTC"}}'}, "decoder step 'CTC' is not known"),
        ({"tokenizer_config.json": '{"chat_template": [1]}'}, "neither a string nor a list"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"999": {"content": "<x>"}}}'}, "at id 999.*only at 260"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    if "tokenizer_config.json" in files:
        write_checkpoint(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(Checkpoint(reference="x", name="x", kind="safetensors", path=tmp_path))


def test_encode_refuses_what_the_library_cannot_take(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="text of 1 characters cannot be tokenized"):
        tokenizer.encode("\ud800")


def test_encode_from_many_threads(tokenizer: Tokenizer) -> None:
    def work(number: int) -> list[int]:
        return tokenizer.encode(f"he {number}<|im_end|>", parse_special=number % 2 == 0)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(200)))
    assert results == [work(number) for number in range(200)]


def test_encode_a_megabyte_is_not_quadratic(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("he" * 500_000)) == 500_000


SENTENCEPIECE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


@pytest.mark.parametrize(
    ("decoder", "token", "expected", "strips"),
    [
        ({"type": "ByteLevel"}, "Ġhé", b" h\xe9", False),
        ({"type": "ByteLevel"}, "漢", "漢".encode(), False),
        (SENTENCEPIECE_DECODER, "▁a", b" a", True),
        (SENTENCEPIECE_DECODER, "<0xE2>", b"\xe2", True),
        ({"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}, "_a", b" a", False),
        ({"type": "Metaspace", "prepend_scheme": "first"}, "▁a<0xE2>", b" a<0xE2>", True),
        (None, "a", b"a", False),
    ],
)
def test_decoder_from_json(decoder: dict[str, Any] | None, token: str, expected: bytes, strips: bool) -> None:
    decode, strips_leading_space = decoder_from_json(decoder, "test")
    assert (decode(token), strips_leading_space) == (expected, strips)


def test_decode_byte_level_is_the_library_alphabet() -> None:
    assert sorted(BYTE_OF_CHARACTER) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in TEXTS:
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert b"".join(decode_byte_level(piece) for piece, _ in pieces) == text.encode()


def test_import_brings_no_torch() -> None:
    code = (
        "import sys, spark_model.tokenizer, spark_model.tokenizer_gguf, spark_model.detokenizer, "
        "spark_model.chat_template\n"
        "print(sorted({'torch', 'cupy', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

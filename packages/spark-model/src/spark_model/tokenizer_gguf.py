"""A tokenizer from GGUF metadata alone. No torch.

A vocabulary read from GGUF applies no Unicode normalization: the ids that its converter is tested with are made
without. Two models are known: "gpt2" (byte-level BPE with a named pre-tokenizer) and "llama" (SentencePiece BPE).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from spark_model.errors import TokenizerError
from spark_model.pretokenizers import PRE_TOKENIZERS
from spark_model.sentencepiece import create_sentencepiece_model
from spark_model.token_bytes import SPACE_MARK, decode_byte_level, decode_sentencepiece, decoder_from_json
from spark_model.tokenizer import Tokenizer, TokenizerFacts, backend_from_json

UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
NORMAL: Final = 1

# Control tokens that end a turn in the families that use them; many files name only one of theirs as EOS.
TURN_END_TOKENS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|return|>",
    "<|end▁of▁sentence|>",
)


_ENDS: Final = ("eos_token", "eot_token", "eom_token")
_NAMES: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "eot": "eot_token",
    "eom": "eom_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """From `tokenizer.*` keys; arrays may be lists, tuples or numpy arrays.

    Raises TokenizerError naming a missing key, or an unknown model or pre-tokenizer with the known ones.
    """
    embedded = metadata.get("tokenizer.huggingface.json")
    if embedded:
        return _from_embedded_json(str(embedded), metadata)
    model = _required(metadata, "tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    raise TokenizerError(f"tokenizer.ggml.model: {model!r} is not known\n  hint: known are 'gpt2' and 'llama'")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    rule = PRE_TOKENIZERS.get(str(name))
    if rule is None:
        got = "is missing" if name is None else f"is {name!r}, which is not known"
        raise TokenizerError(
            f"tokenizer.ggml.pre {got}; without the right rule every id would be wrong\n"
            f"  hint: known are {', '.join(sorted(PRE_TOKENIZERS))}; newer converters write the name into the file"
        )
    tokens = _tokens(metadata)
    vocabulary = _vocabulary(tokens)
    merges = _merges(_required(metadata, "tokenizer.ggml.merges"), vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    facts = _finish(backend, tokens, metadata, add_bos=rule.add_bos)
    return Tokenizer(backend, facts, token_decoder=decode_byte_level, strips_leading_space=False)


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = _tokens(metadata)
    types = _types(metadata, len(tokens))
    scores = [float(score) for score in _required(metadata, "tokenizer.ggml.scores")]
    if len(scores) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise TokenizerError("tokenizer.ggml.remove_extra_whitespaces: true is not supported for model 'llama'")
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    vocabulary = _vocabulary(tokens)
    normal = [index for index, kind in enumerate(types) if kind == NORMAL]
    model = create_sentencepiece_model(vocabulary, tokens, scores, normal, unknown_token=tokens[unknown])
    backend = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Replace(" ", SPACE_MARK)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), *steps] if prefix else steps)
    facts = _finish(backend, tokens, metadata, add_bos=True)
    return Tokenizer(backend, facts, token_decoder=decode_sentencepiece, strips_leading_space=prefix)


def _from_embedded_json(text: str, metadata: Mapping[str, Any]) -> Tokenizer:
    origin = "tokenizer.huggingface.json"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{origin} in the GGUF metadata is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{origin}: expected an object, got {type(content).__name__}")
    token_decoder, strips = decoder_from_json(content.get("decoder"), origin)
    backend = backend_from_json(text, origin)
    special = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    facts = _facts(metadata, backend.id_to_token, special)
    return Tokenizer(backend, facts, token_decoder=token_decoder, strips_leading_space=strips)


def _finish(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], metadata: Mapping[str, Any], *, add_bos: bool
) -> TokenizerFacts:
    """Mark added tokens, put BOS and EOS into the post-processor, and collect the facts."""
    types = _types(metadata, len(tokens))
    for index, kind in enumerate(types):
        if kind in (CONTROL, UNKNOWN) and tokens[index]:
            backend.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False)])
        elif kind == USER_DEFINED and tokens[index]:
            backend.add_tokens([AddedToken(tokens[index], special=False, normalized=False)])
    special = {tokens[index]: index for index, kind in enumerate(types) if kind == CONTROL}
    facts = _facts(metadata, lambda index: tokens[index] if 0 <= index < len(tokens) else None, special)
    ids = _token_ids(metadata)
    before = _wanted(metadata, "bos", ids, default=add_bos)
    after = _wanted(metadata, "eos", ids, default=False)
    if before or after:
        edges = {"BOS": before, "EOS": after}
        backend.post_processor = processors.TemplateProcessing(
            single=[*(["BOS"] if before else []), "$A", *(["EOS"] if after else [])],
            special_tokens=[
                {"id": name, "ids": list(wanted), "tokens": [tokens[index] for index in wanted]}
                for name, wanted in edges.items()
                if wanted
            ],
        )
    return facts


def _facts(
    metadata: Mapping[str, Any], id_to_token: Callable[[int], str | None], special: Mapping[str, int]
) -> TokenizerFacts:
    """`special` maps the text of control tokens to their ids."""
    ids = _token_ids(metadata)
    spelled = {name: id_to_token(index) for name, index in ids.items()}
    for name, token in spelled.items():
        if token is None:
            raise TokenizerError(f"tokenizer.ggml.*: the id of {name}, {ids[name]}, is outside the vocabulary")
    ends = [index for name, index in ids.items() if name in _ENDS]
    ends += [special[token] for token in TURN_END_TOKENS if token in special]
    return TokenizerFacts(
        special_tokens={name: token for name, token in spelled.items() if token is not None},
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_templates=_chat_templates(metadata),
    )


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """bos_token, eos_token, … → id, for those that the file names."""
    keys = {name: f"tokenizer.ggml.{key}_token_id" for key, name in _NAMES.items()}
    return {name: int(metadata[key]) for name, key in keys.items() if metadata.get(key) is not None}


def _wanted(metadata: Mapping[str, Any], which: str, ids: Mapping[str, int], *, default: bool) -> tuple[int, ...]:
    """The id to put at an edge of a text, if the file (else the model's rule) wants one and names it."""
    wanted = bool(metadata.get(f"tokenizer.ggml.add_{which}_token", default))
    index = ids.get(f"{which}_token")
    return (index,) if wanted and index is not None else ()


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise TokenizerError(f"{key} is missing from the GGUF metadata; the file holds no tokenizer")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    return [str(token) for token in _required(metadata, "tokenizer.ggml.tokens")]


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """The kind of every token; all are normal where the file does not say."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * count
    if len(types) != count:
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {count} tokens")
    return [int(kind) for kind in types]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        index = next(index for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise TokenizerError(
            f"tokenizer.ggml.tokens: {tokens[index]!r} stands at ids {index} and {vocabulary[tokens[index]]}"
        )
    return vocabulary


def _merges(lines: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of "left right" lines; a left side may itself start with a space."""
    merges = []
    for number, line in enumerate(lines):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            raise TokenizerError(f"tokenizer.ggml.merges[{number}]: {line!r} does not join two tokens to a token")
        merges.append((left, right))
    return merges


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): str(text) for name, text in metadata.items() if name.startswith(f"{key}.")}
    default = metadata.get(key)
    return named if default is None else {**named, "default": str(default)}

"""Text to token ids and back, from tokenizer.json or from GGUF metadata. No torch."""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from spark_model.checkpoint import Checkpoint
from spark_model.errors import TokenizerError
from spark_model.token_bytes import TokenDecoder, decoder_from_json


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a checkpoint says about its tokens beside the vocabulary.

    special_tokens   name → text as chat templates see them, e.g. {"bos_token": "<s>"}; absent names stay undefined
    eos_token_ids    every id that the tokenizer's files say ends a turn
    chat_templates   name → Jinja source; "default" is the one for conversations without tools
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """One model's vocabulary. Every method may be called from many threads at once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        facts: TokenizerFacts,
        *,
        token_decoder: TokenDecoder,
        strips_leading_space: bool,
    ) -> None:
        """`token_decoder` gives the bytes of a token that is no added token; added tokens are their own text."""
        self._backend = backend
        self._facts = facts
        self._token_decoder = token_decoder
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in self._added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._plain_lock = threading.Lock()
        self._plain: tokenizers.Tokenizer | None = None
        self.strips_leading_space = strips_leading_space

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special     put BOS and EOS where the model wants them
        parse_special   spellings of special tokens become those tokens; False: they are plain text
        """
        backend = self._backend if parse_special else self._plain_backend()
        try:
            # The batch call lets other threads run meanwhile, the single call does not.
            return list(backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"text of {len(text)} characters cannot be tokenized: {error}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # its regex engine gives up by panicking
                raise
            raise TokenizerError(f"text of {len(text)} characters cannot be tokenized: {error}") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 come out as U+FFFD. Ids outside the vocabulary give nothing.

        at_start   the ids start a text, so SentencePiece's added first space goes; False where they continue one
        """
        data = self.join_bytes(ids, skip_special=skip_special)
        if at_start and self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def join_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """The bytes of `ids` one after the other, leading space included."""
        skipped = self._special_ids if skip_special else frozenset()
        return b"".join([self._bytes_of(index) for index in ids if index not in skipped])

    def token_bytes(self, index: int) -> bytes:
        """The bytes that token `index` adds to a text. Raises TokenizerError for an id outside the vocabulary."""
        if self.id_to_token(index) is None:
            raise TokenizerError(f"token id {index} is not in the vocabulary of {self.vocab_size} tokens")
        return self._bytes_of(index)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary's own spelling of a token, e.g. "Ġthe"; None outside the vocabulary."""
        if not 0 <= index < self.vocab_size:
            return None
        return self._backend.id_to_token(index)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included; a model's logits may be wider."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Name → text as chat templates see them: bos_token, eos_token, …"""
        return self._facts.special_tokens

    @property
    def bos_token(self) -> str | None:
        return self._facts.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._facts.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.token_to_id(self.bos_token)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._facts.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        return self._facts.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All chat templates that the tokenizer's files hold, by name."""
        return self._facts.chat_templates

    def _bytes_of(self, index: int) -> bytes:
        known = self._bytes.get(index)
        if known is None:
            known = self._bytes[index] = self._decode_token(index)
        return known

    def _decode_token(self, index: int) -> bytes:
        added = self._added.get(index)
        if added is not None:
            return added.content.encode()
        token = self.id_to_token(index)
        return b"" if token is None else self._token_decoder(token)

    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same vocabulary without special tokens in texts. It shares the model's memory; made on first use."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = self._create_plain_backend()
            return self._plain

    def _create_plain_backend(self) -> tokenizers.Tokenizer:
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        if self._backend.post_processor is not None:
            plain.post_processor = self._backend.post_processor
        for _, token in sorted(self._added.items()):
            plain.add_special_tokens([token]) if token.special else plain.add_tokens([token])
        if any(plain.token_to_id(token.content) != index for index, token in self._added.items()):
            plain = tokenizers.Tokenizer.from_str(self._backend.to_str())  # ids with holes survive only this way
        plain.encode_special_tokens = True
        return plain


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: tokenizer.json and its neighbours, or the metadata of a GGUF file.

    Raises TokenizerError when the files are missing or cannot be understood.
    """
    if checkpoint.kind == "gguf":
        from spark_model.gguf import GgufFile
        from spark_model.tokenizer_gguf import tokenizer_from_gguf

        with GgufFile(checkpoint.path) as file:
            return tokenizer_from_gguf(file.metadata)
    return tokenizer_from_directory(checkpoint.path)


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """From tokenizer.json, with tokenizer_config.json and the chat template files where they exist."""
    path = directory / "tokenizer.json"
    config = _read_json(directory / "tokenizer_config.json")
    content = _read_json(path)
    if not content:
        raise TokenizerError(
            f"{path} is missing\n  hint: tokenizer.model and vocab files are not read; save a fast tokenizer beside the weights"
        )
    return tokenizer_from_json(
        path.read_text(encoding="utf-8"),
        content,
        config,
        chat_templates={**_config_templates(config), **_template_files(directory)},
        origin=str(path),
    )


def tokenizer_from_json(
    text: str, content: Mapping[str, Any], config: Mapping[str, Any], *, chat_templates: Mapping[str, str], origin: str
) -> Tokenizer:
    """From the text of a tokenizer.json, the same parsed, and tokenizer_config.json (may be empty)."""
    token_decoder, strips = decoder_from_json(content.get("decoder"), origin)
    backend = backend_from_json(text, origin)
    _add_config_tokens(backend, config, origin)
    special = _special_tokens(config)
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    facts = TokenizerFacts(
        special_tokens=special, eos_token_ids=() if eos is None else (eos,), chat_templates=chat_templates
    )
    return Tokenizer(backend, facts, token_decoder=token_decoder, strips_leading_space=strips)


def backend_from_json(text: str, origin: str) -> tokenizers.Tokenizer:
    """The library's tokenizer for the text of a tokenizer.json, without its truncation and padding."""
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{origin} is not a tokenizer that this build can read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where the file does not exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _text_of(token: object) -> str | None:
    """tokenizer_config.json spells a token as a string or as {"content": …}."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _text_of(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _add_config_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], origin: str) -> None:
    """Tokens that only tokenizer_config.json lists, at the ids it gives them."""
    listed = config.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(index), entry) for index, entry in listed.items()):
        content = _text_of(entry)
        if content is None or backend.token_to_id(content) == index:
            continue
        flags = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
        token = tokenizers.AddedToken(content, special=bool(entry.get("special")), **flags)
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(content) != index:
            raise TokenizerError(
                f"{origin}: tokenizer_config.json puts {content!r} at id {index}, "
                f"the vocabulary has room for it only at {backend.token_to_id(content)}"
            )


def _config_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: one source, or a list of {"name", "template"}."""
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            "tokenizer_config.json: `chat_template` is neither a string nor a list of objects with name and template"
        ) from error


def _template_files(directory: Path) -> dict[str, str]:
    """chat_template.jinja is the default; additional_chat_templates/NAME.jinja are the named ones."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = directory / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}

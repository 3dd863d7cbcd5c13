"""From a vocabulary's spelling of a token to the bytes it stands for.

Byte-level vocabularies spell each byte as one printable character; SentencePiece vocabularies spell a space as U+2581
and single bytes as <0xNN>.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from spark_model.errors import TokenizerError

TokenDecoder = Callable[[str], bytes]
SPACE_MARK = "\u2581"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 characters stand for their own byte; the other bytes, in order, for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHARACTER = _byte_of_character()


def decode_byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token with a character outside the alphabet is taken as plain text."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def decode_sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()


def decoder_from_json(decoder: Mapping[str, Any] | None, origin: str) -> tuple[TokenDecoder, bool]:
    """What a tokenizer.json's `decoder` says: (token → bytes, whether the text's first space is taken away).

    Raises TokenizerError for a decoder that is not made of known steps.
    """
    steps = _steps(decoder)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return decode_byte_level, False
    replacements: list[tuple[str, str]] = []
    byte_fallback = strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "Metaspace"}:
                replacements.append((step.get("replacement", SPACE_MARK), " "))
                strips = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if start in (0, 1):
                strips = start == 1
            case _:
                raise TokenizerError(
                    f"{origin}: decoder step {step.get('type')!r} is not known in this form\n"
                    "  hint: known are ByteLevel, and Replace, Metaspace, ByteFallback, Fuse, Strip (one space at the start)"
                )
    return _decoder(tuple(replacements), byte_fallback), strips


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _decoder(replacements: tuple[tuple[str, str], ...], byte_fallback: bool) -> TokenDecoder:
    def decode(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return decode

"""Token ids become text piece by piece, never half a character. No torch."""

import codecs
from collections.abc import Sequence

from spark_model.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing sequence of token ids.

    All that `push` returned plus what `finish` returns equals `tokenizer.decode` of all the ids, however they were
    cut. A token costs the same wherever it stands: between calls at most three bytes of an unfinished character wait.
    Bytes that can never become a character come out as U+FFFD. Not thread safe; one object per sequence.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = True) -> None:
        """`at_start`: the ids start a text; False where they continue one, so that a leading space stays."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = at_start and tokenizer.strips_leading_space

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; "" while a character is unfinished."""
        data = self._tokenizer.join_bytes(ids, skip_special=self._skip_special)
        return self._utf8.decode(self._without_leading_space(data))

    def finish(self) -> str:
        """What is left once no more ids come: U+FFFD for an unfinished character, else ""."""
        return self._utf8.decode(b"", final=True)

    def _without_leading_space(self, data: bytes) -> bytes:
        if self._strip_space and data:
            self._strip_space = False
            return data.removeprefix(b" ")
        return data

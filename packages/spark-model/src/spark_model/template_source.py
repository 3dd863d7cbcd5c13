"""Chat template sources written for Jinja2, in the words of minijinja.

Four things mean the same in both only after a change of the source, which works on the tokens inside the tags and
leaves the text between them alone:

- `{% generation %}` marks the assistant's words for training; it becomes `{% with %}`, which only opens a scope.
- `'format' % value` is the `format` filter; minijinja's `%` knows numbers only.
- `value is iterable` and `is sequence` are true of undefined values and false of None. A test written in Python sees
  None for both, so undefined values become "" on the way to it.
- Methods of Python strings that minijinja lacks, or does without a bound on their result, become a filter.
"""

import re
from typing import Final

from spark_model.errors import TemplateError

METHOD_FILTER: Final = "python_method"
# Lacking in minijinja, but for `replace` and `format`, whose results it does not bound.
FILTERED_METHODS: Final = frozenset(
    [
        "casefold",
        "center",
        "expandtabs",
        "format",
        "index",
        "isdecimal",
        "isidentifier",
        "isprintable",
        "istitle",
        "ljust",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "swapcase",
        "zfill",
    ]
)
_FILLED_TESTS: Final = ("iterable", "sequence")
_KEYWORDS: Final = frozenset(
    ["and", "or", "not", "in", "is", "if", "else", "elif", "for", "set", "do", "return", "recursive"]
)

_OPENING = re.compile(r"\{[{%#]")
_RAW = re.compile(r"\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}", re.DOTALL)
_TAG_NAME = re.compile(r"(\s*)(end)?generation(?=\s*[-+]?%\})")
_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<number>\d[\w.]*)
      | (?P<name>[^\W\d]\w*)
      | (?P<operator>\*\*|//|[=!<>]=|.)""",
    re.DOTALL | re.VERBOSE,
)
_PAIRS: Final = {"(": ")", "[": "]", "{": "}"}

Token = tuple[str, str]  # (kind, text)


def to_minijinja(source: str, origin: str) -> str:
    """The source with the same meaning for minijinja. Raises TemplateError for a tag that does not end."""
    parts: list[str] = []
    position = 0
    while True:
        opening = _OPENING.search(source, position)
        if opening is None:
            parts.append(source[position:])
            return "".join(parts)
        parts.append(source[position : opening.start()])
        position = opening.start()
        raw = _RAW.match(source, position)
        if raw or opening[0] == "{#":
            end = raw.end() if raw else source.find("#}", position + 2) + 2
            if end < position + 2:
                raise TemplateError(f"{origin}: the comment at character {position} does not end")
            parts.append(source[position:end])
            position = end
            continue
        text, position = _tag(source, position, opening[0], origin)
        parts.append(text)


def _tag(source: str, start: int, opening: str, origin: str) -> tuple[str, int]:
    """The rewritten tag at `start` and the position after it."""
    closing = "}}" if opening == "{{" else "%}"
    position = start + 2
    head = opening
    if source[position : position + 1] in ("-", "+"):
        head += source[position]
        position += 1
    if opening == "{%" and (generation := _TAG_NAME.match(source, position)):
        head += f"{generation[1]}{generation[2] or ''}with"
        position = generation.end()
    tokens: list[Token] = []
    depth = 0
    while not (depth == 0 and source.startswith((closing, f"-{closing}", f"+{closing}"), position)):
        match = _TOKEN.match(source, position)
        if match is None:
            raise TemplateError(f"{origin}: the tag at character {start} does not end")
        text = match[0]
        depth += (text in _PAIRS) - (text in _PAIRS.values())
        tokens.append((str(match.lastgroup), text))
        position = match.end()
    end = source.index(closing, position) + 2
    return head + "".join(text for _, text in _rewrite(tokens)) + source[position:end], end


def _rewrite(tokens: list[Token]) -> list[Token]:
    """Expression tokens after the changes that the module describes."""
    done: list[Token] = []
    closers: list[str] = []
    index = 0
    while index < len(tokens):
        kind, text = tokens[index]
        following = _next(tokens, index)
        if text in _PAIRS:
            closers.append(text)
        elif text in _PAIRS.values() and closers and closers.pop() == "method":
            done.append(("operator", ")"))
        if text == "%" and _last_kind(done) == "string":
            end = _operand_end(tokens, following)
            done += [("operator", "|"), ("name", "format"), *_arguments(tokens[following:end])]
            index = end
            continue
        if text == "is" and kind == "name" and _names_filled_test(tokens, following):
            done += [("operator", "|"), ("name", "default"), ("operator", "("), ("string", "''"), ("operator", ") ")]
        if text == "." and _is_method_call(tokens, following) and _takes_filter(done, tokens[following][1]):
            done.insert(_operand_start(done), ("operator", "("))
            call = _next(tokens, following)
            has_arguments = tokens[_next(tokens, call)][1] != ")" if _next(tokens, call) < len(tokens) else False
            name = f"'{tokens[following][1]}'{', ' if has_arguments else ''}"
            done += [("operator", "|"), ("name", METHOD_FILTER), ("operator", "("), ("string", name)]
            closers.append("method")
            index = call + 1
            continue
        done.append((kind, text))
        index += 1
    return done


def _next(tokens: list[Token], index: int) -> int:
    """Index of the next token after `index` that is no space."""
    index += 1
    while index < len(tokens) and tokens[index][0] == "space":
        index += 1
    return index


def _previous(tokens: list[Token], index: int) -> int:
    index -= 1
    while index >= 0 and tokens[index][0] == "space":
        index -= 1
    return index


def _last_kind(done: list[Token]) -> str:
    last = _previous(done, len(done))
    return done[last][0] if last >= 0 else ""


def _names_filled_test(tokens: list[Token], index: int) -> bool:
    if index < len(tokens) and tokens[index][1] == "not":
        index = _next(tokens, index)
    return index < len(tokens) and tokens[index][1] in _FILLED_TESTS


def _is_method_call(tokens: list[Token], index: int) -> bool:
    call = _next(tokens, index)
    return (
        index < len(tokens) and tokens[index][1] in FILTERED_METHODS and call < len(tokens) and tokens[call][1] == "("
    )


def _takes_filter(done: list[Token], method: str) -> bool:
    """Formatting a literal whose fields have no widths stays with minijinja, which keeps 1.0 and 1 apart."""
    last = _previous(done, len(done))
    if last < 0:
        return False
    kind, text = done[last]
    return not (method == "format" and kind == "string" and not re.search(r"\{[^}]*[:\[.{]", text))


def _operand_start(done: list[Token]) -> int:
    """Where the operand that ends `done` starts: names, literals, calls, subscripts and attributes in a row."""
    index = _previous(done, len(done))
    while True:
        if done[index][1] in _PAIRS.values():
            index = _matching(done, index)
            before = _previous(done, index)
            called = before >= 0 and (
                done[before][0] == "string"
                or done[before][1] in (")", "]")
                or (done[before][0] == "name" and done[before][1] not in _KEYWORDS)
            )
            if called and done[index][1] != "{":
                index = before
                continue
            return index
        dot = _previous(done, index)
        if dot >= 0 and done[dot][1] == ".":
            index = _previous(done, dot)
            continue
        return index


def _matching(tokens: list[Token], index: int) -> int:
    """Index of the bracket that opens what `index` closes; 0 when it is not there, which is a syntax error later."""
    depth = 0
    for position in range(index, -1, -1):
        text = tokens[position][1].strip()
        depth += (text in _PAIRS.values()) - (text in _PAIRS)
        if depth == 0:
            return position
    return 0


def _operand_end(tokens: list[Token], start: int) -> int:
    """Where the operand at `start` ends: signs, then one literal, name or bracket with what follows it tightly."""
    index = start
    while index < len(tokens) and tokens[index][1] in ("-", "+"):
        index = _next(tokens, index)
    index = _after_bracket(tokens, index) if index < len(tokens) and tokens[index][1] in _PAIRS else index + 1
    while True:
        following = index if index < len(tokens) and tokens[index][0] != "space" else _next(tokens, index)
        if following >= len(tokens):
            return min(index, len(tokens))
        text = tokens[following][1]
        if text in ("(", "["):
            index = _after_bracket(tokens, following)
        elif text in (".", "|"):
            index = _next(tokens, following) + 1
        else:
            return index


def _after_bracket(tokens: list[Token], index: int) -> int:
    depth = 0
    for position in range(index, len(tokens)):
        depth += (tokens[position][1] in _PAIRS) - (tokens[position][1] in _PAIRS.values())
        if depth == 0:
            return position + 1
    return len(tokens)


def _arguments(operand: list[Token]) -> list[Token]:
    """What stands right of `%` as call arguments; a tuple's brackets are the call's own."""
    inner = _rewrite(operand)
    is_tuple = bool(operand) and operand[0][1] == "(" and _after_bracket(operand, 0) == len(operand)
    if is_tuple and any(text == "," for _, text in inner):
        return inner
    return [("operator", "("), *inner, ("operator", ")")]

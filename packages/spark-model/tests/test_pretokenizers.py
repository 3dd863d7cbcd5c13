"""The words that each named rule cuts a text into."""

import pytest
from tokenizers import Regex, pre_tokenizers

from spark_model.pretokenizers import PRE_TOKENIZERS

TEXT = "It's 12345 don't  HelloWorld\n\n e\u0301a!!a 你好"


def words(name: str, text: str) -> list[str]:
    rule = PRE_TOKENIZERS[name]
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_rule_drops_text(name: str) -> None:
    for text in (TEXT, "", " ", "\r\n \t", "\x00\u200b🙂", "a" * 1000):
        assert "".join(words(name, text)) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "It|'s| 12345| don|'t| | HelloWorld|\n\n| e|\u0301|a|!!|a| 你好"),
        ("smollm", "It|'s| |1|2|3|4|5| don|'t| | HelloWorld|\n\n| e|\u0301|a|!!|a| 你好"),
        ("qwen2", "It|'s| |1|2|3|4|5| don|'t| | HelloWorld|\n\n| e|\u0301a|!!|a| 你好"),
        ("qwen35", "It|'s| |1|2|3|4|5| don|'t| | HelloWorld|\n\n| e\u0301a|!!|a| 你好"),
        ("llama-bpe", "It|'s| |123|45| don|'t| | HelloWorld|\n\n| e|\u0301a|!!|a| 你好"),
        ("tekken", "It|'s| |1|2|3|4|5| don|'t| | Hello|World|\n\n| e\u0301a|!!|a| 你好"),
        ("gpt-4o", "It's| |123|45| don't| | Hello|World|\n\n| e\u0301a|!!|a| 你好"),
        ("deepseek-v3", "It|'s| |123|45| don|'t| | HelloWorld|\n\n| e\u0301a|!!|a| |你好"),
        ("default", "It|'|s| |123|45| don|'|t| | HelloWorld|\n\n| e|\u0301|a|!!|a| 你好"),
    ],
)
def test_words(name: str, expected: str) -> None:
    assert "|".join(words(name, TEXT)) == expected

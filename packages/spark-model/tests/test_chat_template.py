"""Chat templates: constructs that Jinja2 and minijinja see differently, refusals, bounds, and where a template is found."""

import datetime
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers.utils import chat_template_utils

from spark_model import chat_template
from spark_model.chat_template import ChatTemplate, load_chat_template
from spark_model.checkpoint import Checkpoint
from spark_model.errors import TemplateError
from spark_model.tokenizer import Tokenizer, tokenizer_from_json

Message = dict[str, Any]


class FrozenClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "FrozenClock":
        return cls(2025, 3, 9, 13, 5, 7, tzinfo=tz)


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "datetime", FrozenClock)
    monkeypatch.setattr(chat_template_utils, "datetime", FrozenClock)


USER: Message = {"role": "user", "content": "Hi"}
TOOLS: list[Message] = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "x"}},
]


def jinja(source: str, messages: object, **variables: object) -> str:
    compiled: Any = chat_template_utils._compile_jinja_template(source)
    text: str = compiled.render(messages=messages, **variables)
    return text


CONTEXT: dict[str, Any] = {
    "x": None,
    "d": {"b": 1, "a": {"q": [1, "z"]}, "items": {"k": 2}, "f": 20.0, "g": 1e-7, "big": 2**70, "h": 2.5},
    "l": [3, 1, 2],
    "s": "abc",
}


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%s-%d' % ('a', 3) }}{{ '%s' % s }}{{ '%.2f' % 1.234 }}{{ '%s|%s' % (x, 1.5) ~ 'q' }}{{ '%s' % x }}",
        "{{ 7 % 3 }}{% for i in l %}{{ loop.index0 % 2 }}{% endfor %}{{ '%d' % l[0] + 'z' }}{{ '%s' % s|upper }}",
        "{{ ('%s-%s' % ('a', s.replace('a', 'b'))).strip() }}{{ '%s' % (s) }}{{ 'a\\'%s' % 'b' }}{{ '%%' % () }}",
        "{{ 'a,b,c'.rsplit(',', 1)[0].strip() }}{{ s.removeprefix('a').removesuffix('c') }}{{ s.swapcase() in ['ABC'] }}",
        "{{ 'abc'.index('b') }}{{ 'a'.zfill(3) }}{{ 'ab'.center(5) }}{{ l.index(2) }}{{ ('a' ~ 'b').ljust(4) }}|",
        "{% if not s.removeprefix('a') == 'x' %}ok{% endif %}{{ messages[0]['content'].partition('i')[0] }}",
        "{{ '{} {x}'.format(1, x=2) }}{{ '{:>5}'.format('a') }}{{ '{:.2f}'.format(1.0) }}{{ '{}'.format(1.0) }}",
        "{{ 'aXbX'.replace('X', '') }}{{ 'aXbX'.replace('X', '-', 1) }}{{ 'aXbX'|replace('X', 'q', 1) }}",
        "{{ '1'|int + 1 }}{{ 'x'|int }}{{ 'x'|int(7) }}{{ '1.5'|float }}{{ x|int }}{{ 3.7|int }}{{ d.f|int }}{{ d.h + 1 }}",
        "{{ d.f }}{{ d.f|tojson }}{{ d.g }}{{ d.big }}{{ d.big|tojson }}{{ [d.f] }}{{ d }}{{ d.f|string }}",
        "{{ d.f is number }}{{ d.f is float }}{{ d.f is string }}{{ true is number }}{{ true is integer }}{{ 1 is integer }}",
        "{{ l is iterable }}{{ s is sequence }}{{ d is sequence }}{{ u is iterable }}{{ 1 is iterable }}{{ x is iterable }}",
        "{{ x is sequence }}{{ u is sequence }}{{ x is not iterable }}{{ d.nope is iterable }}{{ l is not sequence }}",
        "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.get('zz', 'q') }}{{ d['items'] }}{{ d|dictsort }}",
        "a\n  {%- generation -%}  \n q {%- endgeneration %}\nb",
        "{% if true %}\n  {% generation %}\nq\n  {% endgeneration %}\nz{% endif %}",
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
        "{% raw %}{{ a.rsplit(',') }} {% generation %}{% endraw %}{# {{ it's #}x{# {% generation %} #}",
        '{{ "}}" }}{{ {"a": {"b": 1}}["a"]["b"] }}{{ "%}" }}',
        "{{ d.a|tojson(indent=2) }}{{ d.a|tojson(sort_keys=true, separators=(',', ':')) }}{{ 'é<>&\\''|tojson }}",
        "{{ strftime_now('%d %b %Y %H:%M') }}",
        "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",  # noqa: E501
        "{% macro m(a) %}{{ a.rsplit('b')[0] }}{% endmacro %}{{ m('abc') }}{% set y = s.rsplit('b') %}{{ y }}",
        "{%- for m in messages if m.content.removeprefix('h') -%}{{ m.role }}{%- endfor -%}",
        "{{ none }}{{ x }}{{ x ~ 'a' }}{{ x.y }}|{{ x.y is defined }}{{ x|trim }}{{ x|default('d') }}{{ x|default('d', true) }}",  # noqa: E501
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(a=1).a }}{{ l + l }}{{ s[::-1] }}{{ l[1:] }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map(attribute='content')|join }}",
        "{{ d.a == {'q': [1, 'z']} }}{{ l == [3, 1, 2] }}{{ 'b' in d }}{{ 3 in l }}{{ messages }}",
        "{{ ' ab '.strip().upper() }}{{ 'a b'.title() }}{{ 'ab'.find('b') }}{{ '-'.join(['a', 'b']) }}{{ 'ab'.startswith(('a', 'c')) }}",  # noqa: E501
        "  {% if true %}\n  a\n  {% endif %}\n  {{- s -}}  \n{%+ if true %}b{% endif %}\nend\n",
    ],
)
def test_render_equals_jinja_on_constructs(source: str) -> None:
    got = ChatTemplate(source).render([USER], **CONTEXT)
    assert got == jinja(source, [USER], tools=None, documents=None, add_generation_prompt=True, **CONTEXT)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system here') }}", "^chat template: no system here$"),
        ("{{ messages[0].update({'content': 'x'}) }}", "may not change the messages"),
        ("{{ messages.append(1) }}", "may not change the messages"),
        ("{{ messages[0].nothing.more }}", "undefined value .line 1"),
        ("{{ 'a' + none }}", "unsupported types string and none"),
        ("{{ s.nosuch() }}", "undefined"),
        ("{{ messages.__class__.__mro__ }}", "undefined value"),
        ("{{ ('a{0.__class__}' ~ '').format(1) }}", "not a plain name"),
    ],
)
def test_render_refuses(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render([dict(USER)])
    assert USER["content"] == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 'a' ",
        "{# never",
        "{% for x in y %}",
        "{{ a b }}",
        "{% nonsense %}",
        "{{ x.rsplit( }}",
        "{{ ) }}",
    ],
)
def test_a_source_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="^here"):
        ChatTemplate(source, origin="here")


TWICE = "{%% for i in range(10000) %%}{%% for j in range(10000) %%}%s{%% endfor %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "source",
    [
        TWICE % "",
        TWICE % "{% if 'zzz' in messages[0].content %}{% endif %}",
        "{{ range(1000000000)|list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='\\\\\"') %}{% for i in range(99) %}{% set ns.s = ns.s|tojson %}{% endfor %}",
        "{{ ('a' * 10000).replace('a', 'a' * 10000)|length }}",
        "{{ ('a' * 10000)|replace('a', 'a' * 10000)|length }}",
        "{{ 'a' * 100000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format('a') }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ ('\\t' * 100000).expandtabs(10000) }}",
        "{{ 'a\nb'|indent(1000000000) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    ],
)
def test_hostile_templates_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "FUEL", 1_000_000)  # the same bound, reached sooner
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "ab" * 10_000}])


def test_render_stops_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "DEADLINE_S", 0.05)
    with pytest.raises(TemplateError, match=r"more than 0\.05 s"):
        ChatTemplate(TWICE % "{{ strftime_now('%Y')|length }}").render([])


def test_render_takes_long_conversations() -> None:
    source = "{% for m in messages %}{{ m.content.strip() + m.content|trim ~ '\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 2000}] * 500
    assert len(ChatTemplate(source).render(messages)) == 500 * (2 * 9999 + 1)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object()])
def test_render_refuses_values_outside_json(value: object) -> None:
    with pytest.raises(TemplateError, match="JSON values only"):
        ChatTemplate("x").render([{"role": "user", "content": value}])


def test_render_refuses_deep_nesting() -> None:
    content: object = "a"
    for _ in range(5000):
        content = [content]
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate("{{ messages|tojson }}").render([{"role": "user", "content": content}])


def test_render_uses_the_tool_template_for_tools() -> None:
    template = ChatTemplate("plain", tool_use_source="tools: {{ tools|length }}")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=TOOLS) == "tools: 2"


def test_render_special_tokens() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ bos_token is defined }}"
    assert ChatTemplate(source, eos_token="</s>", special_tokens={"pad_token": "<p>"}).render([]) == "|</s>|<p>|False"


def test_render_from_many_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content|tojson }}{% endfor %}{{ strftime_now('%Y') }}{{ n }}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([{"content": str(n)}] * 20, n=n), range(200)))
    assert texts == [f'"{n}"' * 20 + f"2025{n}" for n in range(200)]


def bare_tokenizer(chat_templates: Mapping[str, str]) -> Tokenizer:
    text = tokenizers.Tokenizer(models.BPE({"a": 0}, [])).to_str()
    return tokenizer_from_json(
        text, json.loads(text), {"bos_token": "<s>"}, chat_templates=chat_templates, origin="test"
    )


def rendered(template: ChatTemplate | None) -> str | None:
    return None if template is None else template.render([])


def test_load_chat_template_order(tmp_path: Path) -> None:
    overrides = tmp_path / "overrides"
    overrides.mkdir()
    model = tmp_path / "model"
    model.mkdir()
    checkpoint = Checkpoint(reference="m", name="m", kind="safetensors", path=model)
    tokenizer = bare_tokenizer({"default": "own {{ bos_token }}"})
    assert load_chat_template(checkpoint, bare_tokenizer({})) is None
    assert rendered(load_chat_template(checkpoint, tokenizer, overrides_dir=overrides)) == "own <s>"
    (overrides / "laguna.j2").write_text("family")
    assert rendered(load_chat_template(checkpoint, tokenizer, overrides_dir=overrides)) == "own <s>"  # no config.json
    (model / "config.json").write_text('{"model_type": "laguna"}')
    assert rendered(load_chat_template(checkpoint, tokenizer, overrides_dir=overrides)) == "family"
    assert rendered(load_chat_template(checkpoint, tokenizer)) == "own <s>"
    (tmp_path / "mine.jinja").write_text("mine")
    loaded = load_chat_template(checkpoint, tokenizer, override=tmp_path / "mine.jinja", overrides_dir=overrides)
    assert rendered(loaded) == "mine"


def test_load_chat_template_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint(reference="m", name="m", kind="safetensors", path=tmp_path)
    template = load_chat_template(checkpoint, bare_tokenizer({"default": "plain", "tool_use": "tools"}))
    assert template is not None
    assert (template.render([]), template.render([], tools=TOOLS)) == ("plain", "tools")
    only = load_chat_template(checkpoint, bare_tokenizer({"tool_use": "tools"}))
    assert only is not None
    assert only.render([]) == "tools"


def test_load_chat_template_errors_name_the_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(reference="m", name="m", kind="safetensors", path=tmp_path)
    with pytest.raises(TemplateError, match=r"nowhere\.jinja cannot be read"):
        load_chat_template(checkpoint, bare_tokenizer({}), override=tmp_path / "nowhere.jinja")
    with pytest.raises(TemplateError, match="chat template of m is not a template"):
        load_chat_template(checkpoint, bare_tokenizer({"default": "{% if %}"}))
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "a.j2").write_text("x")
    with pytest.raises(TemplateError, match=r"config\.json cannot be read"):
        load_chat_template(checkpoint, bare_tokenizer({}), overrides_dir=tmp_path)


def test_compiling_is_fast() -> None:
    start = time.perf_counter()
    ChatTemplate("{% for m in messages %}{{ m.content.replace('a', 'b') }}{% endfor %}\n" * 500)
    assert time.perf_counter() - start < 2

"""The option table as JSON and as the page docs/options.md."""

from collections.abc import Iterator
from typing import Any

from spark_server.options.command import availability, default_text, flag_help
from spark_server.options.table import Option, option_table
from spark_server.options.values import render_value

_HEAD = """# Options of `spark serve`

Made from the option declarations by `spark dump-serve-options --format markdown > docs/options.md`; a test compares.

A value comes from the first that has one: flag, environment variable (environment.md), recipe, MODEL.toml, the
checkpoint, built-in default. Start-up prints every value that is not a built-in default, with its origin.
A server refuses to start with an option that is not available in this build, and reports all refusals together.
Exit status: 0 ended as asked, 1 failed, 2 wrong usage."""


def surface() -> dict[str, Any]:
    """What other programs need to know about the flags, as JSON-ready values."""
    return {"command": "spark serve", "options": [_describe(option) for option in option_table().values()]}


def markdown_page() -> str:
    return "\n".join([_HEAD, *_sections()]) + "\n"


def _describe(option: Option) -> dict[str, Any]:
    spec = option.spec
    default = spec.default
    return {
        "name": option.name,
        "flag": option.flag,
        "aliases": list(spec.aliases),
        "group": option.title,
        "type": option.type,
        "choices": list(option.choices),
        "presence_only": spec.presence_only,
        "value_optional": spec.bare is not None,
        "repeatable": option.type == "list",
        "default": default if default is None or isinstance(default, (bool, int, float)) else render_value(default),
        "unit": spec.unit,
        "recipe_keys": list(option.recipe_keys) if spec.in_recipes else [],
        "recipe_rank": spec.recipe_rank,
        "available": spec.available,
        "accepts": [render_value(value) for value in spec.accepts],
        "help": spec.help,
    }


def _sections() -> Iterator[str]:
    title = ""
    for option in option_table().values():
        if option.title != title:
            title = option.title
            yield f"\n## {title}\n"
            yield "| option | meaning | default | recipe key | this build |"
            yield "|---|---|---|---|---|"
        cells = [
            f"`{flag_help(option)}`",
            option.spec.help + (f" One of {', '.join(option.choices)}." if len(option.choices) > 4 else ""),
            default_text(option),
            ", ".join(f"`{key}`" for key in option.recipe_keys) if option.spec.in_recipes else "",
            availability(option) or "yes",
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

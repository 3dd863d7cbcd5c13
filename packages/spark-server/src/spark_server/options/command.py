"""The click side of the option table: parameters, and help in groups."""

import click

from spark_server.options.table import Option, option_table
from spark_server.options.values import render_value

_METAVARS = {
    "int": "N",
    "float": "X",
    "str": "TEXT",
    "path": "PATH",
    "json": "JSON",
    "bool": "true|false",
    "list": "TEXT",
}


class ServeCommand(click.Command):
    """`spark serve`: like any command, but its help has a section a group and marks what the build lacks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _spell_out_bare(args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in option_table().values():
            sections.setdefault(option.title, []).append((flag_help(option), option_help(option)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=34)
        with formatter.section("Other"):
            formatter.write_dl([("--help", "Show this message and exit.")])


def click_parameters() -> list[click.Parameter]:
    """One click option for each option. Values stay text: layers.py reads them, so that every mistake is reported."""
    return [_click_option(option) for option in option_table().values()]


def flag_help(option: Option) -> str:
    spec = option.spec
    names = ", ".join(option.flags)
    if spec.presence_only:
        return f"--[no-]{option.flag.removeprefix('--')}" if spec.negatable else names
    metavar = spec.metavar or ("|".join(option.choices) if 0 < len(option.choices) <= 4 else "")
    metavar = metavar or ("NAME" if option.choices else _METAVARS[option.type])
    if spec.bare is None:
        return f"{names} {metavar}"
    return f"{names}[={metavar}]" if spec.bare_needs_equals else f"{names} [{metavar}]"


def option_help(option: Option) -> str:
    """The help sentence, the values, the default, and whether the build has it."""
    parts = [option.spec.help]
    if len(option.choices) > 4:
        parts.append(f"One of {', '.join(option.choices)}.")
    default = default_text(option)
    if default:
        parts.append(f"[default: {default}]")
    mark = availability(option)
    if mark:
        parts.append(f"[{mark}]")
    return " ".join(parts)


def default_text(option: Option) -> str:
    spec = option.spec
    if spec.default is None:
        return spec.default_note
    unit = f" {spec.unit}" if spec.unit else ""
    return render_value(spec.default) + unit


def availability(option: Option) -> str:
    """Empty when the build can do it."""
    if option.spec.available:
        return ""
    if not option.is_accepted_only:
        return "not available in this build"
    if option.spec.presence_only:
        return "changes nothing in this build"
    return f"this build takes only {' or '.join(render_value(value) for value in option.spec.accepts)}"


def _click_option(option: Option) -> click.Option:
    spec = option.spec
    if spec.presence_only:
        declaration = f"{option.flag}/--no-{option.flag.removeprefix('--')}" if spec.negatable else option.flag
        return click.Option([declaration, *spec.aliases, option.name], is_flag=True, default=None)
    if spec.bare is not None and not spec.bare_needs_equals:
        return click.Option([*option.flags, option.name], type=str, is_flag=False, flag_value=spec.bare, default=None)
    if option.type == "list":
        return click.Option([*option.flags, option.name], type=str, multiple=True)
    return click.Option([*option.flags, option.name], type=str, default=None)


def _spell_out_bare(args: list[str]) -> list[str]:
    """--name → --name=BARE, for options whose value has to follow an equals sign; click would take the next word."""
    bare = {
        option.flag: f"{option.flag}={option.spec.bare}"
        for option in option_table().values()
        if option.spec.bare_needs_equals
    }
    end = args.index("--") if "--" in args else len(args)
    return [bare.get(word, word) for word in args[:end]] + args[end:]

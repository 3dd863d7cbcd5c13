"""The `spark` command. Imports nothing heavy: help and version answer at once, and a wrong flag too."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spark_kernels.errors import SparkError
from spark_server.errors import ConfigError
from spark_server.options.command import ServeCommand, click_parameters

if TYPE_CHECKING:
    from spark_server.options.spec import Unset
    from spark_server.resolve import Resolved

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120})
@click.version_option(package_name="spark-server", prog_name="spark", message="%(prog)s %(version)s")
def command() -> None:
    """Serve language models over the OpenAI API."""


def _serve(model: str | None, **given: Any) -> int:
    # Presence-only options say True or False, the others text; what was not given is None or empty.
    flags = {name: value for name, value in given.items() if value is not None and value != ()}
    resolved = prepare(model, flags)

    from spark_server import logs

    config = resolved.config
    logs.configure(config.log_level)
    logger = logs.get_logger()
    for setting in resolved.settings:
        logger.info("option", name=setting.name, value=setting.value, origin=setting.origin)
    for warning in resolved.warnings:
        logger.warning(warning)

    from spark_server.start import run

    return run(config)


def prepare(model: str | None, flags: dict[str, object]) -> "Resolved":
    """Everything between the command line and the server: reads the environment, finds the model, decides.

    Raises click.UsageError without a model, ConfigError with every wrong option, other SparkErrors for the model.
    """
    from spark_server import env
    from spark_server.options.checks import find_problems
    from spark_server.options.layers import merge, read_environment, read_flags, read_recipe
    from spark_server.options.spec import UNSET
    from spark_server.resolve import describe_problems

    layers = [read_flags(flags), read_environment(env.option_values())]
    problems = find_problems(layers)
    options = merge(layers).options
    problems += _missing_file_problems(options.template.chat_template, "--chat-template")
    from_path = options.model.model_from_path
    reference = model if from_path is UNSET else str(from_path)
    if reference is None:
        if problems:
            raise ConfigError(describe_problems([*problems, "MODEL is missing"]))
        raise click.UsageError("MODEL is missing: give a recipe name, a Hugging Face id, a directory or a .gguf file")

    from spark_model.facts import read_facts
    from spark_model.model_toml import find_model_toml
    from spark_model.reference import resolve_model
    from spark_server.machine import read_machine
    from spark_server.resolve import resolve

    try:
        checkpoint = resolve_model(
            reference,
            cache_dir=None if options.model.cache_dir is UNSET else options.model.cache_dir,
            # with a wrong option the server will not start, so nothing is fetched for it
            allow_download=options.model.allow_download is True and not problems,
            recipe_dirs=env.recipe_folders(),
        )
        facts = read_facts(checkpoint)
    except SparkError as error:
        if problems:
            raise ConfigError(describe_problems([*problems, str(error)])) from error
        raise
    if checkpoint.recipe is not None:
        layers.append(read_recipe(checkpoint.recipe))
    return resolve(
        layers,
        model_name=checkpoint.name if from_path is UNSET or model is None else model,
        checkpoint=checkpoint,
        facts=facts,
        model_toml=find_model_toml(facts, (checkpoint.reference, checkpoint.name, checkpoint.path.name)),
        machine=read_machine(),
        problems=problems,
    )


def _missing_file_problems(path: "Path | Unset", flag: str) -> list[str]:
    if isinstance(path, Path) and not path.is_file():
        return [f"{flag} {path}: there is no such file"]
    return []


command.add_command(
    ServeCommand(
        "serve",
        callback=_serve,
        params=[click.Argument(["model"], required=False), *click_parameters()],
        help="Serve MODEL: a recipe name, a Hugging Face id, a directory, or a .gguf file.",
        epilog="A value comes from the first that has one: flag, environment, recipe, MODEL.toml, checkpoint, default.",
    )
)


@command.command("dump-serve-options", hidden=True)
@click.option("--format", "output_format", type=click.Choice(["json", "markdown"]), default="json")
def _dump_serve_options(output_format: str) -> None:
    """Print the options of `spark serve` for other programs, or as the page docs/options.md."""
    from spark_server.options.document import markdown_page, surface

    click.echo(
        json.dumps(surface(), indent=2) if output_format == "json" else markdown_page(), nl=output_format == "json"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exit status 0: ended as asked; 1: failed, one line on stderr; 2: wrong usage."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = command.main(arguments, prog_name="spark", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except SparkError as error:
        is_usage = isinstance(error, ConfigError)
        print(f"spark: {error if is_usage else _one_line(error)}", file=sys.stderr)
        return EXIT_USAGE if is_usage else EXIT_FAILED
    return status if isinstance(status, int) else 0


def _one_line(error: SparkError) -> str:
    """Service managers show a line; a list of wrong options keeps its lines."""
    return "; ".join(line.strip().rstrip(".") for line in str(error).splitlines() if line.strip())

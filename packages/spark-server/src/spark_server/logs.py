"""Logging of the whole program: structlog to stderr, readable on a terminal and JSON lines elsewhere.

stdout is for data. Importing this module costs time (structlog), so the command line imports it after parsing.
Events are lower case, with key=value pairs; the fields that `bind_process` sets (process, rank) come from there, not from
the call.
"""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from spark_server.config import LogLevel

# Before `configure`, and in tests: structlog's own default prints to stdout.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

_LEVELS: dict[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_PACKAGES = ("spark_kernels", "spark_runtime", "spark_model", "spark_server")


def configure(level: LogLevel, *, stream: TextIO | None = None, is_terminal: bool | None = None) -> None:
    """Once a process, after its arguments are parsed.

    Modules and libraries that use `logging` print through the same renderer; libraries only from WARNING on.
    """
    stream = sys.stderr if stream is None else stream
    is_terminal = stream.isatty() if is_terminal is None else is_terminal
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_terminal else "iso", utc=not is_terminal, key="time"),
    ]
    renderer = _terminal_renderer() if is_terminal else _json_renderer()
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer]
        )
    )
    logging.basicConfig(level=max(_LEVELS[level], logging.WARNING), handlers=[handler], force=True)
    for package in _PACKAGES:  # the others' chatter is of no use to the operator
        logging.getLogger(package).setLevel(_LEVELS[level])


def get_logger() -> FilteringBoundLogger:
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def bind_process(**fields: str | int) -> None:
    """Fields that every later line of this thread and its tasks carries, such as process="engine" or rank=1."""
    structlog.contextvars.bind_contextvars(**fields)


def _json_renderer() -> list[Processor]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _terminal_renderer() -> list[Processor]:
    plain = structlog.dev.KeyValueColumnFormatter(
        key_style=None, value_style="", reset_style="", value_repr=str, width=0
    )
    level = structlog.dev.KeyValueColumnFormatter(
        key_style=None, value_style="", reset_style="", value_repr=lambda name: str(name).upper(), width=7
    )
    pair = structlog.dev.KeyValueColumnFormatter(
        key_style="", value_style="", reset_style="", value_repr=_plain_or_quoted
    )
    columns = [
        structlog.dev.Column("time", plain),
        structlog.dev.Column("level", level),
        structlog.dev.Column("event", plain),
        structlog.dev.Column("", pair),
    ]
    # a rich traceback would show local variables, prompts among them
    renderer = structlog.dev.ConsoleRenderer(
        columns=columns, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )
    return [renderer]


def _plain_or_quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(character.isspace() for character in text) else text

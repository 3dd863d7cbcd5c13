"""The HTTP side: address, names, access, time limits, logs."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from spark_server.options.spec import Unset, option, switch


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    title: ClassVar[str] = "Server"

    port: int | Unset = option("TCP port; 0 takes a free one.", default=8888, minimum=0, maximum=65535, recipe_rank=1)
    bind: str | Unset = option(
        "Address to listen on; 0.0.0.0 listens on every interface.",
        default="127.0.0.1",
        aliases=("--host",),
        recipe_key="host",
        recipe_rank=2,
        metavar="ADDRESS",
    )
    request_timeout: int | Unset = option(
        "Longest time for one request, which then ends with finish_reason timeout; 0 is no limit.",
        unit="s",
        default=300,
        minimum=0,
        recipe_rank=56,
    )
    shutdown_timeout: int | Unset = option(
        "Time that running requests get to finish after SIGTERM or Ctrl-C.", unit="s", default=15, minimum=0
    )
    max_queue_depth: int | Unset = option(
        "Requests that may wait for their turn; more are refused at once. 0 is no limit.",
        unit="requests",
        default=1024,
        minimum=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] | Unset = option(
        "Least important log lines to print, on stderr; SPARK_LOG_LEVEL sets it too.", default="info"
    )
    no_tui: bool | Unset = switch(
        "Plain log lines on a terminal. Accepted for existing launchers: this build has no terminal interface.",
        in_recipes=False,
    )
    require_auth: bool | Unset = switch(
        "Ask for a bearer token on every endpoint but health and metrics.", available=False, recipe_rank=47
    )
    auth_tokens_file: Path | Unset = option("File of accepted tokens, one a line.", available=False, in_recipes=False)
    auth_token: str | Unset = option(
        "One accepted token; other users of the machine can see it.",
        available=False,
        recipe_key="api_key",
        recipe_aliases=("auth_token",),
        recipe_rank=48,
        is_secret=True,
    )
    dump: Path | Unset = option(
        "Append every request and answer to a JSON Lines file.",
        available=False,
        bare="spark-dump.jsonl",
        in_recipes=False,
    )
    profile: bool | Unset = switch("Time every kernel; slower.", available=False, in_recipes=False)
    state_dir: Path | Unset = option("Folder for what outlives the process.", available=False, in_recipes=False)

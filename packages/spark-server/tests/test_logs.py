import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from spark_server import logs


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_lines_off_a_terminal_are_json() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)  # a StringIO is no terminal
    logs.get_logger().info("loaded", model="m", seconds=1.5)
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {"event": "loaded", "level": "info", "model": "m", "seconds": 1.5}


def test_lines_on_a_terminal_are_readable() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream, is_terminal=True)
    logs.get_logger().warning("loaded", model="Qwen3 8B", bytes="5.1GiB", empty="")
    time, level, rest = stream.getvalue().split(maxsplit=2)
    assert len(time) == len("12:00:00")
    assert level == "WARNING"
    assert rest == "loaded model='Qwen3 8B' bytes=5.1GiB empty=''\n"
    assert "\x1b" not in stream.getvalue()


def test_level_drops_what_is_less_important() -> None:
    stream = io.StringIO()
    logs.configure("warning", stream=stream)
    logs.get_logger().info("quiet")
    assert stream.getvalue() == ""
    logs.configure("debug", stream=stream)
    logs.get_logger().debug("loud")
    assert json.loads(stream.getvalue())["event"] == "loud"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_libraries_print_through_the_same_renderer(is_terminal: bool) -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream, is_terminal=is_terminal)
    library = logging.getLogger("some.library")
    library.info("chatter")
    library.error("went %s", "wrong")
    if is_terminal:
        assert stream.getvalue().endswith(" ERROR   went wrong\n")
        assert stream.getvalue().count("\n") == 1
    else:
        line = json.loads(stream.getvalue())
        assert (line["event"], line["level"]) == ("went wrong", "error")


def test_our_own_modules_print_from_the_level_on() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    logging.getLogger("spark_server.http.server").info("ready url=%s", "http://x")
    logging.getLogger("spark_server.http.server").debug("chatter")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["ready url=http://x"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_tracebacks_show_no_local_variables(is_terminal: bool) -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream, is_terminal=is_terminal)

    def fail(prompt: str) -> None:
        raise RuntimeError("broken")

    try:
        fail("terces pot"[::-1])
    except RuntimeError:
        logs.get_logger().exception("request failed", request_id=3)
    assert "RuntimeError: broken" in stream.getvalue()
    assert "top secret" not in stream.getvalue()


def test_bound_fields_are_on_every_line() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    logs.bind_process(process="engine", rank=1)
    logs.get_logger().info("loaded")
    line = json.loads(stream.getvalue())
    assert (line["process"], line["rank"]) == ("engine", 1)


def test_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", stream=sys.stderr)
    logs.get_logger().info("loaded")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loaded" in captured.err

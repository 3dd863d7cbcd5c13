"""The server's life in a process of its own, on a fake engine: start, ready line, drain, signals, taken port."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from spark_server.errors import StartupError
from spark_server.http.server import bind_socket

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

# `settings` has `config`, changes of the configuration, `engine`, arguments of the fake, and what happens when.
PROGRAM = """
import json, sys, time
import structlog
from spark_server.errors import StartupError
from spark_server.http.server import serve
from spark_server.http.testing import FakeEngine, answer, create_config, create_text

settings = json.loads(sys.argv[1])
def render(logger, method, event):
    return " ".join([event.pop("event"), *(f"{name}={value}" for name, value in event.items())])

structlog.configure(processors=[render], logger_factory=structlog.PrintLoggerFactory(sys.stderr))

def create_engine():
    engine = FakeEngine(answer("a" * settings.get("num_tokens", 3), finish="length"), **settings.get("engine", {}))
    if "start_error" in settings:
        engine.start_error = StartupError(settings["start_error"])
    return engine

def load_text():
    if "text_error" in settings:
        raise StartupError(settings["text_error"])
    print("loading text", file=sys.stderr)
    time.sleep(settings.get("text_s", 0))
    return create_text()

try:
    sys.exit(serve(create_config(**settings.get("config", {})), create_engine=create_engine, load_text=load_text))
except StartupError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
"""


@dataclass
class Server:
    """The process and the lines of its stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)
    port: int = 0
    connections: list[http.client.HTTPConnection] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.news:
                self.lines.append(line.rstrip())
                self.news.notify_all()

    def wait_line(self, pattern: str, timeout_s: float = 20) -> str:
        with self.news:
            assert self.news.wait_for(lambda: any(re.search(pattern, line) for line in self.lines), timeout_s), (
                self.lines
            )
            return next(line for line in self.lines if re.search(pattern, line))

    def find_port(self, pattern: str) -> None:
        match = re.search(r"url=http://127\.0\.0\.1:(\d+)", self.wait_line(pattern))
        assert match is not None
        self.port = int(match[1])

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        self.connections.append(connection)
        return connection

    def get(self, path: str) -> tuple[int, Any]:
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def send_chat(self, **fields: Any) -> http.client.HTTPConnection:
        connection = self.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, **fields}))
        return connection

    def signal(self, number: int) -> float:
        self.process.send_signal(number)
        return time.monotonic()

    def wait_exit(self, timeout_s: float = 10) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def start_server(**settings: Any) -> Iterator[Server]:
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    server = Server(process)
    reader = threading.Thread(target=server.read)
    reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        for connection in server.connections:
            connection.close()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def ready_server(**settings: Any) -> Iterator[Server]:
    with start_server(**settings) as server:
        server.find_port("^ready ")
        yield server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_ends_at_once(number: int) -> None:
    with ready_server() as server:
        assert server.get("/health")[0] == 200
        idle = server.connect()  # a kept-alive connection does not hold the server
        idle.request("GET", "/")
        idle.getresponse().read()
        sent = server.signal(number)
        assert server.wait_exit() == 0
        assert time.monotonic() - sent < 1.0
        assert len([line for line in server.lines if "url=" in line and line.startswith("ready")]) == 1
        assert not any("Traceback" in line or "Running on" in line for line in server.lines), server.lines


def test_answers_while_the_model_loads() -> None:
    with start_server(engine={"load_s": 60}) as server:
        server.find_port("^listening; ")
        assert server.get("/health") == (503, {"status": "loading"})
        assert server.get("/health/live") == (200, {"status": "ok"})
        response = server.send_chat().getresponse()
        assert (response.status, response.getheader("retry-after")) == (503, "5")
        sent = server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - sent < 1.0
        assert not any(line.startswith("ready") for line in server.lines)


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    with ready_server(num_tokens=40, engine={"delay_s": 0.05}) as server:
        streaming = server.send_chat(stream=True)
        stream = streaming.getresponse()
        assert stream.readline().startswith(b"data: ")
        whole = server.send_chat()
        server.get("/health")
        server.signal(signal.SIGTERM)
        server.wait_line("^stopping signal=SIGTERM ")
        refused = server.send_chat().getresponse()
        assert refused.status == 503
        assert json.loads(refused.read())["error"]["code"] == "shutting_down"
        assert server.get("/health") == (503, {"status": "stopping"})
        text = stream.read().decode()
        assert text.count('"content":"a"') == 40
        assert text.endswith("data: [DONE]\n\n")
        body = json.loads(whole.getresponse().read())
        assert body["choices"][0]["message"]["content"] == "a" * 40
        assert server.wait_exit() == 0
        server.wait_line("^stopped cut=0$")


def test_drain_cuts_after_the_shutdown_time() -> None:
    with ready_server(num_tokens=1000, engine={"delay_s": 0.05}, config={"shutdown_timeout_s": 0.3}) as server:
        stream = server.send_chat(stream=True).getresponse()
        stream.readline()
        whole = server.send_chat()
        server.get("/health")
        sent = server.signal(signal.SIGTERM)
        events = stream.read().decode().split("\n\n")
        assert json.loads(events[-3][6:])["error"]["code"] == "shutting_down"
        assert events[-2:] == ["data: [DONE]", ""]
        response = whole.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["error"]["code"] == "shutting_down"
        assert server.wait_exit() == 0
        assert 0.3 <= time.monotonic() - sent < 2.5
        server.wait_line("^stopped cut=2$")


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_second_signal_ends_at_once(first: int, second: int) -> None:
    with ready_server(num_tokens=1000, engine={"delay_s": 0.05}) as server:
        stream = server.send_chat(stream=True).getresponse()
        stream.readline()
        server.signal(first)
        server.wait_line(f"^stopping signal={signal.Signals(first).name} open=1 ")
        sent = server.signal(second)
        assert server.wait_exit() == 128 + second
        assert time.monotonic() - sent < 1.0


def test_signal_that_a_launcher_doubles_is_one_signal() -> None:
    with ready_server(num_tokens=8, engine={"delay_s": 0.05}) as server:
        stream = server.send_chat(stream=True).getresponse()
        stream.readline()
        server.signal(signal.SIGTERM)
        server.wait_line("^stopping signal=SIGTERM ")
        server.signal(signal.SIGTERM)
        assert stream.read().decode().endswith("data: [DONE]\n\n")
        assert server.wait_exit() == 0


def test_client_that_does_not_read_does_not_hold_the_server() -> None:
    with ready_server(num_tokens=200_000, config={"shutdown_timeout_s": 0.2, "max_model_len": 4096}) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({**CHAT, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(15) == b"HTTP/1.1 200 \r\n"
        sent = server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - sent < 4.0
        connection.close()
        server.wait_line("^stopped cut=1$")
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_port_in_use_is_known_before_anything_starts() -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with start_server(config={"port": port}, engine={"load_s": 60}) as server:
            assert server.wait_exit(20) == 1
            message = f"port {port} on 127.0.0.1 is in use; stop what uses it or choose another with --port"
            server.wait_line("error: ")
            assert server.lines == [f"error: {message}"]
        began = time.monotonic()
        with pytest.raises(StartupError, match="is in use"):
            bind_socket("127.0.0.1", port)
        assert time.monotonic() - began < 1.0


def test_engine_that_cannot_start_ends_the_server() -> None:
    with start_server(start_error="the model needs 9 GiB, 4 GiB are free (--max-memory)") as server:
        assert server.wait_exit(20) == 1
        server.wait_line("^error: the model needs 9 GiB, 4 GiB are free")
        assert not any("Traceback" in line or line.startswith("ready") for line in server.lines), server.lines


def test_text_that_cannot_be_loaded_ends_the_server() -> None:
    with start_server(text_error="tokenizer.json is missing", engine={"load_s": 60}) as server:
        assert server.wait_exit(20) == 1
        server.wait_line("^error: tokenizer.json is missing$")
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_signal_while_the_text_is_loaded() -> None:
    with start_server(text_s=60, engine={"load_s": 60}) as server:
        server.wait_line("^loading text$")
        sent = server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - sent < 2.0


def test_bind_socket_unknown_host() -> None:
    with pytest.raises(StartupError, match=r"cannot resolve the address no\.such\.host\.invalid"):
        bind_socket("no.such.host.invalid", 0)
    with pytest.raises(StartupError, match="cannot listen on 192.0.2.1 port 0"):
        bind_socket("192.0.2.1", 0)


def test_bind_socket_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = bind_socket("::1", 0)
    except StartupError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        assert listener.family == socket.AF_INET6

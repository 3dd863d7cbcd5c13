"""A real `spark serve` process for the end-to-end tests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

READY_TIMEOUT_S = 120.0


class RunningServer:
    """A `spark serve` child process, its log and its URL."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "spark_server", "serve", *arguments, "--port", "0"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            found = re.search(r"http://[0-9.:]+", line)
            if found and '"ready"' in line:
                self.url = found.group()
                self._ready.set()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._ready.wait(0.05):
            assert self.process.poll() is None, "\n".join(self.log)
            assert time.monotonic() < deadline, "\n".join(self.log)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def health(self) -> dict[str, object]:
        body: dict[str, object] = httpx.get(f"{self.url}/health", timeout=10).json()
        return body

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def wait_until(condition: Callable[[], bool], timeout_s: float, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def serve_until_done(*arguments: str) -> Iterator[RunningServer]:
    running = RunningServer(*arguments)
    try:
        running.wait_ready()
        yield running
    finally:
        assert running.stop() == 0, "\n".join(running.log)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """`spark serve smollm2` with its defaults, shared by the tests that leave it as it was."""
    yield from serve_until_done("smollm2")


@pytest.fixture(scope="module")
def float32_server() -> Iterator[RunningServer]:
    """With "auto" a row may round differently next to others, within bf16 noise; float32 is exact."""
    yield from serve_until_done("smollm2", "--dtype", "float32", "--max-batch-size", "32", "--max-seq-len", "1024")


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Starts servers of a test's own; ends what is left."""
    started: list[RunningServer] = []

    def start(*arguments: str) -> RunningServer:
        running = RunningServer(*arguments)
        started.append(running)
        running.wait_ready()
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def wait_idle() -> Callable[[RunningServer], None]:
    """Waits until a server has nothing running, nothing waiting and all blocks free."""

    def wait(running: RunningServer) -> None:
        def is_idle() -> bool:
            health = running.health()
            return health["running"] == 0 == health["waiting"] and health["free_blocks"] == health["total_blocks"]

        wait_until(is_idle, 10, lambda: json.dumps(running.health()))

    return wait

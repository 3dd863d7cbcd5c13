"""A real server on loopback: clients that go away, silence, slow uploads, many at once, and OpenAI's own client."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from spark_server.engine.frames import Submit
from spark_server.http import sse
from spark_server.http.testing import (
    ByteTokenizer,
    FakeEngine,
    Rig,
    answer,
    create_rig,
    create_text,
    run_server,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_URL = "/v1/chat/completions"


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(limited())


@asynccontextmanager
async def client_of(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with run_server(rig.app) as url, httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
        yield client


async def open_socket(client: httpx.AsyncClient, body: Any, path: str = CHAT_URL) -> asyncio.StreamWriter:
    """Send a request over a bare connection, which the test then cuts."""
    url = client.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return writer


async def is_idle(rig: Rig) -> None:
    """Wait until nothing of any request is left on the HTTP side."""
    async with asyncio.timeout(5):
        while rig.services.drain.num_open:
            await asyncio.sleep(0.001)
    assert rig.services.pipeline.num_waiting == 0
    assert rig.engine.running == {}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
@pytest.mark.parametrize("path", [CHAT_URL, "/v1/completions"])
def test_client_goes(stream: bool, phase: str, path: str) -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with client_of(rig) as client:
            writer = await open_socket(client, {**CHAT, "prompt": ["a", "b"], "stream": stream}, path)
            num_requests = 1 if path == CHAT_URL else 2
            await rig.engine.wait_until(lambda: len(rig.engine.running) == num_requests)
            streams = list(rig.engine.running.values())
            if phase != "queued":
                for fake in streams:
                    fake.emit("")
            if phase == "decoding":
                for fake in streams:
                    fake.emit("x")
            writer.close()
            await rig.engine.wait_until(lambda: not rig.engine.running)
            assert sorted(rig.engine.aborted) == [fake.request.request_id for fake in streams]
            await is_idle(rig)
            assert (await client.get("/health")).status_code == 200

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_client_goes_while_the_prompt_is_tokenised(stream: bool) -> None:
    entered, leave = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
            entered.set()
            leave.wait(10)
            return [1]

    async def scenario() -> None:
        rig = create_rig(FakeEngine(), text=create_text(SlowTokenizer()))
        async with client_of(rig) as client:
            body = {"messages": [{"role": "user", "content": "x" * 10_000}], "stream": stream}
            writer = await open_socket(client, body)
            await asyncio.to_thread(entered.wait, 5)
            assert (await client.get("/health/live")).status_code == 200, "the loop is not blocked"
            writer.close()
            await is_idle(rig)
            leave.set()
        assert rig.engine.submitted == []

    run(scenario())


def test_client_goes_in_the_middle_of_its_body(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with client_of(rig) as client:
            _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(f"POST {CHAT_URL} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
            async with asyncio.timeout(5):
                while not rig.services.drain.num_open:
                    await asyncio.sleep(0.001)
            writer.close()
            await is_idle(rig)

    run(scenario())
    assert (caplog.records, capsys.readouterr().err) == ([], "")


def test_stream_begins_only_when_admitted() -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with client_of(rig) as client:
            request = client.build_request("POST", CHAT_URL, json={**CHAT, "stream": True})
            sending = asyncio.create_task(client.send(request, stream=True))
            await rig.engine.wait_until(lambda: bool(rig.engine.running))
            await client.get("/health")  # a whole exchange passes and the stream has not begun
            assert not sending.done()
            rig.engine.running[1].emit("")
            response = await sending
            lines = response.aiter_lines()
            assert json.loads((await anext(lines))[6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            rig.engine.running[1].emit("a", "length")
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_queue_full(stream: bool) -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine(), max_queue_depth=1)
        async with client_of(rig) as client:
            writer = await open_socket(client, CHAT)
            await rig.engine.wait_until(lambda: bool(rig.engine.running))
            response = await client.post(CHAT_URL, json={**CHAT, "stream": stream})
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"] == {
                "message": "1 requests wait, the limit is 1 (--max-queue-depth); try again later",
                "type": "rate_limit_exceeded",
                "param": None,
                "code": "queue_full",
            }
            writer.close()
            await rig.engine.wait_until(lambda: not rig.engine.running)

    run(scenario())


def test_stream_says_something_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)

    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with client_of(rig) as client:
            request = client.build_request("POST", CHAT_URL, json={**CHAT, "stream": True})
            sending = asyncio.create_task(client.send(request, stream=True))
            await rig.engine.wait_until(lambda: bool(rig.engine.running))
            rig.engine.running[1].emit("")
            lines = (await sending).aiter_lines()
            heard = [await anext(lines) for _ in range(6)]
            assert heard[0].startswith("data: ")
            assert heard[1:] == ["", ": keep-alive", "", ": keep-alive", ""]
            rig.engine.running[1].emit("", "length")
            rest = [line async for line in lines if line and not line.startswith(":")]
            assert rest[-1] == "data: [DONE]"

    run(scenario())


def test_head_has_no_body_and_the_connection_goes_on() -> None:
    async def scenario() -> None:
        async with client_of(create_rig(FakeEngine(answer("a")))) as client:
            for path in ("/", "/health", "/v1/models"):
                head, get = await client.head(path), await client.get(path)
                assert (head.status_code, head.content) == (200, b"")
                assert head.headers["content-length"] == str(len(get.content))
            assert "server" not in head.headers or "python" not in head.headers["server"]

    run(scenario())


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("path", "status"), [(CHAT_URL, 413), ("/v1/unknown", 404)])
def test_refusal_reaches_a_client_that_still_sends(chunked: bool, path: str, status: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async def scenario() -> None:
        async with client_of(create_rig(FakeEngine(), max_body_bytes=1_000_000)) as client:
            response = await client.post(path, content=pieces() if chunked else b"x" * 4_194_304)
            assert response.status_code == status
            assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")

    run(scenario())


def test_many_streams_half_of_them_cut() -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine(answer("abcdefghij" * 3), delay_s=0.001))
        random_source = random.Random(7)

        async def read(client: httpx.AsyncClient, stop_after: int | None) -> str:
            text = ""
            async with client.stream("POST", CHAT_URL, json={**CHAT, "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if stop_after is not None and len(text) >= stop_after:
                        break
            return text

        async with client_of(rig) as client:
            cuts = [random_source.randrange(25) if index % 2 else None for index in range(64)]
            texts = await asyncio.gather(*(read(client, cut) for cut in cuts))
            assert [text for text, cut in zip(texts, cuts, strict=True) if cut is None] == ["abcdefghij" * 3] * 32
            await is_idle(rig)
            assert 0 < len(rig.engine.aborted) <= 32

    run(scenario())


def test_drain_cuts_what_is_left_with_an_ending() -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with client_of(rig) as client:
            request = client.build_request("POST", CHAT_URL, json={**CHAT, "stream": True})
            sending = asyncio.create_task(client.send(request, stream=True))
            whole = asyncio.create_task(client.post(CHAT_URL, json=CHAT))
            queued = asyncio.create_task(client.post(CHAT_URL, json=CHAT))
            await rig.engine.wait_until(lambda: len(rig.engine.running) == 3)
            first, *_ = rig.engine.running.values()
            first.emit("a")
            response = await sending
            assert await rig.services.drain.finish(timeout_s=0.05) == 3
            lines = [line async for line in response.aiter_lines() if line]
            message = "the server shut down before the request was finished"
            body = {"message": message, "type": "server_error", "param": None, "code": "shutting_down"}
            assert [json.loads(line[6:]) for line in lines[2:-1]] == [{"error": body}]
            assert lines[-1] == "data: [DONE]"
            for task in (whole, queued):
                answered = await task
                assert (answered.status_code, answered.json()) == (503, {"error": body})
            await is_idle(rig)
            assert sorted(rig.engine.aborted) == [1, 2, 3]

    run(scenario())


def test_drain_waits_for_what_runs() -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with client_of(rig) as client:
            whole = asyncio.create_task(client.post(CHAT_URL, json=CHAT))
            await rig.engine.wait_until(lambda: bool(rig.engine.running))
            finish = asyncio.create_task(rig.services.drain.finish(timeout_s=10))
            refused = await client.post(CHAT_URL, json=CHAT)
            assert refused.status_code == 503
            assert not finish.done()
            rig.engine.running[1].emit("done", "length")
            assert (await whole).json()["choices"][0]["message"]["content"] == "done"
            assert await finish == 0

    run(scenario())


@asynccontextmanager
async def openai_client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        run_server(rig.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


USER: Any = {"role": "user", "content": "x"}


def echo(request: Submit) -> Any:
    """Answers with the prompt's own words."""
    return answer(bytes(request.token_ids).decode().upper())(request)


def test_openai_client_streamed_equals_not_streamed() -> None:
    words: Sequence[str] = ("naïve", "☕", "日本語", "plain", "", "👩‍👩‍👧", "\n\n", '"quoted"', "\\", "a b")
    prompts = [f"{first} {second}" for first in words for second in words[:5]]

    async def scenario() -> None:
        async with openai_client(create_rig(FakeEngine(echo), max_output_tokens=2000)) as client:
            models = [model.id async for model in client.models.list()]
            assert models == ["tiny", "tiny-alias"]

            async def check(prompt: str) -> None:
                messages: Any = [{"role": "user", "content": prompt}]
                whole = await client.chat.completions.create(model="tiny", messages=messages)
                chunks = await client.chat.completions.create(
                    model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
                )
                events = [chunk async for chunk in chunks]
                text = "".join(event.choices[0].delta.content or "" for event in events[:-1])
                assert text == whole.choices[0].message.content == f"USER: {prompt.upper()}\nASSISTANT: "
                assert events[-1].usage is not None
                assert whole.usage is not None
                assert events[-1].usage.total_tokens == whole.usage.total_tokens
                assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"

            await asyncio.gather(*(check(prompt) for prompt in prompts))
            legacy = await client.completions.create(model="tiny", prompt=["x", "y"])
            assert [choice.text for choice in legacy.choices] == ["X", "Y"]

    run(scenario())


@pytest.mark.parametrize(
    ("call", "kind", "code"),
    [
        (lambda c: c.chat.completions.create(model="no", messages=[]), openai.NotFoundError, "model_not_found"),
        (
            lambda c: c.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], functions=[{"name": "f"}]
            ),
            openai.BadRequestError,
            "unsupported_parameter",
        ),
        (lambda c: c.completions.create(model="tiny", prompt=[9999]), openai.BadRequestError, None),
        (lambda c: c.models.retrieve("no"), openai.NotFoundError, "model_not_found"),
        (lambda c: c.embeddings.create(model="tiny", input="x"), openai.NotFoundError, "unknown_route"),
    ],
)
def test_openai_client_errors(
    call: Callable[[openai.AsyncOpenAI], Any], kind: type[openai.APIStatusError], code: str | None
) -> None:
    async def scenario() -> None:
        async with openai_client(create_rig(FakeEngine(answer("")))) as client:
            with pytest.raises(kind) as caught:
                await call(client)
            assert caught.value.code == code

    run(scenario())


def test_openai_client_error_in_a_stream() -> None:
    async def scenario() -> None:
        rig = create_rig(FakeEngine())
        async with openai_client(rig) as client:
            create = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
            )
            sending = asyncio.create_task(create)
            await rig.engine.wait_until(lambda: bool(rig.engine.running))
            rig.engine.running[1].emit("a")
            chunks = await sending
            assert (await anext(chunks)).choices[0].delta.role == "assistant"
            rig.engine.fail()
            with pytest.raises(openai.APIError, match="died"):
                async for _ in chunks:
                    pass

    run(scenario())

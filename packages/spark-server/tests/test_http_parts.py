"""The small parts of the HTTP side alone: drain, disconnect, middleware."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest
from starlette.types import Message, Receive, Scope, Send

from spark_server.errors import ShuttingDownError
from spark_server.http.disconnect import while_connected
from spark_server.http.drain import Drain
from spark_server.http.errors import ClientGoneError
from spark_server.http.middleware import LastingDisconnect


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(5):
            await work

    asyncio.run(limited())


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


async def connected() -> Message:
    await asyncio.Event().wait()
    return {}


async def disconnected() -> Message:
    return {"type": "http.disconnect"}


def test_drain_admits_until_it_stops() -> None:
    async def scenario() -> None:
        drain = Drain()
        drain.check_admitting()
        assert await drain.until_cut(value(3)) == 3
        assert await drain.finish(timeout_s=5) == 0
        with pytest.raises(ShuttingDownError):
            drain.check_admitting()

    run(scenario())


def test_drain_cuts_what_runs_and_what_begins_later() -> None:
    async def scenario() -> None:
        drain = Drain()

        async def hold() -> None:
            with drain.open_request():
                await drain.until_cut(asyncio.Event().wait())

        held = asyncio.create_task(hold())
        await asyncio.sleep(0)
        assert drain.num_open == 1
        assert await drain.finish(timeout_s=0.01) == 1
        for work in (held, drain.until_cut(asyncio.Event().wait())):
            with pytest.raises(ShuttingDownError):
                await work

    run(scenario())


def test_while_connected() -> None:
    async def scenario() -> None:
        assert await while_connected(connected, value(4)) == 4
        with pytest.raises(ClientGoneError):
            await while_connected(disconnected, asyncio.Event().wait())
        with pytest.raises(ZeroDivisionError):
            await while_connected(connected, fail())

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    run(scenario())


def test_while_connected_cancels_the_work_and_what_is_beside() -> None:
    ended: list[str] = []

    async def note(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with anyio.CancelScope(shield=True):  # closing may wait although the scope is cancelled
                await asyncio.sleep(0)
                ended.append(name)

    async def scenario() -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        waiting = asyncio.create_task(while_connected(receive, note("work"), beside=lambda: note("beside")))
        await asyncio.sleep(0.01)
        gone.set()
        with pytest.raises(ClientGoneError):
            await waiting
        assert sorted(ended) == ["beside", "work"]

    run(scenario())


def test_lasting_disconnect_tells_every_reader() -> None:
    messages: list[Message] = [{"type": "http.request"}, {"type": "http.disconnect"}]
    seen: list[str] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"] for _ in range(4)])

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent")

    run(LastingDisconnect(app)({"type": "http"}, receive, send))
    assert seen == ["http.request", "http.disconnect", "http.disconnect", "http.disconnect"]

"""Server-sent events: a response whose body is made while it is sent."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from spark_server.http.disconnect import while_connected
from spark_server.http.drain import Drain
from spark_server.http.errors import ClientGoneError

KEEP_ALIVE_S = 15.0  # proxies commonly close a connection that is silent for 30 or 60 s
KEEP_ALIVE_FRAME = b": keep-alive\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events
}


class EventStream(Response):
    """Sends frames as they come, comments while none come, and exactly one ending.

    frames         yields whole frames, the protocol's end mark included
    close          frees what the frames are made from; called once, however the response ends
    error_frames   makes the ending of a stream that failed
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        drain: Drain,
        error_frames: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._close = close
        self._drain = drain
        self._error_frames = error_frames
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._last_sent = time.monotonic()
            await self._drain.until_cut(
                while_connected(receive, self._send_frames(send), beside=lambda: self._keep_alive(send))
            )
        except ClientGoneError:
            return
        except Exception as error:  # the request's boundary: whatever went wrong, the stream gets its ending
            await send(_body(self._error_frames(error)))
        finally:
            with anyio.CancelScope(shield=True):
                await self._frames.aclose()
                await self._close()
        await send(_body(b"", more_body=False))

    async def _send_frames(self, send: Send) -> None:
        async for frame in self._frames:
            await send(_body(frame))
            self._last_sent = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            wait_s = self._last_sent + KEEP_ALIVE_S - time.monotonic()
            if wait_s > 0:
                await anyio.sleep(wait_s)
            else:
                await send(_body(KEEP_ALIVE_FRAME))
                self._last_sent = time.monotonic()


def _body(data: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more_body}

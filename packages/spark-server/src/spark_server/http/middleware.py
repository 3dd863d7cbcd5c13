"""What every request passes: its id, its place among the open requests, its body and disconnect, and the boundary for what nobody expected."""

import re
import uuid

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_server.http.drain import Drain
from spark_server.http.errors import error_response

DISCARD_TIMEOUT_S = 5.0
REQUEST_ID_HEADER = "x-request-id"
_USABLE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Gives each response an `x-request-id`: the client's own where it sent a usable one, else `req_<uuid>`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = sent if _USABLE_REQUEST_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class OpenRequests:
    """Counts requests until their response is sent, so that a stopping server waits for them."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._drain.open_request():
            await self._app(scope, receive, send)


class LastingDisconnect:
    """Repeats `http.disconnect` to every later reader; the server says it once, and a request has several readers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect: Message | None = None

        async def receive_lasting() -> Message:
            nonlocal disconnect
            if disconnect is not None:
                return disconnect
            message = await receive()
            if message["type"] == "http.disconnect":
                disconnect = message
            return message

        await self._app(scope, receive_lasting, send)


class UnreadBody:
    """Reads and drops what is left of a body before a refusal is sent.

    Who still sends does not read: if the connection closed on it, it would see a reset and never the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["type"] != "http"

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                with anyio.move_on_after(DISCARD_TIMEOUT_S):
                    while not is_read:
                        await receive_and_note()
            await send(message)

        await self._app(scope, receive_and_note, send_after_body)


class ErrorBoundary:
    """Turns an exception that no handler knows into a 500 of the common shape; the traceback goes to the log once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:  # the request's boundary
            if scope["type"] != "http":
                raise
            response = error_response(error)
            if not is_started:
                await response(scope, receive, send)

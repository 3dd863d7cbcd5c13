"""Reading a request's body within its limit."""

import asyncio
from concurrent.futures import Executor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from spark_server.http.errors import BodyTooLargeError, ClientGoneError
from spark_server.protocols.openai_body import OpenAiBody, decode_body

# Decoding this much JSON takes about a millisecond; more goes to the executor so that the event loop never blocks.
INLINE_BYTES = 256 * 1024

Body = TypeVar("Body", bound=OpenAiBody)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError (declared or counted) and ClientGoneError."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {max_bytes}")
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise BodyTooLargeError(f"the body has more bytes than the limit, {max_bytes}")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError("the client closed the connection while it sent the body") from None
    return b"".join(chunks)


async def decode_in_executor(data: bytes, kind: type[Body], executor: Executor) -> Body:
    """Like decode_body, with large bodies off the event loop."""
    if len(data) <= INLINE_BYTES:
        return decode_body(data, kind)
    return await asyncio.get_running_loop().run_in_executor(executor, decode_body, data, kind)

"""Reading a request's body within its limit."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from spark_server.http.errors import BodyTooLargeError, ClientGoneError
from spark_server.http.services import services_of
from spark_server.protocols.body import Body, decode_body

# Decoding this much JSON takes about a millisecond; more goes to the executor so that the event loop never blocks.
INLINE_BYTES = 256 * 1024


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


async def read_request(request: Request, kind: type[Body]) -> Body:
    """Read and decode the body of a request that makes work; its unknown keys are counted.

    Raises ShuttingDownError when the server drains, and what read_body and decode_body raise.
    """
    services = services_of(request)
    data = await services.drain.until_cut(read_body(request, services.config.max_body_bytes))
    services.drain.check_admitting()
    if len(data) <= INLINE_BYTES:
        body, unknown = decode_body(data, kind)
    else:
        loop = asyncio.get_running_loop()
        body, unknown = await loop.run_in_executor(services.executor, decode_body, data, kind)
    services.unknown_keys.count(request.scope["path"], unknown)
    return body

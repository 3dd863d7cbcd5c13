"""Noticing that a client went away.

Starlette cancels only the streams it sends itself, so whatever runs for a client runs in `while_connected`.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.types import Receive

from spark_server.http.errors import ClientGoneError

Result = TypeVar("Result")


async def while_connected(
    receive: Receive, work: Awaitable[Result], *, beside: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> Result:
    """Await `work` and cancel it when the client goes: raises ClientGoneError then.

    receive   the ASGI channel, with the body already read from it; nobody else may read it meanwhile
    beside    runs next to `work` and is cancelled with it

    The end of the response must be sent after this returned: the server reports a finished exchange as a disconnect.
    """
    results: list[Result] = []
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        if beside is not None:
            group.start_soon(beside)
        try:
            results.append(await work)
        except Exception as error:  # carried out of the group, which would wrap it into an ExceptionGroup
            errors.append(error)
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not results:
        raise ClientGoneError("the client closed the connection")
    return results[0]

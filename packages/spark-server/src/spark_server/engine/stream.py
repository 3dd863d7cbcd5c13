"""The outputs of one request on their way from the engine's connection to the endpoint that waits for them."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from spark_server.engine.frames import Output


class RequestStream:
    """An EngineStream. One task iterates; the connection pushes; both on one event loop.

    `abort` is called with the request id if the stream is closed before its end.
    """

    def __init__(self, request_id: int, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._outputs: deque[Output] = deque()
        self._error: Exception | None = None
        self._has_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: Output) -> None:
        self._outputs.append(output)
        self._has_ended = output.finish is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with this error, after the outputs that are here already."""
        self._error = error
        self._has_ended = True
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._has_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    async def aclose(self) -> None:
        """Forget what was not read; abort the request if it has not ended. Harmless after the end and twice."""
        self._outputs.clear()
        self._error = None
        if not self._has_ended:
            self._has_ended = True
            self._abort(self.request_id)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

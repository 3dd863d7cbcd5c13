"""Which requests are open, and their orderly end when the server stops. Used from one event loop."""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from spark_server.errors import ShuttingDownError

Result = TypeVar("Result")


class Drain:
    """First admits; then, once `finish` is called, refuses what is new, waits for what runs, and cuts what is left."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._is_cut = False
        self._num_open = 0
        self._idle = anyio.Event()
        self._cut_scopes: set[anyio.CancelScope] = set()

    @property
    def num_open(self) -> int:
        return self._num_open

    def check_admitting(self) -> None:
        if self.is_stopping:
            raise ShuttingDownError("the server is shutting down and takes no new requests")

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Counts a request as open, so that the server waits for it."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    async def until_cut(self, work: Awaitable[Result]) -> Result:
        """Await what may run until the shutdown time is over. Raises ShuttingDownError then."""
        with anyio.CancelScope() as scope:
            self._cut_scopes.add(scope)
            if self._is_cut:
                scope.cancel()
            try:
                return await work
            finally:
                self._cut_scopes.discard(scope)
        raise ShuttingDownError("the server shut down before the request was finished")

    async def finish(self, timeout_s: float, cut_timeout_s: float = 2.0) -> int:
        """Stop admission and return when no request is open; returns how many had to be cut.

        What still runs after timeout_s gets an error ending, for which it has cut_timeout_s: a client that does not read
        must not hold the server.
        """
        self.is_stopping = True
        if await self._wait_idle(timeout_s):
            return 0
        num_cut = self._num_open
        self._is_cut = True
        for scope in self._cut_scopes:
            scope.cancel()
        await self._wait_idle(cut_timeout_s)
        return num_cut

    async def _wait_idle(self, timeout_s: float) -> bool:
        with anyio.move_on_after(timeout_s):
            while self._num_open:
                self._idle = anyio.Event()
                await self._idle.wait()
        return not self._num_open

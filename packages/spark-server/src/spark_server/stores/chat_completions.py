"""Chat completions that were asked to be kept (`store`)."""

from collections import OrderedDict
from typing import Protocol

MAX_COMPLETIONS = 1000
MAX_BYTES = 64 << 20


class ChatCompletionStore(Protocol):
    """Whole answers as JSON, by their id."""

    async def put(self, completion_id: str, data: bytes) -> None: ...

    async def get(self, completion_id: str) -> bytes | None:
        """None: never kept, or dropped for newer ones."""


class MemoryChatCompletions:
    """Keeps the newest until the process ends. One event loop uses it."""

    def __init__(self, max_completions: int = MAX_COMPLETIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_completions = max_completions
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    async def put(self, completion_id: str, data: bytes) -> None:
        self._kept[completion_id] = data
        self._num_bytes += len(data)
        while len(self._kept) > self._max_completions or (self._num_bytes > self._max_bytes and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= len(dropped)

    async def get(self, completion_id: str) -> bytes | None:
        return self._kept.get(completion_id)

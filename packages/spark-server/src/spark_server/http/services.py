"""What the endpoints work with, put together once at the start."""

from collections.abc import Awaitable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar, cast

from starlette.requests import Request

from spark_server.config import HttpConfig
from spark_server.engine.client import EngineClient
from spark_server.http.disconnect import while_connected
from spark_server.http.drain import Drain
from spark_server.pipeline import Pipeline
from spark_server.protocols.body import UnknownKeys
from spark_server.stores.chat_completions import ChatCompletionStore, MemoryChatCompletions

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Services:
    """`started` is the Unix time of the start; it is what /v1/models gives as `created`."""

    config: HttpConfig
    engine: EngineClient
    pipeline: Pipeline
    executor: Executor
    drain: Drain
    started: int
    unknown_keys: UnknownKeys = field(default_factory=UnknownKeys)
    chat_completions: ChatCompletionStore = field(default_factory=MemoryChatCompletions)

    async def run(self, request: Request, work: Awaitable[Result]) -> Result:
        """Await `work` for a client. Raises ClientGoneError when it goes, ShuttingDownError when the drain is over."""
        return await self.drain.until_cut(while_connected(request.receive, work))


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)

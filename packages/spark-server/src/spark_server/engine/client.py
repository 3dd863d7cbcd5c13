"""What endpoints know of the engine. `EngineSupervisor` (supervisor.py) is the one that runs an engine process."""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from spark_server.engine.frames import EngineStats, Output, Ready, Submit

EngineState = Literal["starting", "ready", "restarting", "failed", "stopped"]


class EngineStream(Protocol):
    """The outputs of one request, in order, up to and with the one that has `finish`.

    Iterating raises EngineFailedError when the engine dies first. Closing (`aclose`) before the end aborts the request.
    """

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """Used from one event loop."""

    state: EngineState
    ready: Ready | None
    stats: EngineStats | None

    async def start(self) -> None:
        """Start the engine process and return when it is ready. Raises StartupError with the engine's own line."""

    def submit(self, request: Submit) -> EngineStream:
        """Raises NotReadyError unless state is "ready", and QueueFullError when --max-num-seqs requests run or wait.

        The request id is `new_request_id()`'s.
        """

    def new_request_id(self) -> int: ...

    def is_progressing(self) -> bool:
        """False when the engine is not ready, or has had work and finished no step for a minute."""

    async def close(self) -> None:
        """End the engine process; open streams raise EngineFailedError."""

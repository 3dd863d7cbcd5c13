"""The engine's loop: take commands, run a step, send what it brought. Sleeps without a step to run."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

from spark_server.engine.frames import Abort, EngineStats, StepFrame, Submit
from spark_server.scheduler.scheduler import Scheduler


class EngineLoop:
    """Drives a scheduler from a queue of commands that another thread fills.

    stats   the newest; any thread may read it
    """

    def __init__(
        self, scheduler: Scheduler, inbox: SimpleQueue[Submit | Abort], send: Callable[[StepFrame], None]
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._send = send
        self.stats: EngineStats = scheduler.stats()

    def run(self) -> NoReturn:
        """Raises what a step raises."""
        while True:
            self.iterate()

    def iterate(self) -> None:
        """Apply every command that is there, waiting for one if nothing runs; then run one step and send its frame."""
        if not self._scheduler.has_work:
            self._apply(self._inbox.get())
        while not self._inbox.empty():
            self._apply(self._inbox.get())
        outputs = self._scheduler.step()
        self.stats = self._scheduler.stats()
        self._send(StepFrame(outputs, self.stats))

    def _apply(self, command: Submit | Abort) -> None:
        if isinstance(command, Submit):
            self._scheduler.submit(command)
        else:
            self._scheduler.abort(command.request_id)

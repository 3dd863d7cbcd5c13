"""The engine process: `python -m spark_server.engine.process --fd N`, started by the HTTP process only.

Its first frame from the parent is the EngineConfig; then come requests. It ends with code 0 at Stop or when the parent
is gone, with code 1 after a Fatal frame. Signals of the terminal and of service managers are the parent's business.
"""

import argparse
import gc
import os
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue
from typing import NoReturn

from spark_kernels.errors import SparkError
from spark_server import logs
from spark_server.config import EngineConfig
from spark_server.engine.frames import Abort, Fatal, FromEngine, Progress, Ready, StepFrame, Stop, Submit
from spark_server.engine.loading import MODEL_RUNNER, find_factory
from spark_server.engine.loop import EngineLoop
from spark_server.engine.transport import FrameError, FrameSender, decode_config, decode_to_engine, read_bodies
from spark_server.scheduler.scheduler import Scheduler

# A parent that does not read its socket for this long does not get the Fatal frame; it sees the end of the process.
_FLUSH_S = 1.0

_log = logs.get_logger()


class EngineProcess:
    """The process's threads around the loop: one reads commands, one writes what the socket did not take at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._bodies = read_bodies(connection)
        self._inbox: SimpleQueue[Submit | Abort] = SimpleQueue()
        self._loop: EngineLoop | None = None
        self._sender = FrameSender(connection, self._heartbeat)

    def run(self, runner: str) -> NoReturn:
        """Load and serve; returns never, the process ends here or in the reader's thread."""
        try:
            body = next(self._bodies, None)
            if body is None:
                os._exit(0)
            config = decode_config(body)
            logs.configure(config.log_level)
            logs.bind_process(process="engine")
            threading.Thread(target=self._read_commands, name="frame-reader", daemon=True).start()
            self._load(config, runner).run()
        # The worker loop's boundary: whatever failed, the parent gets one line, the log the traceback, and this
        # process ends, because a device that failed once cannot be trusted with the next request.
        except Exception as error:
            self._fail(error)

    def _load(self, config: EngineConfig, runner: str) -> EngineLoop:
        started = time.monotonic()
        loaded = find_factory(runner)(config, lambda message: self._sender.send(Progress(message)))
        scheduler = Scheduler(config.scheduler, loaded.runner)
        if scheduler.context < config.scheduler.max_model_len:
            self._sender.send(
                Progress(
                    f"KV cache holds {scheduler.context} tokens, less than --max-seq-len"
                    f" {config.scheduler.max_model_len}: that is the context now"
                )
            )
        self._loop = EngineLoop(scheduler, self._inbox, self._sender.send)
        # What loading made lives as long as the process: keep it out of every later collection.
        gc.collect()
        gc.freeze()
        self._sender.send(
            Ready(
                num_blocks=loaded.runner.num_blocks,
                block_size=loaded.runner.block_size,
                max_model_len=scheduler.context,
                vocab_size=loaded.vocab_size,
                load_seconds=time.monotonic() - started,
                memory_bytes=loaded.memory_bytes,
            )
        )
        return self._loop

    def _read_commands(self) -> None:
        try:
            for body in self._bodies:
                command = decode_to_engine(body)
                if isinstance(command, Stop):
                    break
                self._inbox.put(command)
        except FrameError as error:
            self._fail(error)
        # Also in the middle of a step, which may take long: nobody waits for its tokens.
        os._exit(0)

    def _heartbeat(self) -> FromEngine | None:
        return StepFrame([], self._loop.stats) if self._loop is not None else None

    def _fail(self, error: Exception) -> NoReturn:
        # An error of ours while loading is explained by its line, which the parent shows.
        if self._loop is not None or not isinstance(error, SparkError):
            _log.error("engine failed", exc_info=error)
        self._sender.send(Fatal(one_line(error)))
        self._sender.flush(_FLUSH_S)
        sys.stderr.flush()
        # Not sys.exit: finalizers of a device that failed can hang.
        os._exit(1)


def one_line(error: Exception) -> str:
    """The message for the operator. An error that is not ours needs its type to make sense."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, SparkError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="spark-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    parser.add_argument("--runner", default=MODEL_RUNNER, help="module:function that loads the model")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=arguments.fd)
    # A process that the engine starts must not keep the socket open after the engine's death.
    connection.set_inheritable(False)
    EngineProcess(connection).run(arguments.runner)


if __name__ == "__main__":
    main()

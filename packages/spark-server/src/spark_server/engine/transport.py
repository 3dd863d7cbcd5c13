"""Frames on the socket pair between the HTTP process and the engine process: cutting, coding and sending. No torch.

A frame is a 4-byte little-endian length and a msgpack body. The parent's first frame is the EngineConfig, all others
are the unions of frames.py.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from spark_server.config import EngineConfig
from spark_server.engine.frames import FromEngine, ToEngine
from spark_server.errors import ServerError

# Far above any frame that is sent: a prompt of a million tokens takes 5 MB. A length beyond it is a broken stream.
MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(cast("type[ToEngine]", ToEngine))
_from_engine = msgspec.msgpack.Decoder(cast("type[FromEngine]", FromEngine))


class FrameError(ServerError):
    """The other process sent what is no frame. Nothing after it can be understood."""


class FrameSplitter:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises FrameError for a length beyond MAX_FRAME_BYTES."""
        self._buffer += data
        bodies = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
            end = position + _LENGTH.size + length
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[position + _LENGTH.size : end]))
            position = end
        del self._buffer[:position]
        return bodies


def encode_frame(frame: ToEngine | FromEngine) -> bytes:
    return _with_length(_encoder.encode(frame))


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises FrameError."""
    return cast("ToEngine", _decode(_to_engine, body))


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises FrameError."""
    return cast("FromEngine", _decode(_from_engine, body))


def encode_config(config: EngineConfig) -> bytes:
    """The first frame. Dataclasses travel as maps, paths as strings."""
    return _with_length(_encoder.encode(msgspec.to_builtins(config, enc_hook=_path_to_str)))


def decode_config(body: bytes) -> EngineConfig:
    """Raises FrameError."""
    try:
        return msgspec.convert(msgspec.msgpack.decode(body), EngineConfig, dec_hook=_path_from_str)
    except msgspec.MsgspecError as error:
        raise FrameError(f"first frame is no EngineConfig: {error}") from error


def read_bodies(connection: socket.socket) -> Iterator[bytes]:
    """Frame bodies as they come, blocking, until the other side is gone. Raises FrameError."""
    splitter = FrameSplitter()
    while True:
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        yield from splitter.feed(data)


class FrameSender:
    """Sends frames from the engine's loop without ever waiting for a slow reader.

    A frame goes straight into the socket while there is room; what does not fit is kept and written by a thread, in
    order. The same thread sends `heartbeat`'s frame when nothing was sent for half an interval, so that at least one
    frame leaves in each `interval_s`, also while one step takes long. `heartbeat` may give None: nothing to say yet.
    """

    def __init__(
        self,
        connection: socket.socket,
        heartbeat: Callable[[], FromEngine | None] = lambda: None,
        interval_s: float = 1.0,
    ) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        self._pause_s = interval_s / 2
        self._condition = threading.Condition()
        self._backlog = bytearray()
        self._is_writing = False
        self._is_broken = False
        self._last_sent = time.monotonic()
        threading.Thread(target=self._write_backlog, name="frame-writer", daemon=True).start()

    def send(self, frame: FromEngine) -> None:
        """Frames to a parent that is gone are dropped: the reader notices and ends the process."""
        data = encode_frame(frame)
        with self._condition:
            self._last_sent = time.monotonic()
            if not self._backlog and not self._is_writing:
                data = data[self._send_now(data) :]
            if data and not self._is_broken:
                self._backlog += data
                self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is in the socket. False if it is not after `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._backlog and not self._is_writing, timeout_s)

    def _send_now(self, data: bytes) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._is_broken = True
            return len(data)

    def _write_backlog(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._backlog), self._pause_s)
                data = bytes(self._backlog)
                self._backlog.clear()
                self._is_writing = bool(data)
                if not data:
                    self._beat()
            if data:
                self._write(data)

    def _beat(self) -> None:
        """Send a heartbeat if it is time. The lock is held: a newer frame of the loop cannot come before it."""
        if time.monotonic() - self._last_sent >= self._pause_s and (frame := self._heartbeat()) is not None:
            self.send(frame)

    def _write(self, data: bytes) -> None:
        is_broken = False
        try:
            self._connection.sendall(data)
        except OSError:
            is_broken = True
        with self._condition:
            self._is_writing = False
            self._is_broken = self._is_broken or is_broken
            if self._is_broken:
                self._backlog.clear()
            self._condition.notify_all()


def _with_length(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"frame of {len(body)} bytes is not one of ours: {error}") from error


def _path_to_str(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"an EngineConfig holds a {type(value).__name__}, which cannot be sent")


def _path_from_str(wanted: type, value: Any) -> Any:
    if wanted is Path:
        return Path(value)
    raise NotImplementedError(f"an EngineConfig wants a {wanted.__name__}, which cannot be received")

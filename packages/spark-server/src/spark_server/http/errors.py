"""The one table from exception classes to HTTP status, error type and code, and the two ways an error is sent.

Endpoints raise; they build no error bodies. Before the first byte an error is a JSON response; in a running stream it is
a data frame with the same envelope. Protocols with another envelope read the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from spark_kernels.errors import SparkError
from spark_model.errors import TemplateError
from spark_server import logs
from spark_server.errors import (
    EngineFailedError,
    InvalidRequestError,
    ModelNameError,
    NotFoundError,
    NotReadyError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
    ShuttingDownError,
)

logger = logs.get_logger()


class BodyTooLargeError(ServerError):
    """The request's body is over the limit; the message has both sizes where both are known."""


class ClientGoneError(ServerError):
    """The client closed its connection. Nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one kind of error looks outside. `retry_after_s` becomes the Retry-After header."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


# The first row whose class fits counts, so children stand before their parents.
ERRORS: Mapping[type[Exception], ErrorRow] = {
    PromptTooLongError: ErrorRow(400, "invalid_request_error", "context_length_exceeded"),
    InvalidRequestError: ErrorRow(400, "invalid_request_error", None),  # the error brings its own code
    TemplateError: ErrorRow(400, "invalid_request_error", "chat_template_error"),
    ModelNameError: ErrorRow(404, "not_found_error", "model_not_found"),
    NotFoundError: ErrorRow(404, "not_found_error", "not_found"),
    BodyTooLargeError: ErrorRow(413, "invalid_request_error", "request_too_large"),
    QueueFullError: ErrorRow(429, "rate_limit_exceeded", "queue_full", retry_after_s=1),
    ShuttingDownError: ErrorRow(503, "server_error", "shutting_down", retry_after_s=5),
    NotReadyError: ErrorRow(503, "server_error", "model_not_loaded", retry_after_s=5),
    EngineFailedError: ErrorRow(503, "server_error", "engine_failed", retry_after_s=5),
    RequestTimeoutError: ErrorRow(504, "server_error", "request_timeout"),
    SparkError: ErrorRow(500, "server_error", None),
    Exception: ErrorRow(500, "server_error", "internal_error"),
}

# What starlette's router raises; its exceptions are told apart by status.
ROUTING_ERRORS: Mapping[int, ErrorRow] = {
    404: ErrorRow(404, "not_found_error", "unknown_route"),
    405: ErrorRow(405, "invalid_request_error", "method_not_allowed"),
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


def find_row(error: Exception) -> ErrorRow:
    return next(row for kind, row in ERRORS.items() if isinstance(error, kind))


def describe_error(error: Exception) -> tuple[ErrorRow, ErrorEnvelope]:
    """The row and the envelope of an error. What is our fault is logged here, once, with its traceback."""
    row = find_row(error)
    message = str(error)
    if not isinstance(error, SparkError):
        logger.error("request failed", error=type(error).__name__, exc_info=error)
        message = "internal error; the server's log says more"
    elif row.status == 500:
        logger.error("request failed", error=type(error).__name__, message=message)
    param = error.param if isinstance(error, InvalidRequestError) else None
    code = (error.code if isinstance(error, InvalidRequestError) else None) or row.code
    return row, ErrorEnvelope(ErrorBody(message, row.type, param, code))


def error_response(error: Exception) -> Response:
    row, envelope = describe_error(error)
    headers = {} if row.retry_after_s is None else {"retry-after": str(row.retry_after_s)}
    return _response(row.status, envelope, headers)


def error_frames(error: Exception) -> bytes:
    """The end of an OpenAI stream that failed: the envelope as a data frame, then the end mark."""
    _, envelope = describe_error(error)
    return b"data: " + msgspec.json.encode(envelope) + b"\n\ndata: [DONE]\n\n"


async def answer_error(request: Request, error: Exception) -> Response | None:
    """Starlette's exception handler for what endpoints raise. None = nobody is there to read an answer."""
    return None if isinstance(error, ClientGoneError) else error_response(error)


async def answer_routing_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for unknown routes and methods."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    row = ROUTING_ERRORS.get(error.status_code, ErrorRow(error.status_code, "invalid_request_error", None))
    headers = dict(error.headers or {})
    message = error.detail
    if error.status_code == 404:
        message = f"unknown route {request.method} {request.url.path}"
    elif error.status_code == 405:
        headers = {"allow": ", ".join(sorted(headers.get("Allow", "").split(", ")))}
        message = f"{request.method} is not allowed on {request.url.path}; allowed: {headers['allow']}"
    return _response(row.status, ErrorEnvelope(ErrorBody(message, row.type, None, row.code)), headers)


def _response(status: int, envelope: ErrorEnvelope, headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(envelope), status, headers, media_type="application/json")

"""Errors of the server. http/errors.py maps each class to a status, a type and a code."""

from spark_kernels.errors import SparkError


class ServerError(SparkError):
    """The server cannot do what it was asked."""


class ConfigError(ServerError):
    """Options that are wrong or do not go together; the message lists every violation: what, why, fix."""


class StartupError(ServerError):
    """The server cannot start: port in use, no memory, engine failed to load."""


class InvalidRequestError(ServerError):
    """A request that the client has to change. `param` names the field, as in OpenAI's envelope."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(InvalidRequestError):
    """Prompt and context do not fit; the message has both numbers and the flag."""


class ModelNameError(ServerError):
    """The request names a model that is not served."""


class NotFoundError(ServerError):
    """There is no object of this id."""


class QueueFullError(ServerError):
    """More requests wait than --max-queue-depth allows."""


class ShuttingDownError(ServerError):
    """The server drains and admits nothing new."""


class NotReadyError(ServerError):
    """The engine is loading or restarting."""


class EngineFailedError(ServerError):
    """The engine process died while the request ran."""


class RequestTimeoutError(ServerError):
    """The request's time ran out before it produced anything."""

"""Decoding a request's body, whatever its protocol: what is wrong is named by its path, unknown keys are counted.

Agents send new keys every month, so an unknown one is no error; counting them shows which are worth honouring.
"""

from collections import Counter
from typing import TypeVar

import msgspec

from spark_server import logs
from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError, ModelNameError

logger = logs.get_logger()

MAX_COUNTED_KEYS = 1000  # different keys that are remembered; whoever invents keys fills no memory
MAX_KEY_CHARACTERS = 100

Body = TypeVar("Body", bound=msgspec.Struct)


class UnknownKeys:
    """How often each key came that its route does not know. One event loop and its executor use it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, route: str, keys: list[str]) -> None:
        for key in keys:
            name = f"{route}: {key[:MAX_KEY_CHARACTERS]}"
            if name not in self._counts:
                if len(self._counts) >= MAX_COUNTED_KEYS:
                    name = "others"
                else:
                    logger.info("unknown key ignored", route=route, key=key[:MAX_KEY_CHARACTERS])
            self._counts[name] += 1

    def counts(self) -> dict[str, int]:
        return dict(self._counts)


def decode_body(data: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The body and the keys of its object that `kind` does not have, nor names in a class variable `ignored`.

    Raises InvalidRequestError with the path of what is wrong.
    """
    if not data.strip():
        raise InvalidRequestError("the body is empty, expected a JSON object")
    try:
        body = msgspec.json.decode(data, type=kind)
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        path = path.removesuffix("`")
        param = path.removeprefix("$").removeprefix(".") or None
        message = f"{path or '$'}: {reason[:1].lower()}{reason[1:]}"
        raise InvalidRequestError(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body is not valid JSON for this server: it is nested too deeply") from None
    known = {*kind.__struct_encode_fields__, *getattr(kind, "ignored", ())}
    return body, [key for key in keys if key not in known]


def served_name(name: str | None, config: HttpConfig) -> str:
    """The name that the response carries. Raises ModelNameError for one that is not served."""
    if name is None:
        return config.served_model_names[0]
    if name not in config.served_model_names:
        served = ", ".join(f"`{served}`" for served in config.served_model_names)
        raise ModelNameError(f"the model `{name}` is not served here; served: {served}")
    return name


def check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    """Raises InvalidRequestError naming the field, the value and the bound. None passes."""
    if value is None:
        return
    if not value >= low:  # also for NaN
        raise InvalidRequestError(f"Invalid '{name}': {value} is below the minimum of {low}.", param=name)
    if high is not None and value > high:
        raise InvalidRequestError(f"Invalid '{name}': {value} is above the maximum of {high}.", param=name)

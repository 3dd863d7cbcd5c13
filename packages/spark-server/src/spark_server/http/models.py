"""GET /v1/models and /v1/models/{id}."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spark_server.http.services import Services, services_of
from spark_server.protocols.body import served_name


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "spark"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


async def list_models(request: Request) -> Response:
    services = services_of(request)
    cards = [_card(services, name) for name in services.config.served_model_names]
    return Response(msgspec.json.encode(ModelList(data=cards)), media_type="application/json")


async def retrieve_model(request: Request) -> Response:
    services = services_of(request)
    name = served_name(request.path_params["model"], services.config)
    return Response(msgspec.json.encode(_card(services, name)), media_type="application/json")


def _card(services: Services, name: str) -> ModelCard:
    """The engine may have found less room for a context than was asked for."""
    ready = services.engine.ready
    max_model_len = services.config.max_model_len
    if ready is not None:
        max_model_len = min(max_model_len, ready.max_model_len)
    return ModelCard(id=name, created=services.started, max_model_len=max_model_len)

"""GET /health (ready for requests?), /health/live (is the process there?) and / (does anything answer?)."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spark_server.http.services import Services, services_of

HealthStatus = Literal["ready", "loading", "restarting", "stalled", "failed", "stopping"]


class NotReady(msgspec.Struct, frozen=True):
    status: HealthStatus


class Health(msgspec.Struct, frozen=True):
    """Sequences and KV blocks are the engine's after its last step; `queued` is what it has not taken yet."""

    status: HealthStatus
    model: str
    max_model_len: int
    steps: int
    running: int
    waiting: int
    queued: int
    free_blocks: int
    total_blocks: int


def health_status(services: Services) -> HealthStatus:
    if services.drain.is_stopping:
        return "stopping"
    state = services.engine.state
    if state == "ready":
        return "ready" if services.engine.is_progressing() else "stalled"
    return "loading" if state == "starting" else "restarting" if state == "restarting" else "failed"


async def check_health(request: Request) -> Response:
    services = services_of(request)
    status = health_status(services)
    if status != "ready":
        return _json(503, NotReady(status))
    stats, ready, config = services.engine.stats, services.engine.ready, services.config
    num_blocks = ready.num_blocks if ready is not None else 0
    return _json(
        200,
        Health(
            status=status,
            model=config.served_model_names[0],
            max_model_len=config.max_model_len if ready is None else min(config.max_model_len, ready.max_model_len),
            steps=stats.steps if stats is not None else 0,
            running=stats.running if stats is not None else 0,
            waiting=stats.waiting if stats is not None else 0,
            queued=services.pipeline.num_waiting,
            free_blocks=stats.free_blocks if stats is not None else num_blocks,
            total_blocks=stats.total_blocks if stats is not None else num_blocks,
        ),
    )


class Live(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


async def check_live(request: Request) -> Response:
    return _json(200, Live())


class Root(msgspec.Struct, frozen=True):
    name: str
    model: str


async def show_root(request: Request) -> Response:
    """Clients probe the root before they send anything; any 200 tells them that a server is there."""
    return _json(200, Root("spark", services_of(request).config.served_model_names[0]))


def _json(status: int, value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

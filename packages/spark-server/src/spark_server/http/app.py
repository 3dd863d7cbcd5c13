"""The application: one table of routes, and what every request passes on its way to them."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from spark_kernels.errors import SparkError
from spark_server.http.chat import create_chat_completion, retrieve_chat_completion
from spark_server.http.completions import create_completion
from spark_server.http.errors import answer_error, answer_routing_error
from spark_server.http.health import check_health, check_live, show_root
from spark_server.http.middleware import (
    REQUEST_ID_HEADER,
    ErrorBoundary,
    LastingDisconnect,
    OpenRequests,
    RequestIds,
    UnreadBody,
)
from spark_server.http.models import list_models, retrieve_model
from spark_server.http.services import Services

# GET routes answer HEAD too.
ROUTES = [
    Route("/", show_root, methods=["GET"]),
    Route("/health", check_health, methods=["GET"]),
    Route("/health/live", check_live, methods=["GET"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/chat/completions/{completion_id}", retrieve_chat_completion, methods=["GET"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
]


def create_app(services: Services) -> Starlette:
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(RequestIds),
            Middleware(OpenRequests, drain=services.drain),
            Middleware(
                CORSMiddleware,
                allow_origins=["*"],
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER],
            ),
            Middleware(LastingDisconnect),
            Middleware(UnreadBody),
            Middleware(ErrorBoundary),
        ],
        exception_handlers={
            SparkError: answer_error,  # type: ignore[dict-item]  # None = no answer: starlette takes it, its types not
            HTTPException: answer_routing_error,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST is a second request; the path is right or it is unknown
    app.state.services = services
    return app

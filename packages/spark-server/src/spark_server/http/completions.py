"""POST /v1/completions."""

from starlette.requests import Request
from starlette.responses import Response

from spark_server.generation import close_generations, merge_deltas
from spark_server.http.body import read_request
from spark_server.http.errors import error_frames
from spark_server.http.services import Services, services_of
from spark_server.http.sse import EventStream
from spark_server.protocols.body import served_name
from spark_server.protocols.openai_body import includes_usage
from spark_server.protocols.openai_completions import (
    Completion,
    CompletionBody,
    lower_completion,
    raise_chunks,
    raise_completion,
)
from spark_server.protocols.openai_response import ResponseHead, create_head, encode_json


async def create_completion(request: Request) -> Response:
    services = services_of(request)
    body = await read_request(request, CompletionBody)
    head = create_head("cmpl", served_name(body.model, services.config))
    include_usage = includes_usage(body)
    if not body.stream:
        completion = await services.run(request, _complete(services, body, head))
        return Response(encode_json(completion), media_type="application/json")
    generations = await services.run(request, services.pipeline.start(lower_completion(body, services.config)))
    return EventStream(
        raise_chunks(head, merge_deltas(generations), include_usage=include_usage),
        close=lambda: close_generations(generations),
        drain=services.drain,
        error_frames=error_frames,
    )


async def _complete(services: Services, body: CompletionBody, head: ResponseHead) -> Completion:
    generations = await services.pipeline.start(lower_completion(body, services.config))
    try:
        return await raise_completion(head, merge_deltas(generations), len(generations))
    finally:
        await close_generations(generations)

"""POST /v1/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response

from spark_server.generation import close_generations
from spark_server.http.body import read_request
from spark_server.http.errors import error_frames
from spark_server.http.services import Services, services_of
from spark_server.http.sse import EventStream
from spark_server.protocols.body import served_name
from spark_server.protocols.openai_body import includes_usage
from spark_server.protocols.openai_chat import ChatBody, ChatCompletion, lower_chat, raise_chunks, raise_completion
from spark_server.protocols.openai_response import ResponseHead, create_head, encode_json


async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    body = await read_request(request, ChatBody)
    head = create_head("chatcmpl", served_name(body.model, services.config))
    include_usage = includes_usage(body)
    if not body.stream:
        completion = await services.run(request, _complete(services, body, head))
        return Response(encode_json(completion), media_type="application/json")
    generations = await services.run(request, services.pipeline.start([lower_chat(body, services.config)]))
    return EventStream(
        raise_chunks(head, generations[0].deltas(), include_usage=include_usage),
        close=lambda: close_generations(generations),
        drain=services.drain,
        error_frames=error_frames,
    )


async def _complete(services: Services, body: ChatBody, head: ResponseHead) -> ChatCompletion:
    generations = await services.pipeline.start([lower_chat(body, services.config)])
    try:
        return await raise_completion(head, generations[0].deltas())
    finally:
        await close_generations(generations)

"""POST /v1/completions."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from spark_server.generation import Generation, close_generations, merge_deltas
from spark_server.http.body import read_request
from spark_server.http.errors import error_frames
from spark_server.http.services import Services, services_of
from spark_server.http.sse import EventStream
from spark_server.protocols.body import served_name
from spark_server.protocols.openai_completion_request import (
    CompletionBody,
    CompletionShape,
    lower_completion,
    shape_completion,
)
from spark_server.protocols.openai_completion_response import (
    Completion,
    CompletionAnswer,
    collect_completion,
    stream_completion,
)
from spark_server.protocols.openai_response import ResponseHead, create_head, encode_json
from spark_server.request import GenerationRequest


async def create_completion(request: Request) -> Response:
    services = services_of(request)
    body = await read_request(request, CompletionBody)
    name = served_name(body.model, services.config)
    requests = lower_completion(body, services.config)
    shape = shape_completion(body)
    head = create_head("cmpl", name, services.config.system_fingerprint)
    if not body.stream:
        completion = await services.run(request, _complete(services, head, shape, requests))
        return Response(encode_json(completion), media_type="application/json")
    generations = await services.run(request, services.pipeline.start(requests))
    answer = CompletionAnswer(head, shape, _prompts(generations, shape), keeps=False)
    return EventStream(
        stream_completion(answer, merge_deltas(generations), include_usage=shape.include_usage),
        close=lambda: close_generations(generations),
        drain=services.drain,
        error_frames=error_frames,
    )


async def _complete(
    services: Services, head: ResponseHead, shape: CompletionShape, requests: Sequence[GenerationRequest]
) -> Completion:
    generations = await services.pipeline.start(requests)
    try:
        answer = CompletionAnswer(head, shape, _prompts(generations, shape))
        return await collect_completion(answer, merge_deltas(generations))
    finally:
        await close_generations(generations)


def _prompts(generations: Sequence[Generation], shape: CompletionShape) -> list[Sequence[int]]:
    return [generation.prompt_ids for generation in generations[:: shape.num_choices]]

"""POST /v1/chat/completions, and GET /v1/chat/completions/{id} for those that were stored."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from spark_server.errors import NotFoundError
from spark_server.generation import Generation, close_generations, merge_deltas
from spark_server.http.body import read_request
from spark_server.http.errors import error_frames
from spark_server.http.services import Services, services_of
from spark_server.http.sse import EventStream
from spark_server.protocols.body import served_name
from spark_server.protocols.openai_chat_request import ChatBody, ChatShape, lower_chat, shape_chat
from spark_server.protocols.openai_chat_response import ChatAnswer, ChatCompletion, collect_chat, stream_chat
from spark_server.protocols.openai_response import DONE_FRAME, ResponseHead, create_head, encode_json
from spark_server.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class _Job:
    """One request of this endpoint, read and lowered."""

    services: Services
    head: ResponseHead
    requests: Sequence[GenerationRequest]
    shape: ChatShape
    is_stored: bool


async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    body = await read_request(request, ChatBody)
    name = served_name(body.model, services.config)
    requests = lower_chat(body, services.config)
    head = create_head("chatcmpl", name, services.config.system_fingerprint)
    job = _Job(services, head, requests, shape_chat(body, requests[0]), bool(body.store))
    if not body.stream:
        completion = await services.run(request, _complete(job))
        return Response(encode_json(completion), media_type="application/json")
    generations = await services.run(request, services.pipeline.start(requests))
    return EventStream(
        _stream(job, generations),
        close=lambda: close_generations(generations),
        drain=services.drain,
        error_frames=error_frames,
    )


async def _complete(job: _Job) -> ChatCompletion:
    generations = await job.services.pipeline.start(job.requests)
    try:
        completion = await collect_chat(_answer(job, generations), merge_deltas(generations))
    finally:
        await close_generations(generations)
    if job.is_stored:
        await job.services.chat_completions.put(completion.id, encode_json(completion))
    return completion


async def _stream(job: _Job, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    """What is stored is stored before the end mark, so that a client that read it finds its answer."""
    answer = _answer(job, generations, keeps=job.is_stored)
    async for frame in stream_chat(answer, merge_deltas(generations), include_usage=job.shape.include_usage):
        if frame is DONE_FRAME and job.is_stored:
            await job.services.chat_completions.put(job.head.id, encode_json(answer.completion()))
        yield frame


def _answer(job: _Job, generations: Sequence[Generation], *, keeps: bool = True) -> ChatAnswer:
    return ChatAnswer(job.head, job.shape, generations[0].prompt_ids, len(generations), keeps=keeps)


async def retrieve_chat_completion(request: Request) -> Response:
    completion_id = request.path_params["completion_id"]
    data = await services_of(request).chat_completions.get(completion_id)
    if data is None:
        raise NotFoundError(f"there is no stored chat completion '{completion_id}'; send \"store\": true to keep one")
    return Response(data, media_type="application/json")

"""The real application on a fake engine: whole bodies, streams event by event, every kind of refusal."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from spark_server.engine.frames import Output
from spark_server.errors import EngineFailedError
from spark_server.http.testing import EOS, FakeEngine, Rig, Script, answer, create_rig

Response = Any  # httpx's or httpx2's, whichever starlette's client found

CHAT = {"messages": [{"role": "user", "content": "hi"}]}  # 20 bytes when rendered
CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def without_times(body: Any) -> Any:
    """The body, its usage without the times, which are numbers."""
    for name in ("ttft_ms", "generation_ms", "decode_tps"):
        assert body["usage"].pop(name) >= 0
    return body


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def error(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def client_of(rig: Rig) -> TestClient:
    return TestClient(rig.app, raise_server_exceptions=True)


def post(script: Script | None, url: str, body: Any, **config: Any) -> Response:
    with client_of(create_rig(FakeEngine(script), **config)) as client:
        return client.post(url, json=body)


def events_of(response: Response) -> list[Any]:
    """The data of each event; every frame is one `data:` line and a blank one."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [data if data == "[DONE]" else json.loads(data) for data in (frame[6:] for frame in frames)]


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_of(create_rig(FakeEngine(answer("Hé!")))) as client:
        yield client


def test_chat_completion(client: TestClient) -> None:
    response = client.post(CHAT_URL, json=CHAT)
    body = without_times(response.json())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert body == {
        "id": body["id"],
        "object": "chat.completion",
        "created": body["created"],
        "model": "tiny",
        "system_fingerprint": "fp_spark",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hé!", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage(20, 5),
    }
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)


def chat_chunks(first: dict[str, Any], *, with_usage: bool) -> list[Any]:
    def chunk(choices: list[Any], usage_value: Any = None) -> dict[str, Any]:
        names = ("id", "created", "object", "model", "system_fingerprint")
        head = {name: first[name] for name in names}
        return {**head, "choices": choices, **({"usage": usage_value} if with_usage else {})}

    def choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}

    chunks: list[Any] = [chunk([choice({"role": "assistant", "content": ""})])]
    chunks += [chunk([choice({"content": text})]) for text in "Hé!"]
    chunks += [chunk([choice({}, "stop")])]
    chunks += [chunk([], usage(20, 5))] if with_usage else []
    return [*chunks, "[DONE]"]


@pytest.mark.parametrize("with_usage", [True, False])
def test_chat_completion_stream(client: TestClient, with_usage: bool) -> None:
    asked = STREAM if with_usage else {"stream": True}
    events = events_of(client.post(CHAT_URL, json={**CHAT, **asked, "model": "tiny-alias"}))
    first = events[0]
    assert (first["object"], first["model"]) == ("chat.completion.chunk", "tiny-alias")
    assert first["system_fingerprint"] == "fp_spark"
    if with_usage:
        without_times(events[-2])
    assert events == chat_chunks(first, with_usage=with_usage)


def test_completion(client: TestClient) -> None:
    body = without_times(client.post(COMPLETION_URL, json={"prompt": ["a", "bc"], "model": "tiny"}).json())
    choice = {"text": "Hé!", "logprobs": None, "finish_reason": "stop"}
    assert body == {
        "id": body["id"],
        "object": "text_completion",
        "created": body["created"],
        "model": "tiny",
        "system_fingerprint": "fp_spark",
        "choices": [{**choice, "index": 0}, {**choice, "index": 1}],
        "usage": usage(3, 10),
    }
    assert body["id"].startswith("cmpl-")


def test_completion_stream(client: TestClient) -> None:
    events = events_of(client.post(COMPLETION_URL, json={"prompt": "a", **STREAM}))
    head = {name: events[0][name] for name in ("id", "object", "created", "model", "system_fingerprint")}
    choices = [{"text": text, "index": 0, "logprobs": None, "finish_reason": None} for text in "Hé!"]
    choices += [{"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    expected = [{**head, "choices": [choice], "usage": None} for choice in choices]
    without_times(events[-2])
    assert events == [*expected, {**head, "choices": [], "usage": usage(1, 5)}, "[DONE]"]


def test_completion_stream_of_several_prompts(client: TestClient) -> None:
    events = events_of(client.post(COMPLETION_URL, json={"prompt": ["a", "b", "c"], **STREAM}))
    texts = dict.fromkeys(range(3), "")
    reasons = []
    for event in events[:-2]:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (texts, reasons) == ({0: "Hé!", 1: "Hé!", 2: "Hé!"}, ["stop"] * 3)
    assert without_times(events[-2])["usage"] == usage(3, 15)


@pytest.mark.parametrize("finish", ["stop", "length", "timeout"])
@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("stop", [None, "naïve", ["☕ w", "zzz"]])
def test_streamed_equals_not_streamed(finish: Any, chunk: int, stop: Any) -> None:
    script = answer("a naïve ☕ wish", finish=finish, chunk=chunk)
    body = {**CHAT, "stop": stop}
    whole = post(script, CHAT_URL, body).json()
    events = events_of(post(script, CHAT_URL, {**body, **STREAM}))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-2])
    [choice] = whole["choices"]
    assert text == choice["message"]["content"]
    assert events[-3]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert without_times(events[-2])["usage"] == without_times(whole)["usage"]


NOT_READY = error("the model is not ready: the engine is starting", "server_error", "model_not_loaded")


@pytest.mark.parametrize("stream", [True, False])
def test_refused_while_loading(stream: bool) -> None:
    response = post(None, CHAT_URL, {**CHAT, "stream": stream}, ready=False)
    assert (response.status_code, response.json()) == (503, NOT_READY)
    assert response.headers["retry-after"] == "5"


@pytest.mark.parametrize("stream", [True, False])
def test_refused_prompt_too_long(stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 30}], "stream": stream}
    response = post(answer(""), CHAT_URL, body, max_model_len=48)
    message = "the prompt has 48 tokens, the context is 48 (--max-seq-len) and must hold one new token too"
    expected = error(message, "invalid_request_error", "context_length_exceeded", "messages")
    assert (response.status_code, response.json()) == (400, expected)


@pytest.mark.parametrize("stream", [True, False])
def test_refused_while_draining(stream: bool) -> None:
    rig = create_rig(FakeEngine(answer("")))
    rig.services.drain.is_stopping = True
    with client_of(rig) as client:
        response = client.post(CHAT_URL, json={**CHAT, "stream": stream})
        message = "the server is shutting down and takes no new requests"
        assert (response.status_code, response.json()) == (503, error(message, "server_error", "shutting_down"))
        assert response.headers["retry-after"] == "5"
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "stopping"})


def first_output(finish: Any, **fields: Any) -> Script:
    return lambda request: [Output(request.request_id, [], finish, **fields)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "status", "expected"),
    [
        (
            first_output("timeout"),
            504,
            error("the request's time ran out before it produced a token", "server_error", "request_timeout"),
        ),
        (first_output("error", error="no room for it"), 500, error("no room for it", "server_error", None)),
    ],
)
def test_failure_before_the_first_output(stream: bool, script: Script, status: int, expected: dict[str, Any]) -> None:
    response = post(script, CHAT_URL, {**CHAT, "stream": stream})
    assert (response.status_code, response.json()) == (status, expected)


@pytest.mark.parametrize("stream", [True, False])
def test_engine_dies_before_the_first_output(stream: bool) -> None:
    response = post(lambda _: [EngineFailedError("it died")], CHAT_URL, {**CHAT, "stream": stream})  # type: ignore[list-item]  # the fake raises it
    assert (response.status_code, response.json()) == (503, error("it died", "server_error", "engine_failed"))


def test_engine_dies_in_a_stream() -> None:
    def script(request: Any) -> Any:
        return [Output(request.request_id, [*b"a"]), EngineFailedError("it died")]

    events = events_of(post(script, CHAT_URL, {**CHAT, **STREAM}))
    assert [event["choices"][0]["delta"] for event in events[:2]] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    assert events[2:] == [error("it died", "server_error", "engine_failed"), "[DONE]"]


def test_unexpected_error_is_a_500_in_shape_and_logged_once() -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    with capture_logs() as lines:
        response = post(broken, CHAT_URL, CHAT)
    message = "internal error; the server's log says more"
    assert (response.status_code, response.json()) == (500, error(message, "server_error", "internal_error"))
    assert response.headers["x-request-id"].startswith("req_")
    assert [type(line["exc_info"]) for line in lines if line["log_level"] == "error"] == [ZeroDivisionError]


def test_unexpected_error_in_a_stream_ends_it() -> None:
    def broken(request: Any) -> Any:
        return [Output(request.request_id, []), Output(request.request_id, [99999])]

    events = events_of(post(broken, CHAT_URL, {**CHAT, **STREAM}))
    message = "internal error; the server's log says more"
    assert events[1:] == [error(message, "server_error", "internal_error"), "[DONE]"]


def test_template_refuses() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    response = post(answer(""), CHAT_URL, {"messages": messages})
    message = "the conversation must end with the user"
    expected = error(message, "invalid_request_error", "chat_template_error")
    assert (response.status_code, response.json()) == (400, expected)


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
def test_unknown_model(client: TestClient, url: str) -> None:
    response = client.post(url, json={**CHAT, "prompt": "x", "model": "gpt"})
    message = "the model `gpt` is not served here; served: `tiny`, `tiny-alias`"
    assert (response.status_code, response.json()) == (404, error(message, "not_found_error", "model_not_found"))


def test_wrong_field(client: TestClient) -> None:
    response = client.post(CHAT_URL, json={**CHAT, "temperature": 3})
    message = "Invalid 'temperature': 3.0 is above the maximum of 2."
    expected = error(message, "invalid_request_error", None, "temperature")
    assert (response.status_code, response.json()) == (400, expected)


def test_content_type_does_not_matter(client: TestClient) -> None:
    headers = {"content-type": "text/plain"}
    assert client.post(CHAT_URL, content=json.dumps(CHAT), headers=headers).status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
def test_body_too_large(chunked: bool) -> None:
    rig = create_rig(FakeEngine(answer("")), max_body_bytes=1000)
    padded = {**CHAT, "user": ""}
    room = 1000 - len(json.dumps(padded))
    with client_of(rig) as client:
        for extra, status in ((0, 200), (1, 413)):
            data = json.dumps({**padded, "user": "x" * (room + extra)}).encode()
            assert len(data) == 1000 + extra
            content = (data[start : start + 100] for start in range(0, len(data), 100)) if chunked else data
            response = client.post(CHAT_URL, content=content)
            assert response.status_code == status
    size = "more bytes than the limit, 1000" if chunked else "1001 bytes, the limit is 1000"
    assert response.json() == error(f"the body has {size}", "invalid_request_error", "request_too_large")


def test_models(client: TestClient) -> None:
    card = {"object": "model", "created": 1_700_000_000, "owned_by": "spark", "max_model_len": 4096}
    cards = [{"id": name, **card} for name in ("tiny", "tiny-alias")]
    assert client.get("/v1/models").json() == {"object": "list", "data": cards}
    assert client.get("/v1/models/tiny").json() == cards[0]
    response = client.get("/v1/models/org/unknown")
    message = "the model `org/unknown` is not served here; served: `tiny`, `tiny-alias`"
    assert (response.status_code, response.json()) == (404, error(message, "not_found_error", "model_not_found"))


def test_model_with_a_slash_and_less_context_than_asked() -> None:
    engine = FakeEngine()
    engine.max_model_len = 100
    with client_of(create_rig(engine, served_model_names=("org/model",))) as client:
        card = client.get("/v1/models/org/model").json()
        assert (card["id"], card["max_model_len"]) == ("org/model", 100)


def test_health() -> None:
    rig = create_rig(FakeEngine(), ready=False)
    with client_of(rig) as client:

        def health() -> tuple[int, Any]:
            response = client.get("/health")
            return response.status_code, response.json()

        assert health() == (503, {"status": "loading"})
        rig.engine.make_ready()
        blocks = {"free_blocks": 64, "total_blocks": 64}
        counts = {"steps": 7, "running": 0, "waiting": 0, "queued": 0}
        assert health() == (200, {"status": "ready", "model": "tiny", "max_model_len": 4096, **counts, **blocks})
        rig.engine.is_stalled = True
        assert health() == (503, {"status": "stalled"})
        rig.engine.fail()
        assert health() == (503, {"status": "restarting"})
        rig.engine.state = "failed"
        assert health() == (503, {"status": "failed"})
        live = client.get("/health/live")
        assert (live.status_code, live.json()) == (200, {"status": "ok"})


def test_unknown_route_and_method(client: TestClient) -> None:
    response = client.post("/v1/nothing?x=1", json={})
    message = "unknown route POST /v1/nothing"
    assert (response.status_code, response.json()) == (404, error(message, "not_found_error", "unknown_route"))
    assert client.post(CHAT_URL + "/", json=CHAT).status_code == 404
    response = client.delete("/v1/models")
    message = "DELETE is not allowed on /v1/models; allowed: GET, HEAD"
    expected = error(message, "invalid_request_error", "method_not_allowed")
    assert (response.status_code, response.json()) == (405, expected)
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/v1/models", "/v1/models/tiny"])
def test_get_and_head(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == client.head(path).status_code == 200


def test_request_ids(client: TestClient) -> None:
    assert client.get("/", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for unusable in ("", "x" * 129, "two words"):
        assert client.get("/", headers={"x-request-id": unusable}).headers["x-request-id"].startswith("req_")
    assert len({client.get(path).headers["x-request-id"] for path in ("/", "/nothing", "/")}) == 3


def test_cors(client: TestClient) -> None:
    origin = {"origin": "https://app.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = client.options(CHAT_URL, headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    for response in (client.get("/", headers=origin), client.get("/nothing", headers=origin)):
        assert response.headers["access-control-allow-origin"] == "*"
        assert response.headers["access-control-expose-headers"] == "x-request-id"


def test_stop_token_of_the_client(client: TestClient) -> None:
    engine = FakeEngine(answer("x"))
    with client_of(create_rig(engine)) as other:
        other.post(CHAT_URL, json={**CHAT, "stop_token_ids": [7], "ignore_eos": True})
        other.post(CHAT_URL, json={**CHAT, "stop_token_ids": [7]})
    assert [submit.stop_token_ids for submit in engine.submitted] == [[7], [7, EOS]]


def test_http_side_imports_no_torch() -> None:
    code = (
        "import sys, spark_server.http.server, spark_server.http.testing; "
        "print(sorted({'torch', 'cupy', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"

"""Whole answers of OpenAI's two generating endpoints, streamed and not, compared with files in golden/.

A file that is absent is written, and the test fails so that somebody looks at it. Ids, times and rates are replaced.
"""

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from spark_runtime.types import TokenLogprobs
from spark_server.answer_format import AnswerFormat, AnswerPlan
from spark_server.engine.frames import Output, Submit
from spark_server.errors import EngineFailedError
from spark_server.http.testing import EOS, FakeEngine, Rig, create_rig, create_text
from spark_server.request import AnswerDelta, GenerationRequest, ReasoningDelta, TextDelta, ToolCallDelta

GOLDEN = Path(__file__).parent / "golden"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}

THINK, CALL, ARGUMENTS, END = "\x01", "\x02", "\x03", "\x04"


class MarkParser:
    """Cuts `THINK reasoning THINK text CALL name ARGUMENTS arguments END`; every mark is one character."""

    def __init__(self) -> None:
        self.is_reasoning = False
        self._name: str | None = None
        self._is_call = False
        self._num_calls = 0

    def push(self, text: str) -> list[AnswerDelta]:
        return [delta for character in text for delta in self._read(character)]

    def finish(self) -> list[AnswerDelta]:
        return []

    def _read(self, character: str) -> Iterable[AnswerDelta]:
        if character == THINK:
            self.is_reasoning = not self.is_reasoning
        elif character == CALL:
            self._name, self._is_call = "", True
        elif character == ARGUMENTS:
            yield ToolCallDelta(self._num_calls, id=f"call_{self._num_calls}", name=self._name)
            self._name = None
        elif character == END:
            self._is_call = False
            self._num_calls += 1
        elif self._name is not None:
            self._name += character
        elif self._is_call:
            yield ToolCallDelta(self._num_calls, arguments=character)
        else:
            yield ReasoningDelta(character) if self.is_reasoning else TextDelta(character)


class MarkFormat(AnswerFormat):
    def plan(self, request: GenerationRequest, rendered: str) -> AnswerPlan:
        return AnswerPlan(MarkParser())


def logprobs_of(token_id: int, num: int) -> TokenLogprobs:
    """Made up, exact in binary: the likeliest tokens are those up to the token's own."""
    top = tuple((token_id - place, -0.5 - place) for place in range(num))
    return TokenLogprobs(token_id, -0.25, top)


@dataclass(frozen=True)
class Case:
    """fails: the engine dies after the first output that has tokens, or before any."""

    name: str
    url: str
    answer: str
    body: dict[str, Any]
    finish: str = "stop"
    fails: str = ""
    chunk: int = 3
    prompt_cached: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def play(self, request: Submit) -> list[Any]:
        if self.fails == "before":
            return [EngineFailedError("the engine process died (exit code -9)")]
        sampling, ids = request.sampling, [*self.answer.encode()][: request.max_tokens]
        finish = "length" if len(ids) == request.max_tokens else self.finish
        if finish == "stop":
            ids.append(EOS)
        prompt = [
            logprobs_of(token_id, sampling.num_prompt_logprobs)
            for token_id in request.token_ids[1:]
            if sampling.num_prompt_logprobs is not None
        ]
        outputs: list[Any] = [Output(request.request_id, [], prompt_logprobs=prompt, cached_tokens=self.prompt_cached)]
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            found = [
                logprobs_of(token_id, sampling.num_logprobs) for token_id in part if sampling.num_logprobs is not None
            ]
            outputs.append(Output(request.request_id, part, logprobs=found))
        if self.fails == "after":
            return [*outputs[:2], EngineFailedError("the engine process died (exit code -9)")]
        last = outputs.pop()
        stop_id = EOS if finish == "stop" else None
        return [*outputs, Output(last.request_id, last.token_ids, finish, stop_id, logprobs=last.logprobs)]  # type: ignore[arg-type]  # one of the reasons


TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALLED = f'Let me see.{CALL}look{ARGUMENTS}{{"at": "☕"}}{END}{CALL}go{ARGUMENTS}{{}}{END}'
ECHOED = {"metadata": {"a": "b"}, "service_tier": "auto"}
NAMED = {"type": "function", "function": {"name": "look"}}
GO = {"type": "function", "function": {"name": "go"}}
TURNS = [
    {"role": "developer", "content": "be short"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    {"role": "user", "content": "and?"},
]

CASES = [
    Case("chat_text", CHAT, "Hé ☕!", {"messages": [USER]}),
    Case("chat_turns", CHAT, "Done.", {"messages": TURNS, "tools": [TOOL]}, prompt_cached=16),
    Case("chat_length", CHAT, "Hé ☕!", {"messages": [USER], "max_completion_tokens": 4}),
    Case("chat_timeout", CHAT, "Hé", {"messages": [USER], "timeout": 60}, finish="timeout"),
    Case("chat_stop", CHAT, "one. two. three", {"messages": [USER], "stop": [" two", "zzz"]}),
    Case("chat_tools", CHAT, CALLED, {"messages": [USER], "tools": [TOOL, GO]}),
    Case("chat_only_tools", CHAT, CALLED[11:], {"messages": [USER], "tools": [TOOL, GO], "tool_choice": "required"}),
    Case("chat_named_tool", CHAT, CALLED[11:29], {"messages": [USER], "tools": [TOOL], "tool_choice": NAMED}),
    Case("chat_reasoning", CHAT, f"{THINK}hm, ☕{THINK}Yes.", {"messages": [USER]}),
    Case("chat_two_choices", CHAT, "Yes.", {"messages": [USER], "n": 2, **ECHOED}),
    Case("chat_logprobs", CHAT, "aé", {"messages": [USER], "logprobs": True, "top_logprobs": 2}, chunk=2),
    Case("chat_token_ids", CHAT, "abcd", {"messages": [USER], "return_token_ids": True}),
    Case("chat_error_before", CHAT, "x", {"messages": [USER]}, fails="before"),
    Case("chat_error_after", CHAT, "Hé ☕!", {"messages": [USER]}, fails="after"),
    Case("completion_text", COMPLETION, "Hé ☕!", {"prompt": "a"}),
    Case("completion_prompts", COMPLETION, "Yes.", {"prompt": ["a", "bcd"], "n": 2, "return_token_ids": True}),
    Case("completion_length", COMPLETION, "Hé ☕!", {"prompt": [104, 105], "max_tokens": 4}),
    Case("completion_stop", COMPLETION, "one. two. three", {"prompt": "a", "stop": " two"}),
    Case("completion_logprobs", COMPLETION, "aé", {"prompt": "a", "logprobs": 1}, chunk=2),
    Case("completion_echo", COMPLETION, "aé", {"prompt": "é b", "logprobs": 0, "echo": True}, chunk=2),
    Case("completion_prompt_only", COMPLETION, "a", {"prompt": "é b", "logprobs": 1, "echo": True, "max_tokens": 0}),
    Case("completion_error_before", COMPLETION, "x", {"prompt": "a"}, fails="before"),
    Case("completion_error_after", COMPLETION, "Hé ☕!", {"prompt": "a"}, fails="after"),
]  # fmt: skip


def rig_of(case: Case) -> Rig:
    return create_rig(FakeEngine(case.play), text=create_text(answer_format=MarkFormat()), **case.config)


def neutral(text: str) -> str:
    text = re.sub(r"(chatcmpl|cmpl)-[0-9a-f]{32}", r"\1-ID", text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    return re.sub(r'"(ttft_ms|generation_ms|decode_tps)":[0-9.e+-]+', r'"\1":0', text)


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path.name}: written, look at it and commit it")
    assert text == path.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answer(case: Case) -> None:
    with TestClient(rig_of(case).app) as client:
        response = client.post(case.url, json=case.body)
    body = json.dumps(json.loads(neutral(response.text)), indent=1, ensure_ascii=False)
    compare(f"openai_{case.name}.json", f"{response.status_code}\n{body}\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stream(case: Case) -> None:
    with TestClient(rig_of(case).app) as client:
        response = client.post(case.url, json={**case.body, "stream": True, "stream_options": {"include_usage": True}})
    compare(f"openai_{case.name}.sse", f"{response.status_code}\n{neutral(response.text)}")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("url", "body"), [(CHAT, {"messages": [USER]}), (COMPLETION, {"prompt": "a"})])
def test_client_gone(url: str, body: dict[str, Any], stream: bool) -> None:
    """The client reads what the first output makes, and goes. Nothing more is sent, and the engine is told."""
    engine = FakeEngine()
    sent = asyncio.run(leave_early(create_rig(engine), engine, url, {**body, "stream": stream}))
    assert engine.aborted == [1]
    name = "chat" if url == CHAT else "completion"
    if stream:
        compare(f"openai_{name}_gone.sse", neutral(sent))
    else:
        assert sent == ""


async def leave_early(rig: Rig, engine: FakeEngine, url: str, body: dict[str, Any]) -> str:
    parts: list[bytes] = []
    is_going = asyncio.Event()
    request = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    incoming = [request]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await is_going.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if b"first" in parts[-1]:
            is_going.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
    }
    running = asyncio.create_task(rig.app(scope, receive, send))
    await engine.wait_until(lambda: bool(engine.running))
    engine.running[1].emit("first")
    if not body["stream"]:
        is_going.set()
    async with asyncio.timeout(5):
        await running
    return b"".join(parts).decode()


def test_every_golden_file_has_its_case() -> None:
    names = {f"openai_{case.name}.{kind}" for case in CASES for kind in ("json", "sse")}
    names |= {"openai_chat_gone.sse", "openai_completion_gone.sse"}
    assert {path.name for path in GOLDEN.glob("openai_c*")} == names


@pytest.mark.parametrize("case", [case for case in CASES if not case.fails], ids=lambda case: case.name)
def test_streamed_equals_not_streamed(case: Case) -> None:
    """The chunks joined, field by field, say what the whole answer says."""
    whole = json.loads((GOLDEN / f"openai_{case.name}.json").read_text().partition("\n")[2])
    frames = (GOLDEN / f"openai_{case.name}.sse").read_text().partition("\n")[2].split("\n\n")
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames if frame and "[DONE]" not in frame]
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [piece for event in events for piece in event["choices"] if piece["index"] == choice["index"]]
        said = choice.get("message", choice)
        deltas = [piece.get("delta", piece) for piece in pieces]
        for name in ("content", "reasoning_content", "text"):
            if name in said:
                assert "".join(delta.get(name) or "" for delta in deltas) == (said[name] or "")
        for name in ("content", "tokens", "text_offset"):
            if choice["logprobs"] is not None and name in choice["logprobs"]:
                joined = [item for piece in pieces if piece["logprobs"] for item in piece["logprobs"][name]]
                assert joined == choice["logprobs"][name]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]

"""What answers carry besides text: log probabilities, usage while it streams, stored answers."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from spark_server.engine.frames import Output
from spark_server.errors import EngineFailedError
from spark_server.http.testing import ByteTokenizer, FakeEngine, Script, answer, create_rig, create_text
from spark_server.protocols.openai_logprobs import LegacyWriter, chat_logprobs, join_legacy, shown_tokens
from spark_server.protocols.openai_response import UsageMeter
from spark_server.request import Ending, PromptDelta, Token
from spark_server.stores.chat_completions import MemoryChatCompletions

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_chat_logprobs_escape_what_is_no_character_and_keep_the_bytes() -> None:
    token = Token(1, b" \xf0\x9f", -0.5, ((1, b" \xf0\x9f", -0.5), (2, "é".encode(), -1.0)))
    [written] = chat_logprobs([token]).content
    assert (written.token, written.bytes, written.logprob) == (" \\xf0\\x9f", [32, 0xF0, 0x9F], -0.5)
    assert [(top.token, top.bytes) for top in written.top_logprobs] == [
        (" \\xf0\\x9f", [32, 0xF0, 0x9F]),
        ("é", [0xC3, 0xA9]),
    ]


def test_legacy_logprobs_have_the_token_among_the_likeliest() -> None:
    top = ((1, b"x", -0.1), (2, b"x", -0.2), (3, b"\xff", -0.3))
    written = LegacyWriter().write([Token(9, b"y", -2.0, top), Token(1, b"x", -0.1, top[:1])])
    assert written.top_logprobs == [{"x": -0.1, "bytes:\\xff": -0.3, "y": -2.0}, {"x": -0.1}]
    assert (written.tokens, written.token_logprobs, written.text_offset) == (["y", "x"], [-2.0, -0.1], [0, 1])


def test_legacy_offsets_count_what_the_text_shows() -> None:
    """A BOS and the space that a tokenizer puts in front are no text; the answer goes on where the prompt ends."""
    writer = LegacyWriter()
    tokens = (Token(0, b"<s>"), Token(1, b" caf"), Token(2, b"\xc3"), Token(3, b"\xa9"))
    prompt = writer.write_prompt(PromptDelta("café", tokens))
    rest = writer.write([Token(4, b" x"), Token(5, b"y")])
    assert join_legacy([prompt, rest]).text_offset == [0, 0, 3, 3, 4, 6]


def test_shown_tokens_leaves_out_the_stop_token_only() -> None:
    tokens = (Token(1, b"a"), Token(2, b"<eos>"))
    assert shown_tokens(Ending("stop", 1, 2, stop_token_id=2, tokens=tokens)) == tokens[:1]
    assert shown_tokens(Ending("length", 1, 2, tokens=tokens)) == tokens


def test_usage_counts_prompts_once_and_choices_all() -> None:
    meter = UsageMeter([10, 20], num_choices=2)
    for index, (tokens, cached, ttft_s, generation_s) in enumerate(
        [(1, 4, 0.5, 1.0), (2, 4, 0.25, 2.25), (3, 8, 0.0, 0.5), (4, 8, 1.0, 2.0)]
    ):
        ending = Ending("stop", 0, tokens, cached_tokens=cached, reasoning_tokens=1, ttft_s=ttft_s)
        meter.push(index, Ending(**{**fields_of(ending), "generation_s": generation_s}))
    usage = meter.total()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 10, 40)
    assert usage.prompt_tokens_details.cached_tokens == 12
    assert usage.completion_tokens_details.reasoning_tokens == 4
    assert (usage.ttft_ms, usage.generation_ms, usage.decode_tps) == (250.0, 2250.0, 5.0)


def fields_of(ending: Ending) -> dict[str, Any]:
    return {name: getattr(ending, name) for name in ending.__dataclass_fields__}


def test_usage_of_an_answer_without_decoding_time_is_finite() -> None:
    meter = UsageMeter([1], num_choices=1)
    meter.push(0, Ending("length", 1, 1, ttft_s=0.5, generation_s=0.5))
    assert meter.total().decode_tps == 1000.0


def events_of(text: str) -> list[Any]:
    return [json.loads(frame[6:]) for frame in text.split("\n\n") if frame and frame != "data: [DONE]"]


@pytest.mark.parametrize(("url", "body"), [(URL, BODY), ("/v1/completions", {"prompt": "abc"})])
def test_continuous_usage_counts_up(url: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with TestClient(create_rig(FakeEngine(answer("abc"))).app) as client:
        text = client.post(url, json={**body, "stream": True, "stream_options": options}).text
    counts = [event["usage"]["completion_tokens"] for event in events_of(text)]
    assert counts == ([0] if url == URL else []) + [1, 2, 3, 4, 4]
    assert {event["usage"]["prompt_tokens"] for event in events_of(text)} == {20 if url == URL else 3}
    assert "token_ids" not in text


def test_token_ids_join_to_what_was_made() -> None:
    with TestClient(create_rig(FakeEngine(answer("Hé☕", chunk=2))).app) as client:
        whole = client.post(URL, json={**BODY, "return_token_ids": True, "stop": "zzz"}).json()
        streamed = client.post(URL, json={**BODY, "return_token_ids": True, "stop": "zzz", "stream": True}).text
    ids = [token_id for event in events_of(streamed) for token_id in event["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"] == [*"Hé☕".encode(), 256]
    assert len(ids) == whole["usage"]["completion_tokens"]
    assert bytes(whole["prompt_token_ids"]) == b"user: hi\nassistant: "


@pytest.mark.parametrize("stream", [True, False])
def test_stored_answer_is_retrieved(stream: bool) -> None:
    body = {**BODY, "metadata": {"purpose": "test"}, "n": 2}
    with TestClient(create_rig(FakeEngine(answer("Hé!"))).app) as client:
        for store in (True, False):
            response = client.post(URL, json={**body, "stream": stream, "store": store})
            first = events_of(response.text)[0] if stream else response.json()
            found = client.get(f"{URL}/{first['id']}")
            assert found.status_code == (200 if store else 404)
            if not store:
                assert found.json()["error"]["code"] == "not_found"
                continue
            kept = found.json()
            assert stream or kept == first
            assert kept["metadata"] == {"purpose": "test"}
            assert [choice["message"]["content"] for choice in kept["choices"]] == ["Hé!", "Hé!"]


def test_failed_stream_is_not_stored() -> None:
    script: Script = lambda request: [Output(request.request_id, [97]), EngineFailedError("it died")]  # type: ignore[list-item]  # noqa: E731 - the fake raises it
    rig = create_rig(FakeEngine(script))
    with TestClient(rig.app) as client:
        first = events_of(client.post(URL, json={**BODY, "store": True, "stream": True}).text)[0]
        assert client.get(f"{URL}/{first['id']}").status_code == 404


async def keep(store: MemoryChatCompletions, sizes: Sequence[int]) -> list[bool]:
    for place, size in enumerate(sizes):
        await store.put(str(place), b"x" * size)
    return [await store.get(str(place)) is not None for place in range(len(sizes))]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([1, 1, 1], [True, True, True]),
        ([1, 1, 1, 1], [False, True, True, True]),
        ([5, 5, 1], [False, True, True]),
        ([5, 50], [False, True]),
    ],
)
def test_store_drops_the_oldest(sizes: list[int], kept: list[bool]) -> None:
    assert asyncio.run(keep(MemoryChatCompletions(max_completions=3, max_bytes=10), sizes)) == kept


class WordTokenizer(ByteTokenizer):
    """ "a\\n" is one id, as in vocabularies with words."""

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return [200] if text == "a\n" else super().encode(text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ()),
        ({"dry_sequence_breakers": ["\n"]}, ()),
        ({"dry_multiplier": 0.5, "dry_sequence_breakers": []}, ()),
        ({"dry_multiplier": 0.5, "dry_sequence_breakers": ["\n", "xy"]}, (10, ord("y"), 200)),
        ({"dry_multiplier": 0.5}, (10, ord('"'), ord("*"), ord(":"), 200)),
    ],
)
def test_dry_breakers_become_ids(fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    engine = FakeEngine(answer("x"))
    with TestClient(create_rig(engine, text=create_text(WordTokenizer())).app) as client:
        assert client.post(URL, json={**BODY, **fields}).status_code == 200
    assert tuple(engine.submitted[0].sampling.dry_breakers) == tuple(sorted(expected))

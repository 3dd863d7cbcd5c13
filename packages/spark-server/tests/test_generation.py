"""Stop strings, detokenising and the way from an internal request to its ending."""

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from spark_runtime.types import SamplingParams
from spark_server.engine.frames import Output, Submit
from spark_server.errors import (
    EngineFailedError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
)
from spark_server.generation import Generation, merge_deltas
from spark_server.http.testing import (
    EOS,
    VOCAB_SIZE,
    ByteTokenizer,
    FakeEngine,
    Script,
    answer,
    create_rig,
    create_text,
)
from spark_server.pipeline import INLINE_CHARACTERS
from spark_server.request import (
    ChatPrompt,
    Delta,
    Ending,
    GenerationRequest,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)
from spark_server.stop_strings import StopMatcher

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    async def limited() -> Result:
        async with asyncio.timeout(10):
            return await work

    return asyncio.run(limited())


def create_request(**changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "prompt": TextPrompt("prompt"),
        "sampling": SamplingParams(temperature=0.5, top_p=0.8, top_k=3, min_p=0.1, seed=42),
        "max_tokens": 100,
        "stop_strings": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "min_tokens": 0,
        "timeout_s": 0.0,
        "received": time.monotonic(),
    }
    return GenerationRequest(**{**fields, **changes})


async def collect(engine: FakeEngine, **changes: Any) -> tuple[str, Ending]:
    """The text and the ending of one request; checks the shape of the deltas."""
    [generation] = await create_rig(engine).services.pipeline.start([create_request(**changes)])
    deltas = [delta async for delta in generation.deltas()]
    *texts, ending = deltas
    assert isinstance(ending, Ending)
    assert 0.0 <= ending.ttft_s <= ending.generation_s
    ending = replace(ending, ttft_s=0.0, generation_s=0.0)
    shown = [delta.text for delta in texts if isinstance(delta, TextDelta)]
    assert len(shown) == len(texts)
    assert all(shown), "an empty delta says nothing"
    return "".join(shown), ending


def submit_of(**changes: Any) -> Submit:
    engine = FakeEngine(answer(""))
    run(collect(engine, **changes))
    return engine.submitted[0]


STOP_CASES = [
    # text, stop strings, what is shown, which stop
    ("hello world", [], "hello world", None),
    ("hello world", ["world"], "hello ", "world"),
    ("hello world", ["xyz"], "hello world", None),
    ("hello world", ["hello world"], "", "hello world"),
    ("hello worl", ["world"], "hello worl", None),
    ("aaab", ["aab"], "a", "aab"),
    ("ababac!", ["abac"], "ab", "abac"),
    ("one STOP two END", ["END", "STOP"], "one ", "STOP"),
    ("abcd", ["abcd", "bc"], "a", "bc"),
    ("xabc", ["bc", "abc", "c"], "x", "abc"),
    ("naïve café ☕ done", ["café ☕"], "naïve ", "café ☕"),
    ("👩‍👩‍👧 family", ["‍👧"], "👩‍👩", "‍👧"),
    ("日本語の文章", ["の"], "日本語", "の"),
    ("line\n\nUser: hi", ["\n\nUser:", "\n\nAssistant:"], "line", "\n\nUser:"),
    ("line\n\nUse of", ["\n\nUser:"], "line\n\nUse of", None),
    ("xx", ["x"], "", "x"),
]


@pytest.mark.parametrize(("text", "stops", "shown", "stop"), STOP_CASES)
def test_stop_matcher_same_at_every_split(text: str, stops: Sequence[str], shown: str, stop: str | None) -> None:
    for cuts in itertools.combinations(range(len(text) + 1), 2):
        matcher = StopMatcher(stops)
        parts: list[str] = []
        found: str | None = None
        for piece in (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]):
            part, found = matcher.push(piece)
            parts.append(part)
            if found is not None:
                break
        if found is None:
            parts.append(matcher.finish())
        assert ("".join(parts), found) == (shown, stop), cuts


def test_stop_matcher_holds_back_no_more_than_a_prefix() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab") == ("x", None)
    assert matcher.push("d") == ("abd", None)
    assert matcher.push("ab") == ("", None)
    assert matcher.finish() == "ab"


@pytest.mark.parametrize(("text", "stops", "shown", "stop"), STOP_CASES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_deltas_stop_strings_across_tokens(
    text: str, stops: Sequence[str], shown: str, stop: str | None, chunk: int
) -> None:
    engine = FakeEngine(answer(text, chunk=chunk))
    result, ending = run(collect(engine, stop_strings=stops))
    assert result == shown
    tokens = len(text.encode()) + 1 if stop is None else len(text[: text.index(stop) + len(stop)].encode())
    assert ending == Ending("stop", 6, tokens, stop, stop_token_id=EOS if stop is None else None)
    assert engine.aborted == ([] if stop is None else [1])


def test_deltas_stop_string_wins_over_length_in_the_same_output() -> None:
    def play(request: Submit) -> list[Output]:
        return [Output(request.request_id, [*b"abSTOPcd"], "length")]

    engine = FakeEngine(play)
    assert run(collect(engine, stop_strings=["STOP"])) == ("ab", Ending("stop", 6, 6, "STOP"))


def test_deltas_stop_strings_are_looked_for_after_min_tokens() -> None:
    engine = FakeEngine(answer("a.b.c."))
    assert run(collect(engine, stop_strings=["."], min_tokens=3)) == ("a.b", Ending("stop", 6, 4, "."))


def test_deltas_half_a_character_at_the_end_is_shown_as_replaced() -> None:
    engine = FakeEngine(answer([*b"a", 0xE2, 0x98], finish="length"))
    assert run(collect(engine)) == ("a\ufffd", Ending("length", 6, 3))


def test_deltas_stop_token_is_counted_and_not_shown() -> None:
    engine = FakeEngine(
        lambda request: [Output(request.request_id, [*b"ab"]), Output(request.request_id, [*b"cx"], "stop", 120)]
    )
    assert run(collect(engine, stop_token_ids=[120])) == ("abc", Ending("stop", 6, 4, stop_token_id=120))
    assert engine.submitted[0].stop_token_ids == [120, EOS]


def test_deltas_timeout_keeps_what_was_made() -> None:
    engine = FakeEngine(answer("part", finish="timeout"))
    assert run(collect(engine)) == ("part", Ending("timeout", 6, 4))


def failing(output: Output | None) -> Script:
    def play(request: Submit) -> list[Output]:
        first = Output(request.request_id, [])
        return [first] if output is None else [first, output]

    return play


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        (Output(1, [], "timeout"), RequestTimeoutError, "ran out"),
        (Output(1, [], "error", error="no block for 9 tokens"), ServerError, "no block for 9 tokens"),
        (Output(1, [], "abort"), ServerError, "'abort'"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_deltas_failure(output: Output, kind: type[Exception], message: str, is_first: bool) -> None:
    engine = FakeEngine((lambda _: [output]) if is_first else failing(output))
    with pytest.raises(kind, match=message):
        run(collect(engine))


def test_deltas_engine_dies() -> None:
    async def scenario() -> list[Delta]:
        engine = FakeEngine()
        task = asyncio.create_task(create_rig(engine).services.pipeline.start([create_request()]))
        await engine.wait_until(lambda: bool(engine.running))
        engine.running[1].emit("ab")
        [generation] = await task
        deltas: list[Delta] = []
        engine.fail()
        with pytest.raises(EngineFailedError, match="died"):
            async for delta in generation.deltas():
                deltas.append(delta)  # what came before the failure is looked at
        return deltas

    assert run(scenario()) == [TextDelta("ab")]


def test_start_submits_what_was_asked() -> None:
    submit = submit_of()
    expected = Submit(1, [*b"prompt"], 100, SamplingParams(0.5, 0.8, 3, 0.1, 42), [EOS])
    assert submit == expected
    assert submit_of(ignore_eos=True).stop_token_ids == []
    assert submit_of(prompt=TokenPrompt([5, 6])).token_ids == [5, 6]
    chat = ChatPrompt([{"role": "user", "content": "hi"}], {"tone": "dry"})
    assert bytes(submit_of(prompt=chat).token_ids) == b"user: hi\ntone = dry\nassistant: "


def test_start_bounds_max_tokens() -> None:
    assert submit_of(max_tokens=None).max_tokens == 256
    assert submit_of(max_tokens=1_000_000).max_tokens == 256
    assert submit_of(max_tokens=None, prompt=TokenPrompt([1] * 4000)).max_tokens == 96
    assert submit_of(max_tokens=200, prompt=TokenPrompt([1] * 4000)).max_tokens == 96
    assert submit_of(max_tokens=9, min_tokens=9).min_tokens == 9
    assert submit_of(max_tokens=None, min_tokens=10**30).min_tokens == 256


def test_start_context_is_the_engine_s_when_smaller() -> None:
    engine = FakeEngine(answer(""))
    engine.max_model_len = 10
    run(collect(engine))
    assert engine.submitted[0].max_tokens == 4


def test_start_deadline_counts_from_the_arrival() -> None:
    assert 9.0 < submit_of(timeout_s=10.0, received=time.monotonic() - 0.5).deadline_s <= 9.5
    with pytest.raises(RequestTimeoutError):
        submit_of(timeout_s=1.0, received=time.monotonic() - 2.0)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"prompt": TextPrompt("x" * 4096)}, PromptTooLongError, "the prompt has 4096 tokens, the context is 4096"),
        ({"prompt": TextPrompt("")}, InvalidRequestError, "the prompt has no tokens"),
        ({"prompt": TokenPrompt([1, VOCAB_SIZE])}, InvalidRequestError, "prompt has token id 257"),
        ({"prompt": TokenPrompt([-1])}, InvalidRequestError, "prompt has token id -1"),
        ({"stop_token_ids": [999]}, InvalidRequestError, "stop_token_ids has token id 999"),
    ],
)
def test_start_refuses(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    engine = FakeEngine(answer(""))
    with pytest.raises(kind, match=message):
        run(collect(engine, **changes))
    assert engine.submitted == []


def test_start_without_chat_template() -> None:
    rig = create_rig(FakeEngine(answer("")), text=create_text(has_template=False))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        run(rig.services.pipeline.start([create_request(prompt=ChatPrompt([], {}))]))


def test_start_not_ready() -> None:
    rig = create_rig(FakeEngine(answer("")), ready=False)
    with pytest.raises(NotReadyError, match="starting"):
        run(rig.services.pipeline.start([create_request()]))


def test_start_queue_full_counts_what_is_not_admitted() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        pipeline = create_rig(engine, max_queue_depth=2).services.pipeline
        first = asyncio.create_task(pipeline.start([create_request()]))
        await engine.wait_until(lambda: len(engine.submitted) == 1)
        with pytest.raises(InvalidRequestError, match="3 prompts in one request, at most 2 may wait"):
            await pipeline.start([create_request()] * 3)
        with pytest.raises(QueueFullError, match="1 requests wait, the limit is 2"):
            await pipeline.start([create_request(), create_request()])
        engine.running[1].emit("")
        await first
        assert pipeline.num_waiting == 0
        both = asyncio.create_task(pipeline.start([create_request(), create_request()]))
        await engine.wait_until(lambda: len(engine.submitted) == 3)
        assert pipeline.num_waiting == 2
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        assert pipeline.num_waiting == 0
        assert engine.aborted == [2, 3]

    run(scenario())


def test_start_long_text_runs_off_the_event_loop() -> None:
    threads: list[str] = []

    class NotingTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
            threads.append(threading.current_thread().name)
            return super().encode(text[:10])

    async def scenario() -> None:
        rig = create_rig(FakeEngine(answer("")), text=create_text(NotingTokenizer()))
        for length in (INLINE_CHARACTERS, INLINE_CHARACTERS + 1):
            await rig.services.pipeline.start([create_request(prompt=TextPrompt("x" * length))])

    run(scenario())
    assert threads[0] == "MainThread"
    assert threads[1].startswith("text")


def test_start_cancelled_while_it_tokenises_submits_nothing() -> None:
    entered, leave = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
            entered.set()
            leave.wait(5)
            return [1]

    async def scenario() -> None:
        engine = FakeEngine(answer(""))
        rig = create_rig(engine, text=create_text(SlowTokenizer()))
        task = asyncio.create_task(rig.services.pipeline.start([create_request(prompt=TextPrompt("x" * 10_000))]))
        await asyncio.to_thread(entered.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()
        assert engine.submitted == []

    run(scenario())


def test_merge_deltas_interleaves_and_closes() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        pipeline = create_rig(engine).services.pipeline
        start = asyncio.create_task(pipeline.start([create_request(), create_request()]))
        await engine.wait_until(lambda: len(engine.running) == 2)
        first, second = engine.running[1], engine.running[2]
        first.emit("")
        second.emit("")
        generations: list[Generation] = await start
        merged = merge_deltas(generations)
        second.emit("b")
        assert await anext(merged) == (1, TextDelta("b"))
        first.emit("a", "length")
        assert await anext(merged) == (0, TextDelta("a"))
        index, ending = await anext(merged)
        assert (index, type(ending)) == (0, Ending)
        await merged.aclose()  # type: ignore[attr-defined]  # an async generator behind its interface
        for generation in generations:
            await generation.aclose()
        assert engine.aborted == [2]

    run(scenario())

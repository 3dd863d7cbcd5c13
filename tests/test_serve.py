"""The default model over HTTP: the answer, the streams, many clients at once."""

import concurrent.futures
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import OpenAI

PROMPT = "What is the capital of France?"
SUBJECTS = ["France", "rain", "iron", "bees", "Rome", "music", "maps", "tea", "clocks", "sand"]
QUESTIONS = ["What is {}?", "Name three facts about {}.", "Why do people like {}?", "Write a haiku on {}.", "Spell {}."]
FIFTY_PROMPTS = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]


def ask(client: OpenAI, prompt: str, **options: Any) -> tuple[str, str | None, int]:
    """(text, finish reason, completion tokens) of a blocking call."""
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": prompt}], temperature=0, **options
    )
    assert answer.usage is not None
    choice = answer.choices[0]
    return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens


def ask_streamed(client: OpenAI, prompt: str, **options: Any) -> tuple[str, str | None, int]:
    """The same of a streamed call; the last chunk carries the usage and no choice."""
    text, finish, tokens = "", None, -1
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    for chunk in stream:
        assert tokens == -1, "a chunk after the usage chunk"
        if chunk.usage is not None:
            assert chunk.choices == []
            tokens = chunk.usage.completion_tokens
            continue
        assert finish is None, "a delta after the finish chunk"
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason
    return text, finish, tokens


def test_capital_of_france(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 8


def test_streamed_equals_not_streamed(server: Any) -> None:
    for prompt in FIFTY_PROMPTS:
        assert ask_streamed(server.client, prompt, max_tokens=16) == ask(server.client, prompt, max_tokens=16)


def test_stop_strings_cut_the_same_streamed_and_not(server: Any) -> None:
    whole, _, _ = ask(server.client, PROMPT)
    for stop in [" is", "Par", "s.", whole[3:9]]:
        blocking = ask(server.client, PROMPT, stop=stop)
        assert blocking == ask_streamed(server.client, PROMPT, stop=stop)
        assert blocking[:2] == (whole[: whole.index(stop)], "stop")


def test_half_of_64_streams_cut_leaves_nothing_behind(server: Any, wait_idle: Callable[[Any], None]) -> None:
    chance = random.Random(7)
    plans = [(index, chance.randrange(1, 12) if index % 2 else None) for index in range(64)]

    def run(plan: tuple[int, int | None]) -> Any:
        index, cut_after = plan
        with server.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": FIFTY_PROMPTS[index % 50]}],
            temperature=0,
            max_tokens=24,
            stream=True,
        ) as stream:
            for count, chunk in enumerate(stream):
                if cut_after is not None and count >= cut_after:
                    return "cut"
                if chunk.choices[0].finish_reason:
                    return chunk.choices[0].finish_reason
        return None

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        endings = list(pool.map(run, plans))
    assert set(endings[0::2]) <= {"stop", "length"}
    assert "cut" in endings[1::2]
    wait_idle(server)


@pytest.mark.parametrize("stream", [False, True], ids=["blocking", "streamed"])
def test_client_that_goes_away_frees_its_slot(server: Any, wait_idle: Callable[[Any], None], stream: bool) -> None:
    body = {"prompt": "once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with httpx.Client(timeout=httpx.Timeout(10, read=1.5)) as client:
        if stream:
            with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{server.url}/v1/completions", json=body)
    wait_idle(server)

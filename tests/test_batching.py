"""A request's greedy tokens are the same alone and in a batch, in float32."""

import concurrent.futures
from typing import Any

import httpx
import pytest

TEXT = "the river bends and the old town wakes while bells ring over wet roofs and carts roll to market"
WORDS = tuple(TEXT.split(" "))


def complete(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
    assert answer["usage"]["completion_tokens"] == 24
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_32_prompts_of_mixed_lengths_together_and_alone(float32_server: Any) -> None:
    prompts = [
        " ".join(WORDS[(index * 7 + place) % len(WORDS)] for place in range(1 + index * 11 % 300))
        for index in range(32)
    ]
    alone = [complete(float32_server.url, prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: complete(float32_server.url, prompt), prompts))
    assert together == alone


@pytest.mark.slow
def test_seeded_sampling_does_not_depend_on_neighbours(float32_server: Any) -> None:
    def draw(seed: int) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": seed}
        text: str = httpx.post(f"{float32_server.url}/v1/completions", json=body, timeout=60).json()["choices"][0][
            "text"
        ]
        return text

    alone = [draw(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(draw, range(6)))
    assert together == alone
    assert len(set(alone)) > 1

"""A request's greedy tokens are the same alone and in a batch, in float32."""

import concurrent.futures
from collections.abc import Callable
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
def test_32_prompts_of_mixed_lengths_together_and_alone(start_server: Callable[..., Any]) -> None:
    running = start_server("smollm2", "--dtype", "float32", "--max-batch-size", "32", "--max-seq-len", "1024")
    prompts = [
        " ".join(WORDS[(index * 7 + place) % len(WORDS)] for place in range(1 + index * 11 % 300))
        for index in range(32)
    ]
    alone = [complete(running.url, prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: complete(running.url, prompt), prompts))
    assert together == alone

"""spark, transformers and llama.cpp side by side on the CPU, same model, same prompts, interleaved in one run.

Prints one table with device, commit and command. Every engine gets the same number of threads. spark is measured over
HTTP with everything that a user pays for; the other two inside this process, one at a time.
"""

import argparse
import concurrent.futures
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PROMPT = "The history of the lighthouse begins with"
FILLER = "the river bends and the old town wakes while bells ring over wet roofs and carts roll to market "


def physical_model() -> str:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1) if found else "unknown CPU"


def git_commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def resident_bytes(pid: int) -> int:
    """Peak resident set of a process, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Spark:
    """A `spark serve` process, measured over HTTP."""

    def __init__(self, arguments: list[str]) -> None:
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spark_server", "serve", "smollm2", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            found = re.search(r"http://[0-9.:]+", line)
            if '"ready"' in line and found:
                self.url = found.group()
                break
        if not self.url:
            raise SystemExit("spark did not start")
        self.ready_s = time.perf_counter() - start
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.client = httpx.Client(timeout=600)

    def stream(self, prompt: str, tokens: int) -> tuple[float, float]:
        """(seconds to the first token, seconds from the first to the last)."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        start = time.perf_counter()
        first = last = 0.0
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    last = time.perf_counter()
                    first = first or last
        return first - start, last - first

    def decode(self, tokens: int) -> float:
        """Tokens per second of one stream after its first token."""
        return (tokens - 1) / self.stream(PROMPT, tokens)[1]

    def together(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams, from the first token of the last one to begin to the first end."""
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            start = time.perf_counter()
            list(pool.map(lambda index: self.stream(f"{PROMPT} {index}", tokens), range(streams)))
            return streams * tokens / (time.perf_counter() - start)

    def prefill(self, tokens: int) -> float:
        return tokens / self.stream(filler_of(self.count, tokens), 1)[0]

    def count(self, text: str) -> int:
        body = {"prompt": text, "max_tokens": 1, "temperature": 0}
        usage = self.client.post(f"{self.url}/v1/completions", json=body).json()["usage"]
        count: int = usage["prompt_tokens"]
        return count

    def peak_bytes(self) -> int:
        return sum(resident_bytes(pid) for pid in [self.process.pid, *children(self.process.pid)])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


_fillers: dict[int, str] = {}


def filler_of(count: Callable[[str], int], tokens: int) -> str:
    """A text of exactly `tokens` tokens."""
    if tokens not in _fillers:
        words = (FILLER * (tokens // 10)).split()
        low, high = 1, len(words)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if count(" ".join(words[:middle])) < tokens else (low, middle)
        _fillers[tokens] = " ".join(words[:low])
    return _fillers[tokens]


class Transformers:
    """`generate` and `forward` of transformers; random weights of the same shapes cost the same time."""

    def __init__(self, dtype: str, threads: int) -> None:
        import torch
        import transformers

        from spark_model.facts import read_facts
        from spark_model.reference import resolve_model

        torch.set_num_threads(threads)
        config = transformers.LlamaConfig(**read_facts(resolve_model("smollm2")).config)
        self.torch = torch
        self.model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()

    def decode(self, tokens: int) -> float:
        ids = self.torch.arange(100, 108)[None]
        with self.torch.inference_mode():
            first = self._generate(ids, 1)
            return (tokens - 1) / (self._generate(ids, tokens) - first)

    def _generate(self, ids: Any, tokens: int) -> float:
        start = time.perf_counter()
        self.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=2)
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        ids = self.torch.randint(100, 40000, (1, tokens))
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.model(ids, logits_to_keep=1)
            return tokens / (time.perf_counter() - start)


class LlamaCpp:
    """llama-cpp-python on the same file."""

    def __init__(self, threads: int) -> None:
        import llama_cpp

        from spark_model.reference import resolve_model

        self.model = llama_cpp.Llama(
            str(resolve_model("smollm2").path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def decode(self, tokens: int) -> float:
        self.model.reset()
        self.model.eval(list(range(100, 108)))
        start = time.perf_counter()
        for _ in range(tokens):
            self.model.eval([self.model.sample(temp=0)])
        return tokens / (time.perf_counter() - start)

    def prefill(self, tokens: int) -> float:
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(list(range(100, 100 + tokens)))
        return tokens / (time.perf_counter() - start)


@contextmanager
def paused(spark: Spark) -> Iterator[None]:
    """An idle spark burns no CPU, but leave no doubt."""
    pids = [spark.process.pid, *children(spark.process.pid)]
    for pid in pids:
        os.kill(pid, 19)  # SIGSTOP
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, 18)  # SIGCONT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--spark-arguments", default="", help="more arguments for spark serve")
    options = parser.parse_args()

    spark = Spark(["--num-threads", str(options.threads), *options.spark_arguments.split()])
    try:
        figures = measure(spark, options.threads, options.rounds, options.tokens)
        peak = spark.peak_bytes()
    finally:
        spark.close()
    print_table(figures, options.threads)
    print(f"spark: ready after {spark.ready_s:.1f} s; peak memory of server and engine {peak / 2**30:.2f} GiB")


def measure(spark: Spark, threads: int, rounds: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """Engine → what → a figure a round, in tokens per second; the engines take turns within a round."""
    with paused(spark):
        others: dict[str, Any] = {
            f"transformers {dtype}": Transformers(dtype, threads) for dtype in ("float32", "bfloat16")
        }
        try:
            others["llama.cpp"] = LlamaCpp(threads)
        except ImportError:
            print("llama.cpp: not installed (group `bench`)", file=sys.stderr)
    figures: dict[str, dict[str, list[float]]] = {}

    def note(engine: str, what: str, value: float) -> None:
        figures.setdefault(engine, {}).setdefault(what, []).append(value)

    spark.decode(8)
    spark.prefill(512)
    for _ in range(rounds):
        note("spark", "decode", spark.decode(tokens))
        note("spark", "8 streams", spark.together(8, tokens))
        note("spark", "prefill 512", spark.prefill(512))
        with paused(spark):
            for name, engine in others.items():
                note(name, "decode", engine.decode(tokens))
                note(name, "prefill 512", engine.prefill(512))
    return figures


def print_table(figures: dict[str, dict[str, list[float]]], threads: int) -> None:
    best = {name: {what: statistics.median(v) for what, v in row.items()} for name, row in figures.items()}
    rivals = [name for name in best if name.startswith("transformers")]
    print(f"device: {physical_model()}, {threads} threads; commit {git_commit()}; SmolLM2-135M Q4_1; medians, tokens/s")
    print(f"command: scripts/bench cpu {' '.join(sys.argv[1:])}".rstrip())
    print("| engine | decode | 8 streams | prefill 512 |\n|---|--:|--:|--:|")
    for name, row in best.items():
        cells = [f"{row[what]:.1f}" if what in row else "–" for what in ("decode", "8 streams", "prefill 512")]
        print(f"| {name} | {' | '.join(cells)} |")
    spark = best["spark"]
    ratios = {
        "decode / transformers' best": spark["decode"] / max(best[name]["decode"] for name in rivals),
        "prefill / transformers' best": spark["prefill 512"] / max(best[name]["prefill 512"] for name in rivals),
        "8 streams / one": spark["8 streams"] / spark["decode"],
    }
    if "llama.cpp" in best:
        ratios["decode / llama.cpp"] = spark["decode"] / best["llama.cpp"]["decode"]
        ratios["prefill / llama.cpp"] = spark["prefill 512"] / best["llama.cpp"]["prefill 512"]
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    print(json.dumps(best), file=sys.stderr)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()

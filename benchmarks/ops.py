"""What does each op of spark_kernels cost on this CPU, and what share of the memory bandwidth does it reach?

    uv run python benchmarks/ops.py [--threads 2] [--rounds 7]

One table: op, implementation, rows M, milliseconds, share of the floor. Sizes are those of SmolLM2-135M. Linears run over
all 30 layers with random weights, so that no weight is still in the cache; implementations are interleaved and the best
round counts. The floor of a linear is its weights' bytes over the read bandwidth measured in the same run; the other
ops are overhead, and their floor is zero. With one thread the processor time is taken, which survives a busy machine.
"""

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spark_kernels.ggml import GgmlTensor, GgmlType
from spark_kernels.linear.dense import DenseLinear
from spark_kernels.linear.half import HalfLinear
from spark_kernels.linear.int4 import Int4Linear
from spark_kernels.paged_attention import PagedBatch, paged_attention
from spark_kernels.paged_attention.reference import paged_attention_reference
from spark_kernels.rmsnorm import add_rmsnorm
from spark_kernels.rmsnorm.reference import rmsnorm_reference
from spark_kernels.rope import apply_rope, widen_tables
from spark_kernels.rope.reference import rotate_reference
from spark_kernels.sampling import SamplingRow, sample
from spark_kernels.silu_mul import silu_mul

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
CONTEXT, BLOCK_SIZE = 200, 16
LAYER_SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))  # [N, K]


@dataclass(frozen=True)
class Candidate:
    """One line of the table for each M; `run` does the work of one step, `num_bytes` is read for it at least."""

    op: str
    implementation: str
    num_bytes: int
    run: Callable[[int], object]
    rows: tuple[int, ...] = (1, 8, 64)


def random_q4_1(rows: int, columns: int) -> GgmlTensor:
    data = torch.randint(0, 256, (rows * columns // 32, 20), dtype=torch.uint8)
    data[:, :4] = torch.tensor([0.01, -0.075], dtype=torch.float16).view(torch.uint8)
    return GgmlTensor(GgmlType.Q4_1, (rows, columns), data.view(rows, -1))


def linear_candidates() -> list[Candidate]:
    stored = [[random_q4_1(*shape) for shape in LAYER_SHAPES] for _ in range(LAYERS)]
    made: dict[str, tuple[int, list[DenseLinear | HalfLinear | Int4Linear]]] = {
        "dense fp32": (
            32,
            [DenseLinear([w], dtype=torch.float32, device="cpu", bias=None) for layer in stored for w in layer],
        ),
        "half": (16, [HalfLinear([w], bias=None) for layer in stored for w in layer]),
        "int4": (5, [Int4Linear([w], bias=None) for layer in stored for w in layer]),
    }
    inputs = {rows: {k: torch.randn(rows, k) for k in (HIDDEN, INNER)} for rows in (1, 4, 8, 16, 64, 512)}
    weights = LAYERS * sum(n * k for n, k in LAYER_SHAPES)

    def runner(layers: list[DenseLinear | HalfLinear | Int4Linear]) -> Callable[[int], object]:
        return lambda rows: [layer(inputs[rows][layer.in_features]) for layer in layers]

    return [
        Candidate("30 layers' linears", name, weights * bits // 8, runner(layers), tuple(inputs))
        for name, (bits, layers) in made.items()
    ]


def head_candidates() -> list[Candidate]:
    weight = torch.randn(VOCAB, HIDDEN) * 0.05
    half = HalfLinear([weight], bias=None)
    dense = DenseLinear([weight], dtype=torch.float32, device="cpu", bias=None)
    inputs = {rows: torch.randn(rows, HIDDEN) for rows in (1, 8)}
    return [
        Candidate("head", "dense fp32", weight.numel() * 4, lambda rows: dense(inputs[rows]), (1, 8)),
        Candidate("head", "half", weight.numel() * 2, lambda rows: half(inputs[rows]), (1, 8)),
    ]


def attention_candidates(dtype: torch.dtype) -> list[Candidate]:
    pages = -(-CONTEXT // BLOCK_SIZE)
    caches = [
        torch.randn(2, 8 * pages, BLOCK_SIZE, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(LAYERS)
    ]  # blocks of the sequences lie interleaved, as they do when the sequences grow together
    queries = {rows: torch.randn(rows, HEADS, HEAD_DIM) for rows in (1, 8)}

    def step(attend: Callable[[Tensor, Tensor, Tensor, PagedBatch, float], Tensor]) -> Callable[[int], object]:
        def run(rows: int) -> object:
            table = torch.arange(pages)[None] * rows + torch.arange(rows)[:, None]
            batch = PagedBatch(torch.zeros(rows, dtype=torch.int64), table, tuple(range(rows + 1)), (CONTEXT,) * rows)
            return [attend(queries[rows], cache[0], cache[1], batch, 0.125) for cache in caches]

        return run

    per_sequence = 2 * LAYERS * CONTEXT * KV_HEADS * HEAD_DIM * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return [
        Candidate("30 paged_attention, 200 tokens", f"cpu {name} cache", per_sequence, step(paged_attention), (1, 8)),
        Candidate(
            "30 paged_attention, 200 tokens",
            f"reference {name} cache",
            per_sequence,
            step(paged_attention_reference),
            (1, 8),
        ),
    ]


def small_candidates() -> list[Candidate]:
    x = {rows: torch.randn(rows, HIDDEN) for rows in (1, 8, 64)}
    weight = torch.randn(HIDDEN)
    gate_up = {rows: torch.randn(rows, 2 * INNER) for rows in x}
    qkv = {rows: torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM) for rows in x}
    tables = {rows: (torch.randn(rows, HEAD_DIM // 2), torch.randn(rows, HEAD_DIM // 2)) for rows in x}
    wide = {rows: widen_tables(*tables[rows]) for rows in x}
    logits = {rows: torch.randn(rows, VOCAB) for rows in x}
    greedy, nucleus = SamplingRow(temperature=0.0), SamplingRow(temperature=0.8, top_p=0.95, top_k=40)

    def repeat(count: int, function: Callable[[int], object]) -> Callable[[int], object]:
        return lambda rows: [function(rows) for _ in range(count)]

    def heads(rows: int) -> tuple[Tensor, Tensor]:
        return qkv[rows][:, :HEADS], qkv[rows][:, HEADS : HEADS + KV_HEADS]

    return [
        Candidate("60 add_rmsnorm", "cpu", 0, repeat(60, lambda m: add_rmsnorm(x[m], x[m], weight, 1e-5))),
        Candidate("60 add_rmsnorm", "reference", 0, repeat(60, lambda m: rmsnorm_reference(x[m] + x[m], weight, 1e-5))),
        Candidate("30 apply_rope", "cpu, wide tables", 0, repeat(30, lambda m: apply_rope(*heads(m), *wide[m]))),
        Candidate("30 apply_rope", "cpu", 0, repeat(30, lambda m: apply_rope(*heads(m), *tables[m]))),
        Candidate(
            "30 apply_rope",
            "reference",
            0,
            repeat(30, lambda m: [rotate_reference(side, *tables[m]) for side in heads(m)]),
        ),
        Candidate("30 silu_mul", "reference", 0, repeat(30, lambda m: silu_mul(gate_up[m]))),
        Candidate("sample", "greedy", 0, lambda m: sample(logits[m], [greedy] * m)),
        Candidate("sample", "top_k 40, top_p 0.95", 0, lambda m: sample(logits[m], [nucleus] * m)),
    ]


def read_bandwidth(clock: Callable[[], float]) -> float:
    """Bytes per second while 256 MB are summed."""
    source = torch.ones(64 * 2**20)
    best = float("inf")
    for _ in range(5):
        start = clock()
        source.sum()
        best = min(best, clock() - start)
    return source.numel() * 4 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    with torch.inference_mode():
        bandwidth = read_bandwidth(clock)
        candidates = [*linear_candidates(), *head_candidates(), *small_candidates()]
        for dtype in (torch.float32, torch.bfloat16):
            candidates += attention_candidates(dtype)
        best: dict[tuple[int, int], float] = {}
        for _ in range(arguments.rounds):
            for index, candidate in enumerate(candidates):
                for rows in candidate.rows:
                    start = clock()
                    candidate.run(rows)
                    best[index, rows] = min(best.get((index, rows), float("inf")), clock() - start)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {arguments.threads} threads, read at {bandwidth / 1e9:.1f} GB/s"
    )
    print(f"{'op':32} {'implementation':24} {'M':>4} {'ms':>9} {'of floor':>9}")
    for (index, rows), seconds in sorted(best.items()):
        candidate = candidates[index]
        is_per_row = candidate.op.startswith("30 paged_attention")
        floor = candidate.num_bytes * (rows if is_per_row else 1) / bandwidth
        share = f"{floor / seconds:9.0%}" if floor else f"{'-':>9}"
        print(f"{candidate.op:32} {candidate.implementation:24} {rows:4} {seconds * 1e3:9.2f} {share}")


if __name__ == "__main__":
    main()

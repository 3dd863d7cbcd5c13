"""The memory plan: what is given to the cache, what is refused and with which numbers."""

import pytest

from spark_runtime.errors import OutOfMemoryError
from spark_runtime.memory import KvDemand, plan_memory

MIB = 1024 * 1024
KV = KvDemand(bytes_per_block=MIB, block_size=16, max_model_len=100, max_num_seqs=4)  # 7 blocks a sequence


def test_plan_gives_the_cache_what_is_left() -> None:
    plan = plan_memory(bound_bytes=32 * MIB, weight_bytes=10 * MIB, workspace_bytes=2 * MIB + 1, kv=KV)
    assert plan.num_blocks == 19
    assert plan.used_bytes <= plan.bound_bytes
    assert [row.name for row in plan.rows] == ["weights", "workspace", "kv cache"]


def test_plan_stops_at_what_all_sequences_need() -> None:
    plan = plan_memory(bound_bytes=1000 * MIB, weight_bytes=MIB, workspace_bytes=MIB, kv=KV)
    assert plan.num_blocks == 4 * 7


def test_plan_takes_the_wanted_number_of_blocks() -> None:
    plan = plan_memory(bound_bytes=1000 * MIB, weight_bytes=MIB, workspace_bytes=MIB, kv=KV, num_blocks=40)
    assert plan.num_blocks == 40


def test_plan_refuses_what_cannot_hold_one_sequence() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        plan_memory(bound_bytes=16 * MIB, weight_bytes=10 * MIB, workspace_bytes=2 * MIB, kv=KV)
    assert str(caught.value) == (
        "not enough memory: weights 10.0 MiB + workspace 2.0 MiB + kv cache 7.0 MiB for one sequence of 100 tokens "
        "= 19.0 MiB, the bound is 16.0 MiB\n  hint: raise --gpu-memory-utilization or lower --max-seq-len to 64"
    )


def test_plan_accepts_exactly_one_sequence() -> None:
    assert plan_memory(bound_bytes=19 * MIB, weight_bytes=10 * MIB, workspace_bytes=2 * MIB, kv=KV).num_blocks == 7


def test_plan_does_not_suggest_a_shorter_length_when_the_weights_alone_do_not_fit() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        plan_memory(bound_bytes=8 * MIB, weight_bytes=10 * MIB, workspace_bytes=0, kv=KV)
    assert "--max-seq-len" not in str(caught.value)


def test_plan_refuses_wanted_blocks_that_do_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match=r"kv cache 30\.0 MiB for 30 blocks"):
        plan_memory(bound_bytes=20 * MIB, weight_bytes=MIB, workspace_bytes=MIB, kv=KV, num_blocks=30)


def test_plan_refuses_wanted_blocks_below_one_sequence() -> None:
    with pytest.raises(OutOfMemoryError, match="6 blocks of 16 tokens cannot hold one sequence of 100 tokens"):
        plan_memory(bound_bytes=1000 * MIB, weight_bytes=MIB, workspace_bytes=MIB, kv=KV, num_blocks=6)


def test_lines_show_every_row_and_the_rest() -> None:
    plan = plan_memory(bound_bytes=32 * MIB, weight_bytes=10 * MIB, workspace_bytes=2 * MIB, kv=KV)
    assert [line.split()[:2] for line in plan.lines()] == [
        ["weights", "10.0"],
        ["workspace", "2.0"],
        ["kv", "cache"],
        ["free", "0.0"],
    ]


def test_plan_bounds_the_cache_but_never_below_one_sequence() -> None:
    def blocks(kv_cache_bytes: int) -> int:
        return plan_memory(
            bound_bytes=1000 * MIB, weight_bytes=MIB, workspace_bytes=MIB, kv=KV, kv_cache_bytes=kv_cache_bytes
        ).num_blocks

    assert [blocks(12 * MIB), blocks(3 * MIB), blocks(0)] == [12, 7, 28]

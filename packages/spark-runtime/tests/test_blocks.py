"""The block allocator: counts, contiguity, and a random walk against a model that is a plain set."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.errors import OutOfBlocksError
from spark_runtime.kvcache.blocks import BlockAllocator
from spark_runtime.types import BlockId


def is_contiguous(blocks: list[BlockId]) -> bool:
    return blocks == [BlockId(id) for id in range(blocks[0], blocks[0] + len(blocks))]


def free_of(num_blocks: int, held: list[list[BlockId]]) -> set[int]:
    return set(range(num_blocks)) - {id for blocks in held for id in blocks}


def test_allocate_hands_out_each_block_once() -> None:
    allocator = BlockAllocator(7)
    blocks = allocator.allocate(3) + allocator.allocate(4)
    assert sorted(blocks) == list(range(7))
    assert allocator.num_free == 0
    assert allocator.allocate(0) == []


def test_allocate_too_many_takes_nothing_and_names_the_numbers() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 4 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_allocate_leaves_room_behind_every_run() -> None:
    allocator = BlockAllocator(100)
    first, second, third = allocator.allocate(4), allocator.allocate(4), allocator.allocate(4)
    assert (first[0], second[0], third[0]) == (0, 50, 25)
    for blocks, until in [(first, 25), (third, 50), (second, 100)]:
        allocator.extend(blocks, until - blocks[-1] - 1)
        assert is_contiguous(blocks) and blocks[-1] == until - 1
    assert allocator.num_free == 0


def test_allocate_takes_the_longest_run() -> None:
    allocator = BlockAllocator(12)
    blocks = allocator.allocate(12)
    allocator.release([*blocks[1:3], *blocks[4:9]])
    assert allocator.allocate(1) == [blocks[6]]
    assert allocator.allocate(2) == blocks[1:3]


def test_extend_goes_on_elsewhere_where_a_neighbour_stands() -> None:
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(8)
    mine, neighbour = blocks[:2], blocks[3]
    allocator.release([blocks[2], *blocks[4:]])
    allocator.extend(mine, 2)
    assert mine == [0, 1, 2, 5]
    allocator.extend(mine, 1)
    assert mine == [0, 1, 2, 5, 6]
    allocator.release([neighbour])
    allocator.extend(mine, 3)
    assert sorted(mine) == list(range(8))
    empty: list[BlockId] = []
    allocator.release(mine)
    allocator.extend(empty, 3)
    assert empty == [0, 1, 2]


def test_extend_too_far_takes_nothing_and_names_the_numbers() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 4 are free"):
        allocator.extend(blocks, 2)
    assert blocks == [0, 1, 2] and allocator.num_free == 1


def test_allocate_without_a_long_run_uses_few_pieces() -> None:
    allocator = BlockAllocator(10)
    blocks = allocator.allocate(10)
    allocator.release([blocks[0], blocks[2], *blocks[4:7]])
    assert allocator.allocate(4) == [*blocks[4:7], blocks[0]]


def test_release_in_any_order_joins_runs_again() -> None:
    allocator = BlockAllocator(9)
    held = [allocator.allocate(3) for _ in range(3)]
    for index in (1, 0, 2):
        allocator.release(held[index][::-1])
    assert is_contiguous(allocator.allocate(9))


def test_shared_block_is_free_only_after_its_last_release() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.share(blocks[:1])
    allocator.release(blocks)
    assert (allocator.reference_count(blocks[0]), allocator.reference_count(blocks[1])) == (1, 0)
    assert allocator.num_free == 2
    allocator.release(blocks[:1])
    assert allocator.num_free == 3


def test_misuse_is_refused_and_changes_nothing() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(1)
    free = BlockId(2)
    with pytest.raises(ValueError, match="block 2 is free already"):
        allocator.release([*blocks, free])
    with pytest.raises(ValueError, match="block 2 is free and cannot be shared"):
        allocator.share([*blocks, free])
    with pytest.raises(ValueError, match="block 2 is free and cannot be extended"):
        allocator.extend([free], 1)
    with pytest.raises(ValueError, match="twice"):
        allocator.release([*blocks, *blocks])
    assert allocator.reference_count(blocks[0]) == 1
    with pytest.raises(OutOfBlocksError, match="at least 1"):
        BlockAllocator(0)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_random_walk_keeps_every_block_accounted_for(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 24))
    allocator = BlockAllocator(num_blocks)
    held: list[list[BlockId]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["allocate", "release", "share", "extend"]))
        if held and action == "release":
            allocator.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif held and action == "share":
            held.append(list(data.draw(st.sampled_from(held))))
            allocator.share(held[-1])
        elif held and action == "extend" and held[-1]:
            blocks, count = held[-1], data.draw(st.integers(0, 4))
            before, free = list(blocks), free_of(num_blocks, held)
            if count > len(free):
                with pytest.raises(OutOfBlocksError):
                    allocator.extend(blocks, count)
                assert blocks == before
                continue
            allocator.extend(blocks, count)
            new = blocks[len(before) :]
            assert blocks[: len(before)] == before and len(new) == count and set(new) <= free and len(set(new)) == count
            for index, block in enumerate(new, start=before[-1] + 1):
                assert block == index or index not in free
                if block != index:
                    break
        else:
            count = data.draw(st.integers(0, num_blocks))
            free = free_of(num_blocks, held)
            if count > len(free):
                with pytest.raises(OutOfBlocksError):
                    allocator.allocate(count)
                continue
            blocks = allocator.allocate(count)
            assert len(blocks) == count and set(blocks) <= free
            has_long_run = any(set(range(first, first + count)) <= free for first in free)
            assert count == 0 or not has_long_run or is_contiguous(blocks)
            held.append(blocks)
        in_use = {id for blocks in held for id in blocks}
        assert allocator.num_free == num_blocks - len(in_use)
        assert all(allocator.reference_count(BlockId(id)) == sum(id in b for b in held) for id in range(num_blocks))
    for blocks in held:
        allocator.release(blocks)
    assert allocator.num_free == num_blocks and is_contiguous(allocator.allocate(num_blocks))


def test_importing_the_allocator_imports_no_torch() -> None:
    code = "import sys, spark_runtime.kvcache.blocks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

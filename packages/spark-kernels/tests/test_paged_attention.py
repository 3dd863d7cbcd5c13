from collections.abc import Sequence

import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.paged_attention import PagedBatch, paged_attention, write_kv
from spark_kernels.paged_attention.plan import GROUP_TOKENS, group_by_length
from spark_kernels.testing import assert_close, nan_filled

BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 16, 2, 6, 32
NUM_BLOCKS = 64


class Case:
    """Sequences with their whole history; the cache holds NaN wherever no token was written."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], *, dtype: torch.dtype = torch.float32, contiguous: bool = False
    ) -> None:
        """lengths: (tokens in this step, tokens in the cache after it) for each sequence."""
        torch.manual_seed(1)
        self.k_cache = nan_filled(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.v_cache = self.k_cache.clone()
        free = list(range(NUM_BLOCKS)) if contiguous else torch.randperm(NUM_BLOCKS).tolist()
        pages = max(-(-context // BLOCK_SIZE) for _, context in lengths)
        table = torch.full((len(lengths), pages), NUM_BLOCKS - 1)
        starts, slots, queries = [0], [], []
        self.expected = []
        for index, (new, context) in enumerate(lengths):
            blocks = [free.pop(0) for _ in range(-(-context // BLOCK_SIZE))]
            table[index, : len(blocks)] = torch.tensor(blocks)
            where = torch.tensor([blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(context)])
            keys = torch.randn(context, KV_HEADS, HEAD_DIM).to(dtype)
            values = torch.randn(context, KV_HEADS, HEAD_DIM).to(dtype)
            query = torch.randn(new, HEADS, HEAD_DIM).to(dtype)
            write_kv(keys, values, self.k_cache, self.v_cache, where)
            self.expected.append(self.attend(query.double(), keys.double(), values.double()))
            starts.append(starts[-1] + new)
            slots.append(where[context - new :])
            queries.append(query)
        self.q = torch.cat(queries)
        contexts = tuple(context for _, context in lengths)
        self.batch = PagedBatch(torch.cat(slots), table, tuple(starts), contexts)

    @staticmethod
    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        for t in range(len(query)):
            seen = len(keys) - len(query) + t + 1
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                shares = torch.softmax(keys[:seen, kv] @ query[t, h] * 0.2, dim=0)
                out[t, h] = shares @ values[:seen, kv]
        return out

    def run(self) -> torch.Tensor:
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, 0.2)


LENGTHS = {
    "one-decode": [(1, 40)],
    "first-token": [(1, 1)],
    "full-block": [(1, 16)],
    "prefill": [(37, 37)],
    "chunk": [(20, 57)],
    "decodes": [(1, 5), (1, 33), (1, 16), (1, 1), (1, 100)],
    "equal-decodes": [(1, 33), (1, 33), (1, 33)],
    "decodes-of-far-lengths": [(1, 5), (1, 200), (1, 7), (1, 190), (1, 250)],
    "mixed": [(1, 33), (20, 57), (1, 2), (5, 5)],
}


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_paged_attention_equals_definition(
    lengths: list[tuple[int, int]], dtype: torch.dtype, contiguous: bool
) -> None:
    case = Case(lengths, dtype=dtype, contiguous=contiguous)
    result = case.run()
    assert result.dtype == dtype
    assert_close(result, torch.cat(case.expected).float(), dtype=dtype)


def test_paged_attention_row_does_not_depend_on_the_batch() -> None:
    case = Case([(1, 33), (1, 60), (1, 40)])
    together = case.run()
    for row in range(3):
        alone = PagedBatch(
            case.batch.slots[row : row + 1],
            case.batch.block_table[row : row + 1],
            (0, 1),
            case.batch.context_lengths[row : row + 1],
        )
        assert_close(
            paged_attention(case.q[row : row + 1], case.k_cache, case.v_cache, alone, 0.2), together[row, None]
        )


def test_group_by_length_pads_little_and_bounds_the_copy() -> None:
    contexts = [2000, 1900, 500, 400, 300, 260, 240, 100]
    groups = group_by_length(range(8), contexts)
    assert groups == [[0], [1], [2, 3, 4, 5], [6], [7]]
    assert all(len(g) * contexts[g[0]] <= GROUP_TOKENS and 2 * contexts[g[-1]] >= contexts[g[0]] for g in groups)


def test_paged_attention_sees_no_later_token() -> None:
    case = Case([(20, 57)])
    before = case.run()
    last = case.batch.slots[-1]
    case.k_cache.flatten(0, 1)[last] += 5
    after = case.run()
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


def test_write_kv_writes_only_its_slots() -> None:
    k_cache, v_cache = nan_filled(4, 4, 1, 8), nan_filled(4, 4, 1, 8)
    k, v = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    write_kv(k, v, k_cache, v_cache, torch.tensor([13, 0, 6]))
    assert torch.equal(k_cache.flatten(0, 1)[[13, 0, 6]], k) and torch.equal(v_cache.flatten(0, 1)[[13, 0, 6]], v)
    assert int(k_cache.isnan().all(dim=-1).sum()) == 13 == int(v_cache.isnan().all(dim=-1).sum())


def test_paged_batch_counts_must_fit() -> None:
    table, slots = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UnsupportedShapeError, match="query_starts"):
        PagedBatch(slots, table, (0, 1, 2), (5,))
    with pytest.raises(UnsupportedShapeError, match="slots"):
        PagedBatch(slots, table, (0, 1), (5,))
    with pytest.raises(UnsupportedShapeError, match="2 tokens with 1 in the cache"):
        PagedBatch(slots, table, (0, 2), (1,))


def test_paged_attention_wrong_shapes() -> None:
    case = Case([(1, 3)])
    with pytest.raises(UnsupportedShapeError, match="paged_attention"):
        paged_attention(case.q[:, :5], case.k_cache, case.v_cache, case.batch, 0.2)


@pytest.mark.parametrize("lengths", [[(1, 40)], [(1, 40), (1, 33)], [(20, 57), (1, 9)]], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paged_attention_cache_of_another_dtype(lengths: list[tuple[int, int]], q_dtype: torch.dtype) -> None:
    cache_dtype = torch.bfloat16 if q_dtype == torch.float32 else torch.float32
    case = Case(lengths, dtype=cache_dtype)
    result = paged_attention(case.q.to(q_dtype), case.k_cache, case.v_cache, case.batch, 0.2)
    assert result.dtype == q_dtype
    assert_close(result, torch.cat(case.expected).float(), dtype=torch.bfloat16)


def test_paged_attention_caches_that_are_views_of_one_tensor() -> None:
    case = Case([(1, 40), (20, 57)], contiguous=True)
    both = torch.stack((case.k_cache, case.v_cache))
    assert torch.equal(paged_attention(case.q, both[0], both[1], case.batch, 0.2), case.run())

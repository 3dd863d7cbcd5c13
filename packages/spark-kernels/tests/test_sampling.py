import math
from collections import Counter

import pytest
import torch

from spark_kernels.errors import KernelError, UnsupportedShapeError
from spark_kernels.sampling import SamplingRow, sample
from spark_kernels.sampling.philox import philox4x32, uniform
from spark_kernels.sampling.reference import draw_reference


def drawable(logits: torch.Tensor, **filters: float) -> list[int]:
    """Every token that some point of the unit interval draws."""
    row = SamplingRow(**filters)  # type: ignore[arg-type]  # top_k comes as int
    points = torch.linspace(1e-12, 1 - 1e-12, 2001, dtype=torch.float64).tolist()
    arguments = (row.temperature, row.top_k, row.top_p, row.min_p)
    return sorted({draw_reference(logits, *arguments, point) for point in points})


def logits_of(*shares: float) -> torch.Tensor:
    return torch.tensor(shares, dtype=torch.float64).log().float()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_is_inside_the_interval_and_depends_on_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, 2**40, 2**64 - 1) for position in (0, 1, 2**33)]
    assert len(set(numbers)) == 12
    assert all(0.0 < number < 1.0 for number in numbers)
    assert (2**32 - 1 + 0.5) / 2**32 < 1.0


def test_sample_greedy_takes_the_first_largest_allowed() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [1.0, 5.0, 4.0, 0.0]])
    greedy = SamplingRow(temperature=0.0, top_k=3, top_p=0.1)
    assert sample(logits, [greedy, greedy]) == [1, 1]
    before = logits.clone()
    assert sample(logits, [SamplingRow(temperature=0.0, forbidden=(1,))] * 2) == [2, 2]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_no_token_allowed(temperature: float) -> None:
    with pytest.raises(KernelError, match="allow"):
        sample(torch.zeros(1, 3), [SamplingRow(temperature=temperature, forbidden=(0, 1, 2))])


def test_sample_nan_logits() -> None:
    with pytest.raises(KernelError, match="finite"):
        sample(torch.tensor([[0.0, float("nan")]]), [SamplingRow()])


def test_sample_rows_and_params_must_agree() -> None:
    with pytest.raises(UnsupportedShapeError, match="1 rows"):
        sample(torch.zeros(2, 3), [SamplingRow()])


def test_sample_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, 999) * 3
    rows = [SamplingRow(temperature=0.5 + i / 4, top_p=0.9, top_k=50 * (i % 2), seed=i, position=7) for i in range(8)]
    rows[3] = SamplingRow(temperature=0.0)
    rows[5] = SamplingRow(forbidden=range(500), seed=9)
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(8)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])
    assert together[5] >= 500


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.39}, [3]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 1e-9}, [3]),
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 0.76}, [3]),
        ({"top_k": 3, "top_p": 0.79}, [1, 2, 3]),  # of the 0.9 that top_k leaves, 0.7 is not 0.79
        ({"top_k": 3, "top_p": 0.77}, [1, 3]),
        ({"top_p": 0.71, "min_p": 0.6}, [1, 3]),
    ],
    ids=str,
)
def test_draw_filters_keep_what_they_say(filters: dict[str, float], kept: list[int]) -> None:
    assert drawable(logits_of(0.1, 0.3, 0.2, 0.4), **filters) == kept


def test_draw_equal_tokens_at_an_edge_lower_ids_stay() -> None:
    assert drawable(logits_of(0.2, 0.2, 0.2, 0.2, 0.2), top_k=3) == [0, 1, 2]
    assert drawable(logits_of(0.1, 0.3, 0.3, 0.3), top_p=0.5) == [1, 2]


def test_draw_never_gives_a_token_of_no_weight() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    assert drawable(logits) == [1, 3]
    assert draw_reference(logits, 1.0, 0, 1.0, 0.0, 1 - 1e-16) == 3
    assert draw_reference(logits, 1.0, 0, 1.0, 0.0, 0.5) == 3  # shares are half open: [0, 0.5) and [0.5, 1)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 0.01, 1e6])
def test_draw_extreme_temperatures(temperature: float) -> None:
    wanted = [0, 1] if temperature == 1e6 else [1]
    assert drawable(torch.tensor([-40.0, 40.0]), temperature=temperature) == wanted


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize("top_k", [0, 40, 3000])
def test_draw_large_vocabulary_equals_a_full_sort(top_k: int, spread: float, top_p: float) -> None:
    """The candidates that are looked at first, and the sort behind them, give what one sort of everything gives."""
    torch.manual_seed(1)
    logits = torch.randn(5000) * spread
    order = logits.double().sort(descending=True, stable=True).indices[: top_k or None]
    shares = logits.double()[order].softmax(dim=0)
    nucleus = order[: int((shares.cumsum(dim=0) - shares < top_p).sum())]
    kept, _ = nucleus.sort()
    cumulated = logits.double()[kept].softmax(dim=0).cumsum(dim=0)
    for point in (1e-9, 0.123, 0.5, 0.9, 1 - 1e-9):
        wanted = kept[int(torch.searchsorted(cumulated, point))]
        assert draw_reference(logits, 1.0, top_k, top_p, 0.0, point) == wanted


def test_sample_frequencies_are_the_probabilities() -> None:
    """Chi-square of 20,000 positions against the shares; a shifted or unfair draw exceeds the 0.1 % point."""
    shares = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    draws = 20_000
    logits = logits_of(*shares).expand(draws, -1)
    counts = Counter(sample(logits, [SamplingRow(seed=5, position=position) for position in range(draws)]))
    statistic = sum((counts[i] - draws * share) ** 2 / (draws * share) for i, share in enumerate(shares))
    assert statistic < 18.47  # chi-square, 4 degrees of freedom, p = 0.001
    assert math.isclose(sum(counts.values()), draws)

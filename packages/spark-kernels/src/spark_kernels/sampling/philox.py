"""Philox4x32-10: random numbers as a pure function of a key and a counter.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). A device kernel that computes the same
function draws the same tokens.
"""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in 32 bits
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words of a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number strictly between 0 and 1 for (seed, position), both taken modulo 2**64: (first word + ½) / 2**32."""
    counter = (position & _WORD, (position >> 32) & _WORD, 0, 0)
    word = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))[0]
    return (word + 0.5) / 2**32

"""Rotary position embedding: from a RopeConfig to the cos and sin of each position."""

import math

import torch
from torch import Tensor

from spark_model.config import RopeConfig


class RotaryEmbedding:
    """Cos and sin tables for the positions of a step, in fp32, shared by all layers.

    frequency_divisors   [rotary_dim / 2] from a GGUF file's rope_freqs.weight, which holds llama-3 scaling ready made
    """

    def __init__(self, config: RopeConfig, *, device: torch.device, frequency_divisors: Tensor | None = None) -> None:
        frequencies = rope_frequencies(config)
        if frequency_divisors is not None:
            frequencies = frequencies / frequency_divisors.to(torch.float32).cpu()
        self._frequencies = frequencies.to(device)  # [rotary_dim / 2]
        self._scale = rope_attention_factor(config)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, rotary_dim / 2] fp32."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return cos, sin


def rope_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair, [rotary_dim / 2] fp32 on the CPU."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / config.theta**exponents
    match config.type:
        case "default" | "dynamic":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(frequencies, config)
        case "yarn":
            return _yarn(frequencies, config)


def rope_attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: yarn's correction of the attention's temperature, else 1."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config.factor, config.mscale) / _yarn_scale(config.factor, config.mscale_all_dim)
    return _yarn_scale(config.factor, 1.0)


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, blend in between by turns per original context."""
    turns = config.original_length * frequencies / (2 * math.pi)
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.factor)


def _yarn(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Keep dims that turn more than beta_fast times, stretch those below beta_slow, ramp between. Source: arXiv 2309.00071."""

    def dim_with_turns(turns: float) -> float:
        length = config.original_length / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(length) / (2 * math.log(config.theta))

    first, last = dim_with_turns(config.beta_fast), dim_with_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    span = last - first if last != first else 0.001
    stretched = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched) + frequencies / config.factor * stretched


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

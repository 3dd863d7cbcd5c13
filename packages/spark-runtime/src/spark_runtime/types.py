"""What the scheduler and a model runner say to each other. No torch here: the scheduler's tests run without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol

SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the logits.

    temperature 0 is greedy. top_k 0, top_p 1.0, min_p 0.0 and top_n_sigma 0.0 switch their filter off; penalties of 0 and
    repetition_penalty 1.0, dry_multiplier 0.0 and xtc_probability 0.0 do nothing.
    The draw is a pure function of (seed, position), so a sequence's tokens do not depend on its neighbours.

    presence_penalty, frequency_penalty   taken off the logits of tokens of the answer so far, once and per occurrence
    repetition_penalty                    divides positive and multiplies negative logits of tokens of prompt and answer
    logit_bias                            (token id, added to its logit); each id once
    dry_*                                 "don't repeat yourself": a token that would go on a repetition of n tokens loses
                                          multiplier * base ** (n - allowed_length); dry_breakers end a repetition
    xtc_*                                 "exclude top choices": with the probability, all tokens above the threshold but the
                                          least likely of them are left out
    num_logprobs                          alternatives to report for each token; None = no log probabilities at all
    num_prompt_logprobs                   the same for the tokens of the prompt
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    top_n_sigma: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: tuple[int, ...] = ()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of the model's own distribution: before temperature, penalties, filters and grammars.

    top   (token id, log probability) of the likeliest tokens, best first, as many as were asked for; the token itself is
          among them only if it belongs there
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step: a decode token or a prefill chunk.

    token_ids    tokens to run now, at positions start, start + 1, ...; never empty
    start        tokens of this sequence that are in the KV cache already
    block_ids    every block of the sequence in order; they cover start + len(token_ids) tokens. Steps of one sequence
                 share the list, and more blocks are appended to it between steps
    sampling     how to draw the token after the last one; None for an inner prefill chunk, which draws none
    forbidden    token ids that may not be drawn (EOS while min_tokens is not reached)
    history      every token of the sequence, those of this step included; steps of one sequence share the list
    num_prompt   how many of them are the prompt
    allowed      bitmask of the tokens that may be drawn, int32 [ceil(V / 32)], least significant bit first (a numpy array);
                 None = all
    """

    sequence: SequenceId
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[BlockId]
    sampling: SamplingParams | None
    forbidden: Sequence[int] = ()
    history: Sequence[int] = ()
    num_prompt: int = 0
    allowed: Any = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step brought; keys of the mappings are places in the list of steps.

    tokens            the token drawn for each step, None where sampling is None
    logprobs          of the drawn tokens, where asked for
    prompt_logprobs   of prompt tokens start + 1 … start + len(token_ids) (less those beyond the prompt), where asked for;
                      the first token of a prompt has none
    """

    tokens: list[int | None]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


class Runner(Protocol):
    """A model on a device, as the scheduler sees it. One thread calls it."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool; block ids are 0 .. num_blocks - 1."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    def step(self, steps: Sequence[SequenceStep]) -> StepResult:
        """Run one forward pass over all steps and draw tokens.

        Raises DeviceError when the device failed; the engine process then ends.
        """

    def release(self, sequence: SequenceId) -> None:
        """Forget what is kept for a sequence that ended or lost its blocks; the latter starts again at 0, in other blocks.

        Its blocks are the scheduler's.
        """

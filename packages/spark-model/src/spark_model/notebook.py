"""Models in a notebook: load one by name, let it answer, look at its logits and hidden states.

import spark_model
model = spark_model.load("smollm2")
model.generate("What is the capital of France?")
model.forward(model.tokenizer.encode("Paris is")).hidden_states[3]  # [T, hidden]
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spark_model.chat_template import ChatTemplate, load_chat_template
from spark_model.checkpoint import ModelFacts
from spark_model.config import ModelConfig
from spark_model.errors import ModelError
from spark_model.factory import create_model
from spark_model.facts import read_facts
from spark_model.layers.decoder import Decoder
from spark_model.loaders import open_weights
from spark_model.reference import resolve_model
from spark_model.runner import DtypeName, ModelRunner, build_batch, check_length, choose_precision
from spark_model.tokenizer import Tokenizer, load_tokenizer
from spark_runtime.kvcache.pool import KvPool
from spark_runtime.types import BlockId, SamplingParams, SequenceId, SequenceStep

Messages = Sequence[Mapping[str, Any]]

_ALONE = SequenceId(0)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Forward:
    """One pass over a sequence of T tokens.

    logits         [T, V]  row t scores the token after token t
    hidden_states  one [T, hidden] per layer: the residual stream that the layer hands on, before the final norm
    """

    logits: Tensor
    hidden_states: list[Tensor]


class LoadedModel:
    """A model with its tokenizer and chat template. Each call starts anew: nothing is kept between calls."""

    def __init__(
        self, model: Decoder, facts: ModelFacts, tokenizer: Tokenizer, chat_template: ChatTemplate | None
    ) -> None:
        self.model = model
        self.facts = facts
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    def generate(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        raw: bool = False,
    ) -> str:
        """What the model writes after a prompt, up to its end-of-turn token or max_tokens.

        prompt        a text, taken as one user message where the model has a chat template; or a conversation
        temperature   0 always takes the likeliest token
        raw           continue the text as it is, without the chat template

        Raises ModelError if the prompt does not fit the model's context, or a conversation meets no template.
        """
        token_ids = self.encode_prompt(prompt, raw=raw)
        sampling = SamplingParams(temperature, top_p, top_k, min_p, seed)
        return self.tokenizer.decode(self._generate_ids(token_ids, max_tokens, sampling), at_start=not raw)

    def chat(self, messages: Messages, **options: Any) -> str:
        """The assistant's next message in a conversation; options as in `generate`."""
        return self.generate(messages, **options)

    def encode_prompt(self, prompt: str | Messages, *, raw: bool = False) -> list[int]:
        """The token ids that `generate` starts from."""
        if isinstance(prompt, str) and (raw or self.chat_template is None):
            return self.tokenizer.encode(prompt, add_special=True)
        if self.chat_template is None or raw:
            reason = "raw=True" if raw else "the model has no chat template"
            raise ModelError(f"a conversation needs a chat template, got {reason}; give the prompt as one text")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.tokenizer.encode(self.chat_template.render(messages))

    def forward(self, token_ids: Sequence[int]) -> Forward:
        """Logits and hidden states of every token. Raises ModelError for an empty or too long sequence or unknown ids."""
        self._check_ids(token_ids)
        return forward_alone(self.model, token_ids)

    def _generate_ids(self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
        """Drawn ids without the one that ended the turn."""
        self._check_ids(prompt)
        last = min(len(prompt) + max_tokens, self.facts.context_length)
        pool, blocks = _pool_for(self.model, last)
        runner = ModelRunner(self.model, pool)
        drawn: list[int] = []
        pending, start = list(prompt), 0
        while start + len(pending) < last:
            [token] = runner.step([SequenceStep(_ALONE, pending, start, blocks, sampling)]).tokens
            assert token is not None, "the step draws"
            if token in self.facts.eos_token_ids:
                break
            drawn.append(token)
            pending, start = [token], start + len(pending)
        return drawn

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not 0 < len(token_ids) <= self.facts.context_length:
            raise ModelError(
                f"a sequence of {len(token_ids)} tokens; the model takes 1 to {self.facts.context_length} tokens"
            )
        vocab_size = self.model.config.vocab_size
        unknown = [token for token in token_ids if not 0 <= token < vocab_size]
        if unknown:
            raise ModelError(f"token id {unknown[0]} is outside the vocabulary of {vocab_size} tokens")


def load(
    reference: str,
    *,
    dtype: DtypeName = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    cache_dir: Path | None = None,
    allow_download: bool = False,
) -> LoadedModel:
    """Load a model by recipe name, directory, .gguf file, package:NAME/PATH or Hugging Face id.

    dtype            "auto": 16-bit or quantised weights with fp32 activations on the CPU, 16 bit on GPUs
    allow_download   fetch a Hugging Face id that is not in the cache
    """
    checkpoint = resolve_model(reference, cache_dir=cache_dir, allow_download=allow_download)
    facts = read_facts(checkpoint)
    config = ModelConfig.from_facts(facts)
    check_length(config, facts.context_length)
    precision = choose_precision(dtype, facts, device)
    with closing(open_weights(checkpoint)) as source:
        model = create_model(config, source, precision=precision, device=device)
    tokenizer = load_tokenizer(checkpoint)
    return LoadedModel(model, facts, tokenizer, load_chat_template(checkpoint, tokenizer))


def forward_alone(model: Decoder, token_ids: Sequence[int]) -> Forward:
    """Run one sequence in one piece through a cache of its own."""
    pool, blocks = _pool_for(model, len(token_ids))
    step = SequenceStep(_ALONE, token_ids, 0, blocks, sampling=None)
    hidden_states: list[Tensor] = []
    with torch.inference_mode():
        batch, ids, positions = build_batch([step], pool.block_size, model.device)
        logits = model.forward(ids, positions, pool, batch, hidden_states=hidden_states)
    return Forward(logits, hidden_states)


def _pool_for(model: Decoder, num_tokens: int) -> tuple[KvPool, list[BlockId]]:
    """A pool that holds one sequence, and its blocks."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    pool = KvPool.create(
        model.kv_shapes(model.config),
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    return pool, [BlockId(block) for block in range(num_blocks)]

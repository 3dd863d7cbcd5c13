"""Continuous batching: requests in, one forward pass a step, tokens and endings out.

A request starts with the blocks of its prompt and takes more as its answer grows, because most answers are far shorter
than their max_tokens. Blocks can therefore run out half way. The newest running request then gives up all of its own,
waits at the head of the queue and prefills its prompt and answer so far when there is room again. A token depends on the
tokens before it and on (seed, position) only, so the client sees a pause and nothing else.

Costs per step grow with the number of running sequences only, not with prompt or answer lengths.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from spark_runtime.kvcache.blocks import BlockAllocator
from spark_runtime.types import Runner, SequenceId, SequenceStep, StepResult
from spark_server.config import SchedulerConfig
from spark_server.engine.frames import EngineStats, Output, Submit
from spark_server.scheduler.admission import can_start, context_tokens, refusal
from spark_server.scheduler.batch import decode_steps, prefill_steps
from spark_server.scheduler.policy import FifoPolicy
from spark_server.scheduler.preemption import grow
from spark_server.scheduler.sequence import LiveSequence


class Scheduler:
    """Owns the KV blocks and every request between submit and its one ending. Used from one thread."""

    def __init__(self, config: SchedulerConfig, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._runner = runner
        self._clock = clock
        self._policy = FifoPolicy()
        self._blocks = BlockAllocator(runner.num_blocks)
        self._block_size = runner.block_size
        # In order of arrival, both; whoever runs came before whoever waits.
        self._waiting: OrderedDict[SequenceId, LiveSequence] = OrderedDict()
        self._running: dict[SequenceId, LiveSequence] = {}
        self._refused: dict[SequenceId, Output] = {}
        self._earliest_deadline = math.inf
        self._num_steps = 0
        self._num_preemptions = 0
        self.context = context_tokens(config.max_model_len, runner.num_blocks, runner.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._refused)

    def stats(self) -> EngineStats:
        return EngineStats(
            self._num_steps,
            len(self._running),
            len(self._waiting),
            self._blocks.num_free,
            self._blocks.num_blocks,
            self._num_preemptions,
        )

    def submit(self, request: Submit) -> None:
        """Queue a request. One that cannot be served ends with the error output of the next step."""
        id = SequenceId(request.request_id)
        if id in self._waiting or id in self._running or id in self._refused:
            raise ValueError(f"request id {id} is in use")
        message = self._refusal(request)
        if message is not None:
            self._refused[id] = Output(id, [], finish="error", error=message)
            return
        sequence = LiveSequence.from_submit(
            request, context=self.context, block_size=self._block_size, now=self._clock()
        )
        self._waiting[id] = sequence
        if sequence.deadline is not None:
            self._earliest_deadline = min(self._earliest_deadline, sequence.deadline)

    def abort(self, request_id: int) -> None:
        """Forget a request wherever it is: no output of it follows. An unknown id has just ended and is ignored."""
        id = SequenceId(request_id)
        self._refused.pop(id, None)
        self._drop(id)

    def step(self) -> list[Output]:
        """Run one forward pass, if there is anything to run, and return what it brought, at most one output a request.

        Raises what the runner raises; the scheduler is of no use afterwards.
        """
        outputs = list(self._refused.values())
        self._refused.clear()
        outputs.extend(self._expire())
        self._grow()
        admitted = self._admit()
        batch = decode_steps(self._running.values())
        batch += prefill_steps(
            self._policy.prefill_order(self._running), self._config.max_prefill_tokens, self._config.max_model_len
        )
        if batch:
            result = self._runner.step(batch)
            self._num_steps += 1
            outputs.extend(self._take(batch, result))
        # A request that made a token in the step that admitted it has said so; the others say that they run.
        outputs.extend(Output(sequence.id, []) for sequence in admitted if sequence.num_made == 0)
        return outputs

    def _refusal(self, request: Submit) -> str | None:
        if len(self._waiting) + len(self._running) >= self._config.max_num_seqs:
            return f"{self._config.max_num_seqs} requests run or wait, the limit of --max-num-seqs; try again later"
        return refusal(request, self._config, num_blocks=self._blocks.num_blocks, block_size=self._block_size)

    def _grow(self) -> None:
        for victim in grow(self._running, self._blocks, self._policy):
            self._runner.release(victim.id)
            self._waiting[victim.id] = victim
            self._waiting.move_to_end(victim.id, last=False)
            self._num_preemptions += 1

    def _admit(self) -> list[LiveSequence]:
        """Move requests from waiting to running while the next one fits; it is never passed by a smaller one.

        Returns those that run for the first time.
        """
        admitted: list[LiveSequence] = []
        while len(self._running) < self._config.max_batch_size:
            sequence = self._policy.next_to_admit(self._waiting)
            if sequence is None or not can_start(sequence, self._running.values(), self._blocks.num_free):
                break
            del self._waiting[sequence.id]
            if not sequence.was_admitted:
                admitted.append(sequence)
            sequence.start(self._blocks.allocate(sequence.num_first_blocks))
            self._running[sequence.id] = sequence
        return admitted

    def _take(self, batch: Sequence[SequenceStep], result: StepResult) -> Iterator[Output]:
        for step, token in zip(batch, result.tokens, strict=True):
            sequence = self._running[step.sequence]
            sequence.num_cached += len(step.token_ids)
            if (token is None) != (step.sampling is None):
                raise RuntimeError(f"runner gave token {token} for a step with sampling {step.sampling}")
            if token is None:
                continue
            finish = sequence.take(token)
            if finish is None:
                yield Output(sequence.id, [token])
                continue
            self._drop(sequence.id)
            yield Output(sequence.id, [token], finish, token if finish == "stop" else None)

    def _expire(self) -> Iterator[Output]:
        """End every request whose deadline has passed. Looks at all of them only when the earliest one has."""
        now = self._clock()
        if now < self._earliest_deadline:
            return
        self._earliest_deadline = math.inf
        for sequence in [*self._running.values(), *self._waiting.values()]:
            if sequence.deadline is None:
                continue
            if sequence.deadline <= now:
                self._drop(sequence.id)
                yield Output(sequence.id, [], finish="timeout")
            else:
                self._earliest_deadline = min(self._earliest_deadline, sequence.deadline)

    def _drop(self, id: SequenceId) -> None:
        self._waiting.pop(id, None)
        sequence = self._running.pop(id, None)
        if sequence is not None:
            self._blocks.release(sequence.block_ids)
            self._runner.release(id)

"""Every order of submit, abort, step and passing time, on small pools: what holds in all of them."""

from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from spark_runtime.types import SamplingParams, SequenceStep
from spark_server.config import SchedulerConfig
from spark_server.engine.frames import Output, Submit
from spark_server.engine.testing import ScriptedOptions, ScriptedRunner, scripted_tokens
from spark_server.scheduler.scheduler import Scheduler

VOCAB = 6
BLOCK = 4


class Orders(RuleBasedStateMachine):
    """The runner asserts the contract of a step; this compares outputs with the requests and the clock."""

    def __init__(self, num_blocks: int, config: SchedulerConfig) -> None:
        super().__init__()
        self.config = config
        options = ScriptedOptions(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB)
        self.runner = ScriptedRunner(options, records=True)
        self.scheduler = Scheduler(config, self.runner, clock=lambda: self.now)
        self.now = 0.0
        self.requests: dict[int, Submit] = {}
        self.deadlines: dict[int, float] = {}
        self.open: list[int] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.num_checked = 0
        self.num_released = 0
        self.num_ended = 0
        self.num_preemptions = 0
        self.started: set[int] = set()
        self.prefill_end: dict[int, int] = {}
        self.paused: dict[int, int] = {}  # how many had ended when this one lost its blocks
        self.answered: set[int] = set()

    @initialize(lengths=st.lists(st.integers(1, 10), min_size=2, max_size=6))
    def crowd(self, lengths: list[int]) -> None:
        """What makes blocks run out: short prompts that start together and end with the context only."""
        for length in lengths:
            self.submit(length, 500, set(), 0, 0.0, 1.0)

    @rule(
        length=st.integers(0, 6) | st.integers(0, 45),
        max_tokens=st.integers(0, 20) | st.just(500),
        stop=st.just(set()) | st.sets(st.integers(0, VOCAB - 1), max_size=2),
        min_tokens=st.integers(0, 4),
        deadline=st.sampled_from([0.0, 0.0, 1.0, 5.0]),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def submit(
        self, length: int, max_tokens: int, stop: set[int], min_tokens: int, deadline: float, temperature: float
    ) -> None:
        id = len(self.requests)
        request = Submit(
            id,
            [(id + position) % VOCAB for position in range(length)],
            max_tokens,
            SamplingParams(temperature=temperature, seed=id),
            stop_token_ids=sorted(stop),
            min_tokens=min_tokens,
            deadline_s=deadline,
        )
        self.requests[id] = request
        self.deadlines[id] = self.now + deadline if deadline else float("inf")
        self.open.append(id)
        self.scheduler.submit(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            id = data.draw(st.sampled_from(sorted(self.requests)))
            self.scheduler.abort(id)
            if id in self.open:
                self.open.remove(id)
                self.count_endings([id])
            self.check_releases()

    @rule(num_steps=st.integers(1, 5) | st.integers(10, 30))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.check_step(self.scheduler.step())

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        stats = self.scheduler.stats()
        assert stats.running <= self.config.max_batch_size
        assert stats.running + stats.waiting <= min(self.config.max_num_seqs, len(self.open))
        assert stats.running or stats.free_blocks == stats.total_blocks
        assert stats.preemptions == self.num_preemptions

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.check_step(self.scheduler.step())
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
        assert self.open == []

    def check_step(self, outputs: list[Output]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs), "two outputs of one request"
        gone = {output.request_id for output in outputs if output.finish in ("error", "timeout")}
        live = [id for id in self.open if id not in gone]
        self.count_endings(gone)
        batches = self.runner.steps[self.num_checked :]
        self.num_checked = len(self.runner.steps)
        assert len(batches) == (1 if live else 0), "requests, and no step"
        for batch in batches:
            self.check_batch(batch, live)
        for output in outputs:
            self.check_output(output)
        self.check_releases()
        self.count_endings([output.request_id for output in outputs if output.finish in ("stop", "length")])
        assert all(self.deadlines[id] > self.now for id in self.open)
        assert self.started <= self.answered, "runs, and its client does not know"

    def check_batch(self, batch: list[SequenceStep], live: list[int]) -> None:
        """The oldest run, whether they were paused or not; the tokens are those that the client has."""
        assert len(batch) <= self.config.max_batch_size
        assert sorted(step.sequence for step in batch) == live[: len(batch)], "an older one is passed"
        prefill_tokens = 0
        for step in batch:
            id, end = step.sequence, step.start + len(step.token_ids)
            history = self.requests[id].token_ids + self.tokens[id]
            assert list(step.token_ids) == history[step.start : end]
            assert (step.sampling is not None) == (end == len(history))
            if step.start == 0:
                assert id not in self.started or self.paused.pop(id) < self.num_ended, "resumed into the same lack"
                self.started.add(id)
                self.prefill_end[id] = len(history)
            if step.start < self.prefill_end[id]:
                prefill_tokens += len(step.token_ids)
        assert prefill_tokens <= (self.config.max_prefill_tokens or self.config.max_model_len)

    def count_endings(self, ids: Iterable[int]) -> None:
        """Of what has run: these give back blocks, or leave those that were free for them to the next in the queue."""
        self.num_ended += sum(id in self.started for id in ids)

    def check_releases(self) -> None:
        """The runner has heard of every sequence that lost its blocks since the last look."""
        for id in self.runner.released[self.num_released :]:
            if id in self.open:
                self.paused[id] = self.num_ended
                self.num_preemptions += 1
        self.num_released = len(self.runner.released)
        self.paused = {id: count for id, count in self.paused.items() if id in self.open}

    def check_output(self, output: Output) -> None:
        id = output.request_id
        assert id in self.open, "output after the ending or the abort"
        assert output.token_ids or output.finish or id not in self.answered, "admitted twice"
        self.answered.add(id)
        self.tokens[id] += output.token_ids
        request = self.requests[id]
        room = self.scheduler.context - len(request.token_ids)
        wanted = scripted_tokens(
            request.token_ids,
            min(request.max_tokens, room),
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            min_tokens=request.min_tokens,
            vocab_size=VOCAB,
        )
        assert self.tokens[id] == wanted[: len(self.tokens[id])]
        if output.finish is None:
            assert len(self.tokens[id]) < len(wanted)
            return
        self.open.remove(id)
        if output.finish == "stop":
            assert self.tokens[id] == wanted and output.stop_token_id == wanted[-1]
        elif output.finish == "length":
            assert self.tokens[id] == wanted and wanted[-1] not in request.stop_token_ids
        elif output.finish == "timeout":
            assert self.deadlines[id] <= self.now
        else:
            assert output.finish == "error" and output.error and not self.tokens[id]


@pytest.mark.parametrize(
    ("num_blocks", "max_batch_size", "max_num_seqs", "max_prefill_tokens", "max_model_len"),
    [
        (1, 3, 8, 8, 40),
        (3, 4, 8, 3, 60),
        (5, 2, 6, 8, 17),
        (6, 6, 10, 0, 60),
        (8, 3, 5, 1, 60),
        (9, 4, 8, 8, 30),
        (12, 6, 10, 3, 60),
        (12, 5, 8, 0, 44),
        (40, 4, 2, 5, 25),
        (20, 1, 3, 8, 2),
    ],
)
def test_any_order(
    num_blocks: int, max_batch_size: int, max_num_seqs: int, max_prefill_tokens: int, max_model_len: int
) -> None:
    config = SchedulerConfig("fifo", max_batch_size, max_num_seqs, max_prefill_tokens, max_model_len)
    run_state_machine_as_test(
        lambda: Orders(num_blocks, config),  # type: ignore[arg-type]  # it takes whatever makes a machine
        settings=settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True),
    )

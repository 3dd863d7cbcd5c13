"""Every order of submit, abort, step and passing time, on small pools: what holds in all of them."""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spark_runtime.types import SamplingParams
from spark_server.config import SchedulerConfig
from spark_server.engine.frames import Output, Submit
from spark_server.engine.testing import ScriptedOptions, ScriptedRunner, scripted_tokens
from spark_server.scheduler.scheduler import Scheduler

VOCAB = 6
BLOCK = 4


class Orders(RuleBasedStateMachine):
    """The runner asserts the contract of a step; this compares outputs with the requests and the clock."""

    @initialize(
        num_blocks=st.integers(1, 12),
        max_batch_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        max_prefill_tokens=st.sampled_from([0, 1, 3, 8]),
        max_model_len=st.integers(2, 40),
    )
    def start(
        self, num_blocks: int, max_batch_size: int, max_num_seqs: int, max_prefill_tokens: int, max_model_len: int
    ) -> None:
        self.now = 0.0
        self.config = SchedulerConfig("fifo", max_batch_size, max_num_seqs, max_prefill_tokens, max_model_len)
        options = ScriptedOptions(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB)
        self.runner = ScriptedRunner(options, records=True)
        self.scheduler = Scheduler(self.config, self.runner, clock=lambda: self.now)
        self.requests: dict[int, Submit] = {}
        self.deadlines: dict[int, float] = {}
        self.open: list[int] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.num_checked = 0
        self.newest = -1

    @rule(
        length=st.integers(0, 45),
        max_tokens=st.integers(0, 20),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
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
            temperature=temperature,
            seed=id,
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

    @rule(num_steps=st.integers(1, 5))
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

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            outputs = self.scheduler.step()
            assert outputs or len(self.runner.steps) > self.num_checked, "work, and nothing happens"
            self.check_step(outputs)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
        assert self.open == []

    def check_step(self, outputs: list[Output]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs), "two outputs of one request"
        for output in outputs:
            self.check_output(output)
        assert all(self.deadlines[id] > self.now for id in self.open)
        for batch in self.runner.steps[self.num_checked :]:
            prefill_tokens = [len(s.token_ids) for s in batch if s.start < len(self.requests[s.sequence].token_ids)]
            limit = self.config.max_prefill_tokens or self.config.max_model_len
            assert sum(prefill_tokens) <= limit and len(batch) <= self.config.max_batch_size
            assert all(step.sequence > self.newest for step in batch if step.start == 0), "admitted out of order"
            self.newest = max(self.newest, *(step.sequence for step in batch))
        self.num_checked = len(self.runner.steps)

    def check_output(self, output: Output) -> None:
        id = output.request_id
        assert id in self.open, "output after the ending or the abort"
        self.tokens[id] += output.token_ids
        request = self.requests[id]
        room = self.scheduler.context - len(request.token_ids)
        sampling = SamplingParams(temperature=request.temperature, seed=request.seed)
        wanted = scripted_tokens(
            request.token_ids,
            min(request.max_tokens, room),
            sampling=sampling,
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


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

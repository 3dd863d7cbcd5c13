"""A scheduler on a scripted model with a clock that stands still, for tests."""

from collections import defaultdict

from spark_server.config import SchedulerConfig
from spark_server.engine.frames import Output
from spark_server.engine.testing import ScriptedOptions, ScriptedRunner
from spark_server.scheduler.scheduler import Scheduler


class Bench:
    """A scheduler, its runner, a clock that stands still, and every output by request."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_batch_size: int = 8,
        max_num_seqs: int = 64,
        max_prefill_tokens: int = 16,
        max_model_len: int = 128,
    ) -> None:
        self.now = 0.0
        self.runner = ScriptedRunner(ScriptedOptions(num_blocks=num_blocks, block_size=4), records=True)
        self.config = SchedulerConfig("fifo", max_batch_size, max_num_seqs, max_prefill_tokens, max_model_len)
        self.scheduler = Scheduler(self.config, self.runner, clock=lambda: self.now)
        self.outputs: dict[int, list[Output]] = defaultdict(list)

    def step(self) -> list[Output]:
        outputs = self.scheduler.step()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def ending(self, request_id: int) -> Output:
        (ending,) = [output for output in self.outputs[request_id] if output.finish is not None]
        assert ending is self.outputs[request_id][-1]
        return ending

    def assert_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(position * 31 + salt) % 1000 for position in range(length)]

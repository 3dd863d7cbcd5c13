"""Which waiting request is next, and which prompts are prefilled first. One small class a policy."""

from collections.abc import Iterable, Mapping

from spark_runtime.types import SequenceId
from spark_server.scheduler.sequence import LiveSequence


class FifoPolicy:
    """First come, first served. Both mappings are in order of arrival."""

    def next_to_admit(self, waiting: Mapping[SequenceId, LiveSequence]) -> LiveSequence | None:
        """The one request that may be admitted now; nothing passes it, however small."""
        return next(iter(waiting.values()), None)

    def prefill_order(self, running: Mapping[SequenceId, LiveSequence]) -> Iterable[LiveSequence]:
        return running.values()

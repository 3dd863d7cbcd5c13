"""Which request is next, which gives way, and which prompts are prefilled first. One small class a policy."""

from collections.abc import Iterable, Mapping

from spark_runtime.types import SequenceId
from spark_server.scheduler.sequence import LiveSequence


class FifoPolicy:
    """First come, first served.

    Both mappings are in order of arrival, and who runs came before who waits: the newest that runs gives way, to the
    head of those who wait. So the oldest request of all keeps running to its end, then the next one does.
    """

    def next_to_admit(self, waiting: Mapping[SequenceId, LiveSequence]) -> LiveSequence | None:
        """The one request that may be admitted now; nothing passes it, however small."""
        return next(iter(waiting.values()), None)

    def next_to_preempt(self, running: dict[SequenceId, LiveSequence]) -> LiveSequence:
        return next(reversed(running.values()))

    def prefill_order(self, running: Mapping[SequenceId, LiveSequence]) -> Iterable[LiveSequence]:
        return running.values()

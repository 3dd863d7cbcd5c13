"""What happens when KV blocks run out: a running sequence loses its blocks and waits to go on."""

from spark_runtime.kvcache.blocks import BlockAllocator
from spark_runtime.types import SequenceId
from spark_server.scheduler.policy import FifoPolicy
from spark_server.scheduler.sequence import LiveSequence


def grow(running: dict[SequenceId, LiveSequence], blocks: BlockAllocator, policy: FifoPolicy) -> list[LiveSequence]:
    """Give each running sequence, oldest first, the block that its next token needs; return the victims in their order.

    A victim is out of `running` and holds no blocks. One is taken only when no block is free, so what it leaves, less
    the block that was needed, is too little for it to start again: it comes back only after another one has ended.
    """
    victims: list[LiveSequence] = []
    for sequence in list(running.values()):
        if not sequence.needs_block:
            continue
        while blocks.num_free == 0 and sequence.id in running:
            assert len(running) > 1, f"sequence {sequence.id} runs alone and needs more blocks than the pool has"
            victim = policy.next_to_preempt(running)
            del running[victim.id]
            blocks.release(victim.give_up_blocks())
            victims.append(victim)
        if sequence.id in running:
            blocks.extend(sequence.block_ids, 1)
    return victims

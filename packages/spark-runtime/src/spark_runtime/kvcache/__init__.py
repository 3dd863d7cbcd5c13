"""The paged KV cache: its memory. Which sequence owns which block is the scheduler's business."""

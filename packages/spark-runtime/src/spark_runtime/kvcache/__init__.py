"""The paged KV cache: its memory (pool.py) and who owns which block (blocks.py, no torch)."""

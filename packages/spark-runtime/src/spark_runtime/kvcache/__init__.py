"""KV cache: who owns which block (blocks.py, no torch) and the memory behind them. Importing this package imports no torch."""

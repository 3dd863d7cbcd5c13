"""Device, memory, KV cache and ranks. Knows no model and no request. Importing this package imports no torch."""

"""Maths of spark: one folder an op, a torch reference and device kernels. Importing this package imports no torch.

Ops: `rmsnorm` (rmsnorm, add_rmsnorm), `rope` (apply_rope), `silu_mul`, `paged_attention` (PagedBatch, write_kv,
paged_attention), `linear` (create_linear, create_embedding), `moe` (moe_forward), `sampling` (SamplingRow, sample).
`ggml` reads GGUF's quantised blocks, `errors` is the root of every error.
"""

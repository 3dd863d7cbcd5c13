"""Maths of spark: one folder an op, a torch reference and device kernels. Importing this package imports no torch."""

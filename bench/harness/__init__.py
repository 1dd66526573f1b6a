"""Shared parts of the benchmarks: options, ranks and their clock, the batches, the reference, the table."""

"""What the benchmarks share: options, ranks and their clock, the batches, the reference, the table."""

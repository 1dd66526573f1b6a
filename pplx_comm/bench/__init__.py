"""The latency benchmark: the library beside the bare copies or writes that it cannot beat, and the peers that it must."""

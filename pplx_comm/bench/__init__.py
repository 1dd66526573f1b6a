"""The latency benchmark: the library beside bare copies or writes, which it cannot beat, and peers, which it must."""

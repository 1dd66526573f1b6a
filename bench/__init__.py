"""Benchmarks of the library, run from a checkout: `python bench/latency.py --help`.

Each script here answers one question. harness/ is what they share, cpu/ and gpu/ measure a device, model/ predicts what cannot be
measured here, results/ has what was measured.
"""

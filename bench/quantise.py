"""Quantising, by wire: what the CPU device's kernels take on one thread.

python bench/quantise.py --hidden 7168 --rows 64
"""

from __future__ import annotations

import argparse
import time

if __name__ == "__main__":
    import checkout  # noqa: F401

import torch

import pplx_comm._core as _core
from bench import _instruments
from pplx_comm.wire import Wire

WIRES = (Wire.FP8, Wire.FP8_UE8M0, Wire.MXFP8)
DTYPES = {"bf16": (torch.bfloat16, "BFLOAT16"), "fp16": (torch.float16, "FLOAT16"), "fp32": (torch.float32, "FLOAT32")}


def seconds(isa: str, dtype: str, rows: int, hidden: int, repeats: int) -> dict[Wire, float]:
    """The least CPU time of this thread over the repeats. Wires take turns; other processes do not count."""
    tensor, name = DTYPES[dtype]
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(tensor)
    codes, scales = torch.empty(rows, hidden, dtype=torch.uint8), torch.empty(rows * hidden, dtype=torch.uint8)
    best = dict.fromkeys(WIRES, float("inf"))
    for _ in range(repeats):
        for wire in WIRES:
            begun = time.thread_time()
            _instruments.quantise(
                isa, _core.Wire.__members__[wire.name], _core.Dtype.__members__[name], x.data_ptr(), rows, hidden, codes.data_ptr(),
                scales.data_ptr(),
            )  # fmt: skip
            best[wire] = min(best[wire], time.thread_time() - begun)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a row (7168)")
    parser.add_argument("--rows", type=int, default=64, help="rows at a time; 64 of bf16 stay in a second-level cache (64)")
    parser.add_argument("--repeats", type=int, default=100, help="repetitions, of which the fastest counts (100)")
    o = parser.parse_args()
    print(f"{o.rows} rows of {o.hidden}, one thread; GB/s of what is read, and the time as a multiple of FP8's")
    print(f"{'isa':<9} {'dtype':<5}  " + "  ".join(f"{wire.value:>16}" for wire in WIRES))
    for isa in ("baseline", "avx2", "avx512"):
        if not _instruments.runs(isa):
            print(f"{isa:<9} off: this processor does not run it")
            continue
        for dtype, (tensor, _) in DTYPES.items():
            took = seconds(isa, dtype, o.rows, o.hidden, o.repeats)
            nbytes = o.rows * o.hidden * tensor.itemsize
            cells = [f"{nbytes / took[wire] / 1e9:>8.2f} {took[wire] / took[Wire.FP8]:>6.2f}x" for wire in WIRES]
            print(f"{isa:<9} {dtype:<5}  " + "  ".join(cells))


if __name__ == "__main__":
    main()

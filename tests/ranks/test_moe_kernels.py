"""The Triton kernels of pplx_comm.moe: in Triton's interpreter beside torch, and compiled for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import Crew, run_ranks, seed
from moe_reference import MoECase

pytest.importorskip("triton")
# Its interpreter takes arrays of one element for numbers, which numpy has given up.
interpreted = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs numpy < 2.4")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """A fresh interpreter: Triton reads the variable when it is imported."""
    with Crew(1, {"TRITON_INTERPRET": "1"}, spawn=True) as crew:
        yield crew


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "tma"), [("even", True), ("zipf", True), ("hot", True), ("zipf", False)], ids=lambda of: str(of)
)
def test_products(crew: Crew, spread: str, tma: bool) -> None:
    """tma: operands come by descriptors, else by pointers."""
    for small in (False, True):
        (found,) = crew.run("moe_kernel_cases:products", spread, tma, small, seed(), timeout=120)
        assert max(found.values()) < 1e-4, (small, found)


@interpreted
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_products_of_codes(crew: Crew, tma: bool) -> None:
    for spread, small in (("zipf", False), ("hot", False), ("zipf", True)):
        (found,) = crew.run("moe_kernel_cases:products_of_codes", spread, tma, small, seed(), timeout=120)
        assert max(found.values()) < 1e-6, (spread, small, found)


@interpreted
@pytest.mark.parametrize("case", ["formats", "weights", "activations", "padded", "mx"])
def test_rows(crew: Crew, case: str) -> None:
    (found,) = crew.run(f"moe_kernel_cases:{case}", seed(), timeout=120)
    assert all(found.values()), found


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_both_products_in_one_launch(crew: Crew, layout: str, tma: bool) -> None:
    (found,) = crew.run("moe_kernel_cases:pair", layout, tma, seed(), timeout=120)
    assert all(found.values()), found


@interpreted
@pytest.mark.slow
def test_programs_that_wait_for_each_other(tmp_path: Path) -> None:
    """A tile of the second product waits for the blocks of its rows, which another process is slow to write."""
    with Crew(2, {"TRITON_INTERPRET": "1"}, spawn=True) as crew:
        for found in crew.run("moe_kernel_cases:pair_of_processes", str(tmp_path / "shared"), seed(), timeout=120):
            assert all(found.values()), found


@pytest.mark.slow
def test_compiled_for_a_gpu(tmp_path: Path) -> None:
    """Compiled for compute capability 9.0, and 10.0 for MXFP8, with their tensor cores where there are products."""
    (found,) = run_ranks(1, "moe_kernel_cases:compiled", str(tmp_path), timeout=120)
    assert len(found) == 34
    for name, instructions in found.items():
        assert (instructions > 0) == ("weights" in name or "experts" in name), found


@interpreted
@pytest.mark.slow
def test_a_layer() -> None:
    """All of a layer that has kernels, on two ranks. Of e4m3 the interpreter rounds what is quantised here too badly for more."""
    with Crew(2, {"TRITON_INTERPRET": "1"}, spawn=True) as crew:
        for precision, compute, limit in (("bf16", None, 0.002), ("fp8", "bf16", 0.045)):
            case = MoECase(seed(), 2, "zipf", precision, compute, "float16", hidden=128, intermediate=96, gemm="triton")
            for found in crew.run("moe_cases:whole_step", case, timeout=120):
                assert max(found.values()) < 2 * limit, (precision, found)

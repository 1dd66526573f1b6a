"""The format of a token's payload between ranks."""

from __future__ import annotations

from enum import Enum

import torch

from pplx_comm.errors import Error


class Wire(str, Enum):
    """NATIVE sends the tokens' own dtype. The others send float8_e4m3fn codes and the scales of blocks of a row:

    FP8: a float32 per 128 elements, amax / 448.
    FP8_UE8M0: a float32 per 128 elements, a power of two.
    MXFP8: an e8m0 byte (uint8, the exponent of a power of two plus 127) per 32 elements.

    A value is code * scale. A power of two is the smallest that is at least amax / 448 ("round up"), never below 2^-127; so no
    value saturates, and a code is value / scale rounded once, to nearest even. A block of zeros has scale 1. A block with a NaN or
    an infinity decodes to NaN: its scale is NaN (0xff in e8m0). A block ends with its row, so the last one may be short.
    """

    NATIVE = "native"
    FP8 = "fp8"
    FP8_UE8M0 = "fp8_ue8m0"
    MXFP8 = "mxfp8"

    @classmethod
    def of(cls, value: Wire | str) -> Wire:
        """The wire of that name."""
        try:
            return cls(value.lower() if isinstance(value, str) and not isinstance(value, Wire) else value)
        except ValueError:
            names = ", ".join(repr(w.value) for w in cls)
            raise Error(f"wire={value!r} is not a wire format; there are {names}") from None

    @property
    def quantised(self) -> bool:
        """True if dispatched rows are codes with scales."""
        return self is not Wire.NATIVE

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of d.scale and x_scale."""
        return torch.uint8 if self is Wire.MXFP8 else torch.float32

    @property
    def scale_block(self) -> int:
        """Elements that share a scale."""
        return 32 if self is Wire.MXFP8 else 128

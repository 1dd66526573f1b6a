"""What a token's payload looks like between ranks."""

from __future__ import annotations

from enum import Enum

from .errors import Error


class Wire(str, Enum):
    """NATIVE sends the tokens' own dtype. FP8 sends e4m3 with one float32 scale per 1x128 elements."""

    NATIVE = "native"
    FP8 = "fp8"
    FP8_UE8M0 = "fp8_ue8m0"
    MXFP8 = "mxfp8"

    @classmethod
    def of(cls, value: Wire | str) -> Wire:
        try:
            return cls(value.lower() if isinstance(value, str) and not isinstance(value, Wire) else value)
        except ValueError:
            names = ", ".join(repr(w.value) for w in cls)
            raise Error(f"wire={value!r} is not a wire format; there are {names}") from None

"""The MoE layer on a command line."""

from __future__ import annotations

import argparse

import torch

from pplx_comm.errors import Error
from pplx_comm.layouts import Compact, Layout, Padded, Ragged
from pplx_comm.wire import Wire

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _wire(text: str) -> str:
    try:
        return Wire.of(text).value
    except Error as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("the MoE layer")
    shape.add_argument("--tokens", type=numbers, default=(1, 8, 32, 128), metavar="N,N,...", help="tokens per rank (1,8,32,128)")
    shape.add_argument("--hidden", type=positive, default=7168, help="elements of a token (7168)")
    shape.add_argument("--experts", type=positive, default=256, help="experts of all ranks together (256)")
    shape.add_argument("--top-k", type=positive, default=8, help="experts per token (8)")
    shape.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of dispatch's input and combine's output (bf16)")
    shape.add_argument(
        "--wire", type=_wire, default="native", help="format of dispatched rows: native, fp8, fp8_ue8m0 or mxfp8 (native)"
    )
    shape.add_argument(
        "--layout", choices=("ragged", "padded", "compact"), default="ragged", help="layout of received rows (ragged)"
    )
    shape.add_argument("--align", type=positive, help="each expert's rows start at a multiple of it (ragged: 128, padded: 1)")


def layout_of(arguments: argparse.Namespace) -> Layout:
    if arguments.layout == "compact":
        return Compact()
    align = {} if arguments.align is None else {"align": arguments.align}
    return Ragged(**align) if arguments.layout == "ragged" else Padded(**align)

"""tools/carrier_calls.py finds a call of NVSHMEM's that may wait, however deep, and only where a kernel comes to it."""

from __future__ import annotations

import carrier_calls
import pytest

PUT = "_Z28nvshmemi_transfer_put_signalIL13threadgroup_t0EEvPvS1_mS1_m14nvshmemi_amo_tib"
QUIET = "_Z23nvshmemi_transfer_quietIL13threadgroup_t0EEvb"
OF_ALL = "_Z14nvshmemi_quietIL13threadgroup_t0EEvv"


def call(name: str) -> str:
    return f"{{ // callseq 4, 0\n\t.param .b64 param0;\n\tst.param.b64 [param0], %rd1;\n\tcall.uni \n\t{name}, \n\t(\n\tparam0\n\t);\n\t}}\n"


def returning(name: str) -> str:
    return f"\tcall.uni (retval0), \n\t{name}, \n\t(\n\tparam0\n\t);\n"


def ptx(kernel: str, helper: str = "", unused: str = "") -> str:
    """A module as nvcc writes it: what others define, functions before their bodies, and a function that no kernel calls."""
    return "\n".join(
        [
            ".version 9.0\n.target sm_90a\n.address_size 64\n",
            *(f".extern .func {name}\n(\n\t.param .b64 {name}_param_0\n)\n;" for name in (PUT, QUIET)),
            ".func  (.param .b32 func_retval0) helper\n(\n\t.param .b64 helper_param_0\n)\n;",
            f".weak .func {OF_ALL}()\n{{\n{call(QUIET)}\tret;\n}}",
            f".visible .entry kernel(\n\t.param .align 8 .b8 kernel_param_0[8]\n)\n.maxntid 128\n{{\n{kernel}\tret;\n}}",
            f".func  (.param .b32 func_retval0) helper(\n\t.param .b64 helper_param_0\n)\n{{\n{helper}\tret;\n}}",
            f".weak .func unused()\n{{\n{unused}\tret;\n}}",
        ]
    )


@pytest.mark.parametrize(
    ("kernel", "helper", "unused", "said"),
    [
        ("", "", "", []),
        (call(PUT), "", call(OF_ALL), []),
        (returning("helper"), call(PUT), "", []),
        (call(QUIET), "", "", ["kernel calls nvshmemi_transfer_quiet<(threadgroup_t)0>"]),
        (call(PUT) + returning("helper"), call(QUIET), "", ["kernel calls nvshmemi_transfer_quiet<(threadgroup_t)0>"]),
        ("\tcall (retval0), %rd7, (param0), prototype_0;\n", "", "", ["kernel calls a function by its address"]),
        (f"\t// {QUIET} is not called\n", "", "", []),
    ],
    ids=["nothing", "a put", "a put in a function", "quiet", "quiet in a function", "an address", "a comment"],
)
def test_calls(kernel: str, helper: str, unused: str, said: list[str]) -> None:
    assert carrier_calls.wrong_calls(ptx(kernel, helper, unused)) == said


def test_a_wait_in_a_function_of_nvshmem_s_own_header() -> None:
    """Both names are told: the waiting function may be what the header inlines."""
    said = carrier_calls.wrong_calls(ptx(returning("helper"), call(OF_ALL)))
    assert [line.split()[-1] for line in said] == ["nvshmemi_quiet<(threadgroup_t)0>", "nvshmemi_transfer_quiet<(threadgroup_t)0>"]


def test_functions_that_call_each_other() -> None:
    assert carrier_calls.wrong_calls(ptx(returning("helper"), returning("helper") + call("kernel"))) == []

"""The order of our operators in what inductor generates.

Effects order them in torch's graph, where a token goes from one to the next. Lowered, nothing is left of the tokens, and inductor's
scheduler may move what no data orders: a layer that has no tokens reads nothing of the layer before it. An older torch makes each
effectful kernel read the one before; 2.11 and 2.13 name the kernel by its buffer where the scheduler looks for its operation, and
never find the dependency. A lowering of our own adds it under the right name. Where torch does too, that is the same one twice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType

from pplx_comm.errors import Error


def keep_order() -> None:
    """Keeps the order of operators in each trace. Imports inductor, which takes seconds, only when one of its traces comes by."""
    if "torch._inductor.lowering" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    try:
        from torch._inductor.lowering import register_lowering

        for name in ("dispatch", "combine", "release"):
            op = getattr(torch.ops.pplx_comm, name).default
            register_lowering(op, type_promotion_kind=None)(_ordered(op))
    except (ImportError, TypeError) as problem:
        raise _unknown() from problem


def _ordered(op: Any) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower = fallback_handler(op, add_to_fallback_set=False)

    def ordered(*args: Any, **kwargs: Any) -> Any:
        known = len(V.graph.operations)
        outputs = lower(*args, **kwargs)
        try:
            previous = V.graph.effectful_ops.get(_EffectType.ORDERED)
            (kernel,) = (o for o in V.graph.operations[known:] if getattr(o, "op_overload", None) is op)
            if previous is not None:
                V.graph.additional_star_deps[kernel.get_operation_name()].add(previous.get_name())
        except (AttributeError, ValueError) as problem:
            raise _unknown() from problem
        return outputs

    return ordered


def _unknown() -> Error:
    return Error(
        f"the inductor of torch {torch.__version__} is not one that is known to run steps in the program's order: "
        "compile with backend='aot_eager'"
    )

"""The arguments of calls, all checked before anything is sent."""

from __future__ import annotations

import torch

from pplx_comm.device.arguments import Sent
from pplx_comm.device.session import Session
from pplx_comm.errors import Error
from pplx_comm.handles import Combining, Dispatched, Owner, Plan
from pplx_comm.layouts import Compact, Padded
from pplx_comm.wire import Wire


class Checks:
    """Raises an Error for arguments that a call of this AllToAll must not be given."""

    def __init__(self, session: Session) -> None:
        self._config = session.config
        self._dtype, self._wire, self._layout, self._device = session.dtype, session.wire, session.layout, session.device
        self._hooks = bool(session.request.hooks)
        self._hidden, self._top_k, self._experts = session.hidden, session.top_k, int(session.config.local_experts)

    def handle(self, call: str, handle: Dispatched | Combining, kind: type[Dispatched] | type[Combining], owner: Owner) -> None:
        if not isinstance(handle, kind):
            wanted = "what dispatch returned" if kind is Dispatched else "what combine_send returned"
            raise Error(f"{call} takes {wanted}, not {type(handle).__name__}")
        if handle.owner is not owner:
            raise Error(f"{call}: this handle belongs to another AllToAll")

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def tokens(self, x: torch.Tensor, x_scale: torch.Tensor | None) -> int:
        if not isinstance(x, torch.Tensor):
            raise Error(f"dispatch: x must be a tensor, not {type(x).__name__}")
        wanted = self._dtype if x_scale is None else torch.float8_e4m3fn
        if x_scale is not None and not self._wire.quantised:
            raise Error("dispatch: x_scale= needs wire='fp8', 'fp8_ue8m0' or 'mxfp8'")
        if x.dtype != wanted:
            hint = " (float8_e4m3fn goes with x_scale=)" if x.dtype == torch.float8_e4m3fn else ""
            raise Error(f"dispatch: x is {x.dtype}, this AllToAll takes {wanted}{hint}")
        self._tensor("dispatch: x", x, (None, self._hidden))
        if x.shape[0] > self._config.max_tokens:
            raise Error(f"dispatch: {x.shape[0]} tokens are more than max_tokens_per_rank={self._config.max_tokens}")
        if x_scale is not None:
            self._scale(x_scale, (x.shape[0], self._config.scales_per_row))
        return int(x.shape[0])

    def ids(self, topk_ids: torch.Tensor | None, tokens: int) -> torch.Tensor:
        if topk_ids is None:
            raise Error("dispatch: give topk_ids, or plan= of an earlier dispatch")
        if not isinstance(topk_ids, torch.Tensor) or topk_ids.dtype not in (torch.int32, torch.int64):
            raise Error(f"topk_ids must be int32 or int64, not {getattr(topk_ids, 'dtype', type(topk_ids).__name__)}")
        ids = _contiguous("topk_ids", topk_ids)
        self._tensor("topk_ids", ids, (tokens, self._top_k))
        return ids

    def weights(self, name: str, weights: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        if weights is None:
            return None
        if not isinstance(weights, torch.Tensor) or weights.dtype != torch.float32:
            raise Error(f"{name} must be a float32 tensor, not {getattr(weights, 'dtype', type(weights).__name__)}")
        weights = _contiguous(name, weights)
        self._tensor(name, weights, (tokens, self._top_k))
        return weights

    def expert_groups(self, groups: int) -> None:
        if not self._hooks:
            raise Error("dispatch: expert_groups= needs an AllToAll with hooks=True")
        if isinstance(self._layout, Compact):
            raise Error("dispatch: with Compact a row belongs to several experts, so expert_groups= has no meaning")
        if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
            raise Error(f"dispatch: expert_groups={groups!r} must be a number of groups, from 1 on")

    @staticmethod
    def plan_of(plan: Plan, owner: Owner, generation: int, topk_ids: torch.Tensor | None) -> None:
        if not isinstance(plan, Plan):
            raise Error(f"dispatch: plan= takes d.plan of an earlier dispatch, not {type(plan).__name__}")
        if plan.owner is not owner:
            raise Error("dispatch: this plan belongs to another AllToAll")
        if topk_ids is not None:
            raise Error("dispatch: plan= replaces topk_ids; give one of them")
        if plan.generation != generation:
            raise Error("dispatch: this plan is from before reset()")

    def plan(self, owner: Owner, sent: Sent, generation: int) -> Plan:
        """Returns the plan of `sent`, with the weights of `sent` if it has some."""
        x, topk_ids, topk_weights, x_scale, plan = sent
        assert plan is not None
        self.plan_of(plan, owner, generation, topk_ids)
        tokens = self.tokens(x, x_scale)
        if plan.tokens != tokens:
            raise Error(f"dispatch: x has {tokens} tokens, the plan is for {plan.tokens}")
        weights = self.weights("topk_weights", topk_weights, tokens)
        return plan if weights is None else plan.with_weights(weights)

    # ---- combine -----------------------------------------------------------------------------------------------------

    @staticmethod
    def received(d: Dispatched) -> None:
        if not d.received:
            raise Error("combine: nothing was received yet: call wait() (or dispatch_recv) on the dispatch first")
        if d.used:
            raise Error("combine: this dispatch was combined or released already; a step is combined once")

    def expert_rows(self, expert_out: torch.Tensor) -> int:
        """Returns the bytes from row to row."""
        if not isinstance(expert_out, torch.Tensor):
            raise Error(f"combine: expert_out must be a tensor, not {type(expert_out).__name__}")
        if expert_out.dtype != self._dtype:
            raise Error(f"combine: expert_out is {expert_out.dtype}, must be {self._dtype}")
        if isinstance(self._layout, Padded):
            group = self._config.max_per_expert
            self._tensor("combine: expert_out", expert_out, (self._experts, group, self._hidden))
            if expert_out.numel() and expert_out.stride(0) != group * expert_out.stride(1):
                raise Error("combine: the rows of expert_out must be evenly spaced; call .contiguous()")
            return expert_out.stride(1) * expert_out.element_size()
        self._tensor("combine: expert_out", expert_out, (None, self._hidden))
        return expert_out.stride(0) * expert_out.element_size()

    def totals(self, totals: torch.Tensor) -> int:
        """Returns its address."""
        if totals.dtype != torch.int32 or not totals.is_contiguous():
            raise Error(f"dispatch: totals must be a contiguous int32 tensor, not {totals.dtype}, strides {totals.stride()}")
        self._tensor("dispatch: totals", totals, (self._experts,))
        return totals.data_ptr()

    def enough_rows(self, name: str, rows: int, filled: int) -> None:
        needed = min(filled, self._config.max_rows)
        if not isinstance(self._layout, Padded) and rows < needed:
            raise Error(f"combine: {name} has {rows} rows, this dispatch filled {needed}")

    def combine_weights(self, weights: torch.Tensor | None, weighted: bool, tokens: int) -> torch.Tensor | None:
        if weights is None:
            return None
        if not weighted:
            raise Error("combine: weights= and weighted=False contradict each other")
        if isinstance(self._layout, Compact):
            raise Error("combine: with Compact the caller weights its rows itself, so weights= has no meaning")
        return self.weights("combine: weights", weights, tokens)

    def tail(self, tail: torch.Tensor | None) -> torch.Tensor | None:
        """Returns it contiguous."""
        if tail is None:
            return None
        if not isinstance(tail, torch.Tensor) or tail.dtype != torch.float32:
            raise Error(f"combine: tail must be a float32 tensor, not {getattr(tail, 'dtype', type(tail).__name__)}")
        tail = _contiguous("combine: tail", tail)
        shape: tuple[int | None, ...] = (None,)
        if isinstance(self._layout, Padded):
            shape = (self._experts, self._config.max_per_expert)
        elif isinstance(self._layout, Compact):
            shape = (None, self._top_k)
        self._tensor("combine: tail", tail, shape)
        return tail

    def out(self, out: torch.Tensor | None, accumulate: bool, tokens: int) -> torch.Tensor | None:
        if out is None:
            if accumulate:
                raise Error("combine: accumulate=True needs out=")
            return None
        if not isinstance(out, torch.Tensor) or out.dtype != self._dtype:
            raise Error(f"combine: out must be a {self._dtype} tensor, not {getattr(out, 'dtype', type(out).__name__)}")
        self._tensor("combine: out", out, (tokens, self._hidden))
        if tokens > 1 and out.stride(0) < self._hidden:
            raise Error("combine: the rows of out overlap in memory (an expanded tensor?); give it rows of its own")
        return out

    # ---- any -----------------------------------------------------------------------------------------------------------

    def _scale(self, x_scale: torch.Tensor, shape: tuple[int, int]) -> None:
        wanted = self._wire.scale_dtype
        each = f"{wanted} {list(shape)}, a scale per {self._wire.scale_block} elements of a row on wire={self._wire.value!r}"
        if not isinstance(x_scale, torch.Tensor):
            raise Error(f"dispatch: x_scale must be a tensor, {each}, not {type(x_scale).__name__}")
        if x_scale.dtype != wanted and not (self._wire is Wire.MXFP8 and x_scale.dtype == torch.float8_e8m0fnu):
            raise Error(f"dispatch: x_scale is {x_scale.dtype}, must be {each}")
        if tuple(x_scale.shape) != shape:
            raise Error(f"dispatch: x_scale has shape {tuple(x_scale.shape)}, must be {each}")
        if x_scale.device != self._device:
            raise Error(f"dispatch: x_scale is on {x_scale.device}, this AllToAll works on {self._device}")
        _dense("dispatch: x_scale", x_scale)

    def _tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
        _dense(name, tensor)
        have = tensor.shape
        alike = have == shape or (shape[0] is None and len(have) == len(shape) and have[1:] == shape[1:])
        if alike and tensor.device == self._device and tensor.is_contiguous():
            return  # nearly always, and quickly
        if tensor.device != self._device:
            raise Error(f"{name} is on {tensor.device}, this AllToAll works on {self._device}")
        good = tensor.dim() == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not good:
            wanted = ", ".join("tokens" if n is None else str(n) for n in shape)
            raise Error(f"{name} has shape {tuple(tensor.shape)}, must be [{wanted}]")
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise Error(f"{name} must be contiguous in its last dimension; call .contiguous()")


def _dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise Error(f"{name} is {tensor.layout}: it must be dense; call .to_dense()")


def _contiguous(name: str, tensor: torch.Tensor) -> torch.Tensor:
    _dense(name, tensor)
    return tensor.contiguous()

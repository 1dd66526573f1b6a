"""The layer."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pplx_comm.all_to_all import AllToAll, tell
from pplx_comm.communicator import Communicator
from pplx_comm.errors import Error
from pplx_comm.handles import Combining
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe import routing
from pplx_comm.moe.experts import Experts, SharedExpert
from pplx_comm.moe.placement import Placement
from pplx_comm.moe.ran import Ran
from pplx_comm.moe.routed import Options, Pass, finish, send
from pplx_comm.moe.router import Router, RouterOptions, Routing
from pplx_comm.moe.sharding import shard
from pplx_comm.moe.shared_all_to_all import shared_all_to_all
from pplx_comm.moe.stranded import telling
from pplx_comm.wire import Wire
from pplx_comm.wiring.compare import Attempts, agree, compare, plain, raised_by_all
from pplx_comm.wiring.config import integer

WIRES = {"bf16": Wire.NATIVE, "fp8": Wire.FP8_UE8M0, "mxfp8": Wire.MXFP8}


_OF_A_RANK = {
    "self", "__class__", "comm", "mesh", "all_to_all", "of_step", "gemm", "scaled_gemm",
    "device", "nics", "num_sms", "placement", "symmetric_memory",
}  # fmt: skip
"""Arguments of the layer and of its AllToAll in which ranks may differ, and names that are none."""


class Opened:
    """Held by each Begun of a call. Where all are dropped before finish(), the other ranks hear of it."""

    def __init__(self, one: Pass) -> None:
        self.one = one

    def __del__(self) -> None:
        one = self.one
        d = one.returning.dispatched if isinstance(one.returning, Combining) and not one.returning.done else one.sent
        if d is not None and not sys.is_finalizing():
            del one.ticket  # its graph holds the pass
            # In a thread of its own: the garbage collector comes at any moment, when this one may hold locks.
            threading.Thread(target=d.owner.strand, args=(d, "finish", "its call was begun and dropped"), daemon=True).start()


@dataclass(frozen=True)
class Begun:
    """A call between its parts. Call finish() with it, or the step that it has open fails on all ranks."""

    opened: Opened
    one: Pass
    ticket: torch.Tensor
    """Ties the parts of a pass together for autograd."""
    computed: bool
    shared: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype


class MoE(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a Communicator. Making one is collective.

    Every rank calls it in the same order, with its own tokens, possibly none, and runs its backward pass. No token is dropped.

    hidden, intermediate: elements of a token, and of a row between an expert's two products.
    num_experts, top_k: experts of all ranks, and experts that a token visits. Expert e lives on rank
        e // ceil(num_experts / world_size).
    expert_tp: tensor parallelism inside of experts: `expert_tp` neighbouring ranks have the same experts, each a slice of
        `intermediate`. Tokens travel to all of them, and combine adds up what they make. top_k * expert_tp is at most 16.
    comm: the ranks. Layers of one shape share an AllToAll.
    precision: how rows travel. "bf16" as they are, in `dtype`; "fp8" as e4m3 with a power of two per 1x128; "mxfp8" per 1x32. The
        latter two go for tokens forward and gradients back; sums come home in `dtype`.
    compute: what the experts' products take: "bf16", which is `dtype`, or "fp8". None follows precision.
    max_tokens_per_rank: the most that any rank passes in one call.
    max_rows: the most rows that a rank's experts can receive, padding included. More is never clipped silently: the next call
        raises on every rank. None is the worst case, if that is at most 1 GiB.
    decode_tokens: for inference: calls of which the ranks know that none has more tokens than this take a path of their own, where
        each expert has room for all of them (Padded), and whose products read each weight once; see forward(). 0 for none.
    router: how tokens choose; see RouterOptions.
    shared_intermediate: `intermediate` of an expert that all tokens visit, computed while tokens travel. 0 for none.
    shared_gate: that expert's output is multiplied with a sigmoid.
    dtype: dtype of tokens inside the layer, and of sums.
    param_dtype: dtype of the parameters; None is `dtype`.
    recompute: what the backward pass computes again: "nothing", "activations", "dispatch"; see functional.Options.
    gemm, scaled_gemm: the backends of the grouped products; "auto" measures once per shape and power of two of an expert's rows.
    main_grad: the experts' weights get a float32 attribute `main_grad`, and passes add to that in place of `grad`. Not under FSDP2,
        which has other means.
    inference: no gradients; the experts' e4m3 codes are made once, and rows between their segments are not cleared.
    mesh: a one-dimensional torch DeviceMesh over the same ranks: the experts' weights become DTensors, as distributed checkpoints
        and FSDP2 want them. With expert_tp=, its second dimension are the ranks that share experts.
    seed: parameters follow from it, the same on all ranks, and an expert's whichever rank has it.
    all_to_all: further arguments of the AllToAll: device, transport, in_flight, timeout, ...
    """

    aux_loss: torch.Tensor
    """After a call: the losses of the router with their coefficients, to be added to the loss."""
    load: torch.Tensor
    """float32 [experts]: choices that fell on each since the last update_bias(), of calls in training mode on this rank."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        comm: Communicator,
        precision: str = "bf16",
        *,
        compute: str | None = None,
        max_tokens_per_rank: int = 4096,
        max_rows: int | None = None,
        decode_tokens: int = 0,
        expert_tp: int = 1,
        router: RouterOptions | None = None,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        param_dtype: torch.dtype | None = None,
        recompute: str = "nothing",
        gemm: str = "auto",
        scaled_gemm: str = "auto",
        main_grad: bool = False,
        inference: bool = False,
        mesh: Any = None,
        seed: int = 0,
        all_to_all: dict[str, Any] | None = None,
    ) -> None:
        router, of_step = router or RouterOptions(), dict(all_to_all or {})
        asked = dict(locals())
        super().__init__()
        self.comm, self.precision, self.inference, self.main_grad = comm, precision, inference, main_grad
        self.options, self.placement, choices = _agreed(comm, asked)
        quantised, targets = self.options.quantised, self.placement.num_targets
        align = 128 if quantised or precision != "bf16" else 16

        def over(tokens: int, layout: Ragged | Padded) -> AllToAll:
            return shared_all_to_all(
                comm, num_experts=targets, top_k=choices, hidden=hidden, max_tokens_per_rank=tokens, dtype=dtype,
                wire=WIRES[precision], layout=layout, scale_layout="tma" if precision == "fp8" else "row", **of_step,
            )  # fmt: skip

        self.decode_a2a = over(decode_tokens, Padded(align=align)) if decode_tokens else None
        self.a2a = (
            self.decode_a2a
            if self.decode_a2a is not None and decode_tokens == max_tokens_per_rank
            else over(max_tokens_per_rank, Ragged(align, zero_pad=not inference, max_rows=max_rows))
        )
        device, kept = self.a2a.device, param_dtype or dtype
        self.router = Router(hidden, num_experts, top_k, router, device=device, dtype=kept)
        self.experts = Experts(self.placement, hidden, intermediate, device, kept, constant=inference)
        self.shared = SharedExpert(hidden, shared_intermediate, shared_gate, device, kept) if shared_intermediate else None
        self._ran: dict[int, Ran] = {}
        self.load = torch.zeros(num_experts, device=device)
        self.reset_parameters(seed)
        if mesh is not None:
            shard(self.experts, mesh, num_experts, expert_tp)
        if main_grad:
            self.experts.add_main_grad()

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Fresh parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.router.reset_parameters()
        self.experts.reset_parameters(seed)
        if self.shared is not None:
            self.shared.reset_parameters(seed)
        self.aux_loss = torch.zeros((), device=self.a2a.device)

    def forward(self, x: torch.Tensor, most_tokens: int | None = None) -> torch.Tensor:
        """x: [..., hidden], this rank's tokens. Returns the same shape and dtype.

        most_tokens: the most tokens that any rank has in this call, or more, if the ranks know: the same number on each. With
            decode_tokens=, it decides the path that all of them take. Products are chosen for `most_tokens`, else for this rank's
            tokens.
        """
        # While a shared expert is computed, tokens travel; else nothing runs between the halves.
        return self.finish(self._begin(x, most_tokens, whole=self.shared is None))

    def begin(self, x: torch.Tensor, most_tokens: int | None = None) -> Begun:
        """The first part of a call: the router, the send half of dispatch, and the shared expert.

        What is computed before the next part runs while tokens travel. With in_flight=2 that may be another microbatch's part; a
        backward pass through both then interleaves them, too. See schedule.one_forward_one_backward.
        """
        return self._begin(x, most_tokens, whole=False)

    def _begin(self, x: torch.Tensor, most_tokens: int | None, whole: bool) -> Begun:
        if self.inference and torch.is_grad_enabled():
            raise Error("MoE(inference=True) has no gradients: call it under torch.no_grad()")
        if self.main_grad and not hasattr(self.experts.gate_up, "main_grad"):
            raise Error(
                "main_grad=True, but the weights that had main_grad were replaced, as fully_shard() does: it reduces gradients in "
                "float32 itself with MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        tokens = x.reshape(-1, x.shape[-1]).to(self.a2a.dtype).contiguous()
        a2a = self._path(len(tokens), most_tokens)
        to = self.router(tokens)
        self._note(to)
        one, opened = _send(a2a, tokens, *self.placement.targets(to.ids, to.weights), self.options, whole, most_tokens)
        _keep(self._ran, len(tokens), one)
        shared = None
        if self.shared is not None:
            # Compiled code cannot tell the beginning: there the end of `opened` tells.
            with contextlib.nullcontext() if torch.compiler.is_compiling() else telling(one.sent, "begin"):
                shared = self.shared(tokens)
        return Begun(opened, one, one.ticket, False, shared, x.shape, x.dtype)

    def compute(self, begun: Begun) -> Begun:
        """The second part: the experts, and the send half of combine."""
        return self._compute(begun, whole=False)

    def _compute(self, begun: Begun, whole: bool) -> Begun:
        return replace(begun, ticket=self.experts(begun.ticket, begun.one, self.options, whole), computed=True)

    def finish(self, begun: Begun) -> torch.Tensor:
        """The last part: the receive half of combine, and the second part where that is left."""
        if not begun.computed:
            begun = self._compute(begun, whole=True)
        y = _finish(begun)
        return (y if begun.shared is None else y + begun.shared).reshape(begun.shape).to(begun.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A layer with weights of its own, on the same AllToAlls: what AveragedModel makes, for example."""
        memo |= {id(one): one for one in (self.comm, self.a2a, self.decode_a2a)}
        memo[id(self.aux_loss)] = self.aux_loss.detach().clone()  # torch copies nothing that has a graph
        new = memo[id(self)] = type(self).__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        if self.main_grad:
            new.experts.add_main_grad()
        return new

    def _path(self, tokens: int, most_tokens: int | None) -> AllToAll:
        if most_tokens is None or self.decode_a2a is None:
            return self.a2a
        if tokens > most_tokens:
            raise Error(f"MoE: got {tokens} tokens, more than most_tokens={most_tokens}")
        return self.decode_a2a if most_tokens <= self.decode_a2a.max_tokens_per_rank else self.a2a

    def _note(self, to: Routing) -> None:
        self.aux_loss = to.loss
        if self.training:
            self.load += to.load

    def choices(self) -> dict[int, Ran]:
        """Returns how calls ran, by this rank's number of tokens, the last call of each number: layout, each product's backend."""
        return dict(self._ran)

    def update_bias(self, rate: float = 1e-3, group: Any = None) -> None:
        """Moves the router's correction bias by the load of all ranks since the last call: after an optimiser's step. Collective.

        group: a torch process group over which to add up the load; None takes the ranks of `comm`.
        """
        if self.router.correction_bias is None:
            raise Error("update_bias: this router has no bias; pass RouterOptions(correction_bias=True)")
        if group is not None:
            torch.distributed.all_reduce(self.load, group=group)
        elif self.comm.world_size > 1:
            loads = self.comm.control.all_gather({"load": self.load.tolist()}, "load")
            self.load.copy_(torch.tensor([one["load"] for one in loads if one is not None]).sum(0))
        routing.update_bias(self.router.correction_bias, self.load, rate)
        self.load.zero_()

    def extra_repr(self) -> str:
        """Adds to print()."""
        e = self.experts.experts
        of, slices = self.placement.num_experts, self.placement.slices
        part = f", slice {self.placement.slice} of {slices}" if slices > 1 else ""
        return f"experts {e.start} to {e.stop - 1} of {of}{part}, top {self.router.top_k}, precision={self.precision!r}"


@torch.compiler.disable
def _send(
    a2a: AllToAll, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, options: Options, whole: bool, most: int | None
) -> tuple[Pass, Opened]:
    """Steps are calls of other ranks too: a compiler leaves them as they are, and compiles what is around them."""
    one = send(a2a, tokens, ids, weights, options, whole=whole, most_tokens=most)
    return one, Opened(one)


@torch.compiler.disable
def _keep(ran: dict[int, Ran], tokens: int, one: Pass) -> None:
    ran[tokens] = one.ran


@torch.compiler.disable
def _finish(begun: Begun) -> torch.Tensor:
    begun.one.ticket = begun.ticket
    return finish(begun.one)


def _agreed(comm: Communicator, asked: dict[str, Any]) -> tuple[Options, Placement, int]:
    """Collective: what _checked() returns. What it raises on any rank, or a difference between ranks, raises on all."""
    attempts, generation = Attempts(), comm.control.generation
    checked = attempts.run(lambda: _checked(comm, asked))
    compared = {name: value for name, value in asked.items() if name not in _OF_A_RANK}
    compared |= {f"all_to_all[{name!r}]": value for name, value in asked["of_step"].items() if name not in _OF_A_RANK}
    try:
        answers = agree(comm.control, "MoE: arguments", {"error": attempts.error, "compared": plain(compared)}, making="MoE")
    except BaseException as problem:
        if not raised_by_all(problem):
            tell(comm.control, problem, "MoE()", generation)
        raise
    compare(answers, "MoE")
    assert checked is not None
    return checked


def _checked(comm: Communicator, asked: dict[str, Any]) -> tuple[Options, Placement, int]:
    """Returns the options, the placement and the targets that a token has, or raises an Error for an argument of the layer."""
    for name, least in (("hidden", 1), ("intermediate", 1), ("num_experts", 1), ("top_k", 1), ("shared_intermediate", 0)):
        integer(name, asked[name], least, 1 << 20)
    if asked["shared_gate"] and not asked["shared_intermediate"]:
        raise Error("shared_gate=True is for a layer with a shared expert: give shared_intermediate= too, or leave it out")
    decode, most = asked["decode_tokens"], asked["max_tokens_per_rank"]
    if decode and not (asked["inference"] and decode <= most):
        raise Error(f"decode_tokens={decode}: this is for inference=True, up to max_tokens_per_rank={most}")
    quantised = _quantised(asked["precision"], asked["compute"])
    placement = Placement(asked["num_experts"], comm.world_size, comm.rank, asked["expert_tp"])
    return Options(quantised, asked["gemm"], asked["scaled_gemm"], asked["recompute"]), placement, placement.top_k(asked["top_k"])


def _quantised(precision: str, compute: str | None) -> bool:
    if precision not in WIRES:
        raise Error(f"precision={precision!r}: must be one of {', '.join(map(repr, WIRES))}")
    if compute not in (None, "bf16", "fp8"):
        raise Error(f"compute={compute!r}: must be 'bf16', 'fp8' or None, which follows precision")
    return precision != "bf16" if compute is None else compute == "fp8"

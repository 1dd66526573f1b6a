"""FlashInfer's one-sided all-to-all (TensorRT-LLM's kernels) as a peer, where it is installed. A dispatch stores each token, its
scales, ids and weights in memory of the ranks that want it; a combine fetches one row from each of them and adds them up. Both wait
for all ranks.

Called as its own NVLinkOneSidedAlltoAll does: all payloads in one dispatch, ids of rows without a token set to -1, answers written
where peers fetch them. That class refuses two dispatches in a row, so its functions are called.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.inputs import Inputs
from bench.harness.batch import Shape, Source
from bench.harness.options import Options
from bench.harness.quantise import quantise
from bench.harness.reference import Wrong
from bench.harness.world import Off, World

NO_TOKEN = -1


class Exchange:
    """Its CommBackend: ranks of a node exchange paths of sockets, through which descriptors of their memory go."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Get_rank(self) -> int:
        return self._world.rank

    def Get_size(self) -> int:
        return self._world.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        all_data = self._world.gather(pickle.dumps(data).hex(), "FlashInfer's exchange")
        return tuple(pickle.loads(bytes.fromhex(one)) for one in all_data)

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self._world.barrier()

    def Split(self, color: int, key: int) -> Exchange:
        return self


class FlashInfer:
    name, in_graphs = "flashinfer", True
    in_pairs = True
    """Combines alone may hang: a thread block that starts late waits for the flag of a round that its peers have left."""

    def __init__(self, imported: Callable[[], Any], world: World, options: Options, device: Any) -> None:
        if options.experts % world.size:
            raise Off(f"flashinfer spreads {options.experts} experts otherwise on {world.size} ranks")
        self._options, self._device = options, device.device
        most = Shape(options, max(options.tokens), world.rank, world.size)
        row = most.payload_bytes + most.scale_bytes + 2 * 4 * options.top_k

        def built() -> tuple[Any, int]:
            """Compiles its kernels at the first call on a machine."""
            library = imported()
            return library, library.moe_a2a_get_workspace_size_per_rank(world.size, most.tokens, row, most.row_bytes)

        self._library, nbytes = world.all_or_none(built, "FlashInfer's kernels")
        mapping = self._library.Mapping(world.size, world.rank, world.size, tp_size=world.size, moe_ep_size=world.size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # only the memory of this class is used
            self._owner = self._library.MoeAlltoAll(
                mapping, most.tokens, options.top_k, options.experts, nbytes,
                mnnvl_config=self._library.mnnvl.MnnvlConfig(comm_backend=Exchange(world)),
            )  # fmt: skip
        self._memory = self._owner.workspace, self._owner.metainfo

    def has_num_sms(self, shape: Shape) -> bool:
        return False

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        self._shape = shape
        self._call = shape.tokens, shape.rank, shape.world, self._options.top_k
        self._payloads = [self._packed(*of_input) for of_input in zip(inputs.x, inputs.ids, inputs.weights, strict=True)]
        self.y = torch.empty(shape.tokens, self._options.hidden, dtype=self._options.dtype, device=self._device)
        self.how = "one-sided all-to-all; combine is a round trip's time less a dispatch's"
        if self._options.check:
            self._check()

    def _packed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        rows = quantise(self._shape.wire, x) if self._shape.quantised else (x,)
        return [*(row.view(torch.uint8) for row in rows), ids.to(torch.int32), weights]

    def dispatch(self, i: int) -> None:
        payloads = self._payloads[i]
        self.received, self._offset, _ = self._library.moe_a2a_dispatch(
            payloads[-2], payloads, *self._memory, *self._call, self._options.experts
        )
        self._library.moe_a2a_sanitize_expert_ids(self.received[-2], *self._memory, self._shape.rank, NO_TOKEN)

    def answers(self) -> torch.Tensor:
        """[rank, token, hidden], after a dispatch: experts write there, and combine takes what lies there."""
        shape, workspace = self._shape, self._memory[0]
        end = self._offset + shape.world * shape.tokens * shape.row_bytes
        answers: torch.Tensor = self._library.moe_a2a_wrap_payload_tensor_in_workspace(
            workspace[shape.rank], [shape.world, shape.tokens], self._offset, end, self._options.dtype
        )
        return answers

    def combine(self, i: int) -> None:
        self._library.moe_a2a_combine(
            self.answers(), self._shape.tokens, *self._memory, *self._call, self._offset, payload_in_workspace=True, output=self.y
        )

    def _check(self) -> None:
        """Rows of the first input, which come in any order; then, with each row as its own answer, a token's sum. What is wrong is
        raised after the combine, in which peers wait for this rank."""
        shape, batch = self._shape, Source(self._shape).batch(0)
        wrong = []
        self.dispatch(0)
        planes, answers = self.received, self.answers()
        for rank in range(shape.world):
            of_rank = batch.x_of(rank), torch.from_numpy(batch.ids[rank]), batch.weights_of(rank)
            wanted = torch.from_numpy(batch.wants[rank, :, shape.rank]).to(self._device)
            sent = _sorted([payload[wanted] for payload in self._packed(*(t.to(self._device) for t in of_rank))])
            n = len(sent)
            if not torch.equal(_sorted([plane[rank, :n] for plane in planes]), sent):
                wrong.append(f"rows from rank {rank} are not those that it sent")
            if not (planes[-2][rank, n:] == NO_TOKEN).all():
                wrong.append(f"more than {n} rows from rank {rank} have ids")
            answers[rank, :n] = self._values(planes[0][rank, :n])
        self.combine(0)
        ranks = torch.from_numpy(batch.wants[shape.rank].sum(axis=1)).to(self._device)
        expected = (self._values(self._payloads[0][0]).float() * ranks[:, None]).to(self.y.dtype)
        if not torch.allclose(self.y, expected, rtol=torch.finfo(self.y.dtype).eps, atol=0):
            wrong.append("sums are not those of the ranks that a token went to")
        if wrong:
            raise Wrong(f"flashinfer, {shape.tokens} tokens, rank {shape.rank}: {'; '.join(wrong)}")

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes without scales are exact in any dtype."""
        wide = rows.view(torch.float8_e4m3fn) if self._shape.quantised else rows.view(self._options.dtype)
        return wide.to(self._options.dtype)

    def close(self) -> None: ...


def _sorted(payloads: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of each row, by a hash of its ids and weights."""
    rows = torch.cat([payload.contiguous().view(torch.uint8) for payload in payloads], dim=1)
    route = torch.cat([payload.contiguous().view(torch.int32) for payload in payloads[-2:]], dim=1).long()
    factors = torch.arange(1, route.shape[1] + 1, device=rows.device) * 0x9E3779B97F4A7C1 + 1
    return rows[(route * factors).sum(1).argsort()]

"""How the rows that a rank receives lie in its output."""

from __future__ import annotations

from dataclasses import dataclass

from pplx_comm.errors import Error


def _positive(name: str, value: int | None, most: int = 2**31 - 1) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
        raise Error(f"{name} must be an integer from 1 to {most}, not {value!r}")


@dataclass(frozen=True)
class Ragged:
    """Rows by expert: ``d.x`` is [rows, hidden], and ``d.offsets`` says where each expert's rows start.

    align: every expert's segment starts at a multiple of it (grouped GEMMs need 128).
    zero_pad: the rows between segments are zero; otherwise they are undefined.
    max_rows: rows of ``d.x``. None takes the worst case, all tokens to this rank, if that is at most 1 GiB.
    """

    align: int = 128
    zero_pad: bool = False
    max_rows: int | None = None

    def __post_init__(self) -> None:
        _positive("Ragged(align=)", self.align, 2**20)
        _positive("Ragged(max_rows=)", self.max_rows)


@dataclass(frozen=True)
class Padded:
    """A batch per expert: ``d.x`` is [local experts, max_tokens_per_expert, hidden], of which ``d.counts`` rows each are valid.

    max_tokens_per_expert: None takes world_size * max_tokens_per_rank; an expert gets more only if tokens name it twice.
    align: max_tokens_per_expert is rounded up to a multiple of it. DeepGEMM's masked kernels need 128: they write whole
        tiles of 64 or 128 rows, past an expert's count too, and overwrite the next one's rows where the last tile ends there.
        torch._grouped_mm, torch.bmm and other kernels that keep to an expert's rows need none.
    """

    max_tokens_per_expert: int | None = None
    align: int = 1

    def __post_init__(self) -> None:
        _positive("Padded(max_tokens_per_expert=)", self.max_tokens_per_expert)
        _positive("Padded(align=)", self.align, 2**20)


@dataclass(frozen=True)
class Compact:
    """Each token once, even if several local experts are chosen: ``d.x`` [rows, hidden], ``d.topk_ids``, ``d.topk_weights``.

    ``combine`` takes one row per received row: the caller adds up its experts' outputs, weighted.
    """


Layout = Ragged | Padded | Compact

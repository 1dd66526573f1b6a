"""The communicator of a process group."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname

from pplx_comm.serving.vllm import rebind
from pplx_comm.serving.vllm.manager import All2AllManager


class Communicator(resolve_obj_by_qualname(rebind.their_communicator())):  # type: ignore[misc]
    """The platform's own, whose all2all is ours."""

    def __init__(self, *arguments: Any, use_all2all: bool = False, **more: Any) -> None:
        config = get_current_vllm_config_or_none()
        mine = use_all2all and config is not None and rebind.ours(config.parallel_config.all2all_backend)
        # Theirs refuses names that it does not know, or takes another backend.
        super().__init__(*arguments, use_all2all=use_all2all and not mine, **more)
        if mine and self.is_ep_communicator:
            rebind.kernels()
            self.use_all2all = True
            self.all2all_manager = All2AllManager(self.cpu_group, more.get("tcp_store_group"), device=self.device)

"""The communicator of a process group."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname

from pplx_comm.serving.vllm import rebind
from pplx_comm.serving.vllm.manager import All2AllManager


class Communicator(resolve_obj_by_qualname(rebind.their_communicator())):  # type: ignore[misc]
    """The platform's own, whose all2all is ours."""

    _wanted = False
    """True if vLLM wants an all2all of this group. Some versions pass it in; others find out from the configuration."""
    _hidden = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        config = get_current_vllm_config_or_none()
        mine = config is not None and rebind.ours(config.parallel_config.all2all_backend)
        # Theirs refuses names that it does not know, or takes another backend: it must not see that one is wanted.
        self._hidden = mine
        super().__init__(*arguments, **more)
        self._hidden = False
        if not mine:
            return
        self.use_all2all = self._wanted and self.is_ep_communicator
        if self.use_all2all:
            rebind.kernels()
            self.all2all_manager = All2AllManager(self.cpu_group, more.get("tcp_store_group"), device=self.device)

    @property
    def use_all2all(self) -> bool:
        return self._wanted and not self._hidden

    @use_all2all.setter
    def use_all2all(self, wanted: bool) -> None:
        self._wanted = wanted

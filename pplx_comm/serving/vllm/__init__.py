"""vLLM over pplx_comm: `vllm serve MODEL --data-parallel-size N --enable-expert-parallel --all2all-backend pplx_comm`.

vLLM calls `register` in each of its processes, by the entry point "vllm.general_plugins". docs/vllm.md says how to use it.

    rebind              everything that is changed in vLLM, with the reason beside each
    versions            which versions of vLLM that was tested with
    communicator        the communicator of a process group, which makes the manager for the group of expert parallel ranks
    manager             the AllToAlls of a worker, one for each shape of layers
    placement           where the experts are
    prepare_finalize    dispatch and combine as vLLM's MoE kernels call them
"""

from pplx_comm.serving.vllm.register import register

__all__ = ["register"]

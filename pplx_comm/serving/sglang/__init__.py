"""SGLang over pplx_comm: `python -m sglang.launch_server --model-path MODEL --tp-size N --moe-a2a-backend pplx_comm`.

SGLang calls `register` in each of its processes, by the entry point "sglang.srt.plugins". docs/sglang.md says how to use it.

    rebind        everything that is changed in SGLang, with the reason beside each
    versions      which versions of SGLang that was tested with
    manager       the AllToAlls of a process, one for each shape of layers
    modes         what the experts are given and give back, in each of SGLang's two modes
    dispatcher    dispatch and combine as SGLang's MoE layers call them
"""

from pplx_comm.serving.sglang.register import register

__all__ = ["register"]

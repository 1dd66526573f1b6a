"""Checks the plug-in's effect on vLLM, asked for or not: run by the engine's Python, `python registering.py VERSION` pretends a
version."""

from __future__ import annotations

import json
import sys
from typing import Any


def outcome(function: Any) -> str:
    try:
        return str(function())
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def main() -> None:
    import vllm

    if sys.argv[1:]:
        vllm.__version__ = sys.argv[1]
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    before = current_platform.get_device_communicator_cls()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from pplx_comm.serving.vllm import rebind, register

    register()  # vLLM calls plug-ins again in some processes
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def parse(*arguments: str) -> Any:
        return parser.parse_args(["--model", "m", *arguments]).all2all_backend

    parallel = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    asked: dict[str, Any] = {
        "loaded": "torch" in sys.modules and "names" in rebind._done,
        "kernels": "kernels" in rebind._done,
        "communicator": current_platform.get_device_communicator_cls() == before,
        "default": outcome(lambda: ParallelConfig(**parallel).all2all_backend),
        "default sequence": outcome(lambda: ParallelConfig(**parallel).use_sequence_parallel_moe),
        "parsed": outcome(lambda: parse("--all2all-backend", "pplx_comm")),
        "parsed other": outcome(lambda: parse("--all2all-backend", "deepep_low_latency")),
        "ours": outcome(lambda: ParallelConfig(**parallel, all2all_backend="pplx_comm").all2all_backend),
        "ours sequence": outcome(lambda: ParallelConfig(**parallel, all2all_backend="pplx_comm").use_sequence_parallel_moe),
        "ours batched": outcome(lambda: ParallelConfig(**parallel, all2all_backend="pplx_comm").use_batched_dp_moe),
    }
    print("REGISTERED " + json.dumps(asked), flush=True)


if __name__ == "__main__":
    main()

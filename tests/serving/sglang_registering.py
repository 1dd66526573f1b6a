"""Checks the plug-in's effect on SGLang, asked for or not. Run by the Python that has SGLang."""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import sys
from typing import Any

import sglang_stubs

sglang_stubs.install()

LAYERS = "sglang.srt.layers.moe.fused_moe_triton.layer"


def outcome(function: Any) -> str:
    try:
        return str(function())
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def main() -> None:
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.runtime_context import SpawnRanks, get_exec
    from sglang.srt.server_args import ServerArgs, publish

    from pplx_comm.serving.sglang import rebind, register

    register()  # a second call changes nothing
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)

    def made(*arguments: str) -> Any:
        with contextlib.redirect_stderr(sys.stdout):
            try:
                parsed = parser.parse_args(["--model-path", "dummy", "--tp-size", "2", *arguments])
            except SystemExit:
                return "refused"
        args = ServerArgs.from_cli_args(parsed)
        args.resolve_once()
        # As it comes to SGLang's other processes.
        return pickle.loads(pickle.dumps(args))

    def backend(*arguments: str) -> str:
        args = made(*arguments)
        return args if args == "refused" else f"{args.moe_a2a_backend} is {resolution_result(args, 'moe_a2a_backend')}"

    asking = ("--moe-a2a-backend", "pplx_comm")

    def published(*arguments: str) -> str:
        publish(made(*arguments), role="scheduler", ranks=SpawnRanks(world_rank=0))
        return f"{get_exec().moe.moe_a2a_backend}, layers {'layers' in rebind._done}"

    def of_another_version(*arguments: str) -> str:
        tested, sglang.__version__ = sglang.__version__, "0.9.0"
        try:
            return backend(*arguments)
        finally:
            sglang.__version__ = tested

    asked = {
        "loaded": "names" in rebind._done,
        "default": outcome(backend),
        "deepep": outcome(lambda: backend("--moe-a2a-backend", "deepep")),
        "unknown": outcome(lambda: backend("--moe-a2a-backend", "pplx_com")),
        "ours": outcome(lambda: backend(*asking)),
        "ray": outcome(lambda: backend(*asking, "--use-ray")),
        "single batch": outcome(lambda: backend(*asking, "--enable-single-batch-overlap")),
        "elastic": outcome(lambda: backend(*asking, "--elastic-ep-backend", "mooncake")),
        "deepep config": outcome(lambda: backend(*asking, "--deepep-config", "{}")),
        "another version": outcome(lambda: of_another_version(*asking)),
        "another version, not asked": outcome(of_another_version),
        "published default": outcome(published),
        "published deepep": outcome(lambda: published("--moe-a2a-backend", "deepep")),
    }
    asked["nothing imported"] = LAYERS not in sys.modules
    asked["published ours"] = outcome(lambda: published(*asking))
    asked["hooks"] = sorted(target.rsplit(".", 1)[1] for target in HookRegistry._patched)
    if LAYERS in sys.modules:
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer, DeepEPConfig

        initialize_moe_config()
        DeepEPBuffer.set_dispatch_mode_as_normal()
        DeepEPBuffer.set_dispatch_mode_as_low_latency()  # cleans a buffer of DeepEP's, if there is one
        asked["mode"] = "changed"
        asked["sms"] = outcome(lambda: DeepEPConfig.get_instance().num_sms)
    print("REGISTERED " + json.dumps(asked), flush=True)


if __name__ == "__main__":
    main()

"""One engine, or one rank of several that start together: run by the engine's Python, prints what it made as JSON.

Ranks are told by RANK and WORLD_SIZE, as torchrun tells them; without them there is one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any


def prompts(count: int) -> list[list[int]]:
    """Token ids, of 3 to 38 tokens."""
    return [[3 + (31 * n + 7 * k) % 509 for k in range(3 + 5 * n)] for n in range(count)]


def break_it(unweighted: bool, stop_at: int) -> None:
    """Plants a fault: combines without the router's weights, or a rank that stops itself in one of its dispatches."""
    import signal

    import pplx_comm

    combine, dispatch, count = pplx_comm.AllToAll.combine_send, pplx_comm.AllToAll.dispatch, 0

    def combine_send(*arguments: Any, **more: Any) -> Any:
        return combine(*arguments, **{**more, "weighted": False})

    def stopping(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == stop_at:
            print("STOPS", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return dispatch(*arguments, **more)

    if unweighted:
        pplx_comm.AllToAll.combine_send = combine_send
    if stop_at:
        pplx_comm.AllToAll.dispatch = stopping


def carried() -> dict[str, Any]:
    """Returns pplx_comm's counts in this rank."""
    from vllm.distributed import get_ep_group

    manager = get_ep_group().device_communicator.all2all_manager
    stats = [a2a.stats() for a2a in manager.all_to_alls()]
    steps = sum(s["steps"] for s in stats)
    if folder := os.environ.get("PPLX_COMM_METRICS"):
        deadline = time.monotonic() + 30
        while steps not in in_metrics(Path(folder)):
            assert time.monotonic() < deadline, (steps, in_metrics(Path(folder)))
            time.sleep(0.1)  # between two writes of the file
    return {"steps": steps, "proxy": any("proxy" in s for s in stats), "all_to_alls": len(stats)}


def in_metrics(folder: Path) -> list[int]:
    """The steps of this process's files there."""
    files = [path.read_text() for path in folder.glob(f"pplx_comm-*-{os.getpid()}-*.prom")]
    return [sum(int(n) for n in re.findall(r"^pplx_comm_steps_total{.*} (\d+)$", text, re.MULTILINE)) for text in files]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--share", choices=("even", "first"), default="even", help="first: all but one prompt to the first engine")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--unweighted", action="store_true", help="break combine: add up without weights")
    parser.add_argument("--stop-at", type=int, default=0, metavar="N", help="rank 1 stops itself in its Nth dispatch")
    arguments = parser.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    engines, engine = world // arguments.tensor_parallel, rank // arguments.tensor_parallel
    everything = prompts(arguments.prompts)
    numbers = list(range(len(everything)))
    mine = numbers[engine::engines] if arguments.share == "even" else numbers[:-1] if engine == 0 else numbers[-1:]

    from vllm import LLM, SamplingParams

    break_it(arguments.unweighted, arguments.stop_at if rank == 1 else 0)
    together: dict[str, Any] = {}
    if world > 1:
        together = {
            "distributed_executor_backend": "external_launcher",
            "data_parallel_size": engines,
            "tensor_parallel_size": arguments.tensor_parallel,
            "enable_expert_parallel": True,
            "all2all_backend": "pplx_comm",
        }
    llm = LLM(
        model=arguments.model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=not arguments.compiled,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        seed=1,
        **together,
    )
    print("READY", flush=True)
    lengths = [arguments.tokens if arguments.share == "even" or engine == 0 else 6 for _ in mine]
    outputs = llm.generate(
        [{"prompt_token_ids": everything[number]} for number in mine],
        [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths],
        use_tqdm=False,
    )
    made = {number: list(output.outputs[0].token_ids) for number, output in zip(mine, outputs, strict=True)}
    if world > 1:
        print("CARRIED " + json.dumps(carried()), flush=True)
    print("TOKENS " + json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()

"""One engine, or one rank of several that start together: run by the engine's Python, prints what it made as JSON.

Ranks are told by RANK and WORLD_SIZE, as torchrun tells them; without them there is one process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys


def prompts(count: int) -> list[list[int]]:
    """Token ids, of 3 to 38 tokens."""
    return [[3 + (31 * n + 7 * k) % 509 for k in range(3 + 5 * n)] for n in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--share", choices=("even", "first"), default="even", help="first: all but one prompt to the first engine")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--backend", default="pplx_comm")
    arguments = parser.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    engines, engine = world // arguments.tensor_parallel, rank // arguments.tensor_parallel
    everything = prompts(arguments.prompts)
    numbers = list(range(len(everything)))
    if arguments.share == "even":
        mine = numbers[engine::engines]
    else:
        mine = numbers[:-1] if engine == 0 else numbers[-1:]

    from vllm import LLM, SamplingParams

    together = {}
    if world > 1:
        together = {
            "distributed_executor_backend": "external_launcher",
            "data_parallel_size": engines,
            "tensor_parallel_size": arguments.tensor_parallel,
            "enable_expert_parallel": True,
            "all2all_backend": arguments.backend,
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
    print("TOKENS " + json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()

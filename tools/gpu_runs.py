"""Runs that need GPUs, for tools/on_gpus.py: proofs, the longest first, so that few run alone in the end; then figures."""

from __future__ import annotations

from dataclasses import dataclass

PYTEST = "{python} -m pytest -p no:cacheprovider -rfEs --durations=8 --maxfail=8"
LIVING = PYTEST + " -m 'not slow and not alone' tests/gpu/"
DECODE = "--tokens 1,8,32,128,512"
LARGE = "--tokens 1024,2048,4096,8192 --num-sms 8,16,24,32,all --pairs 16 --replays 5"
# A pipe without a daemon behind it.
NO_MPS = (("CUDA_MPS_PIPE_DIRECTORY", "/dev/null/no-mps"), ("PPLX_TEST_RANKS_PER_GPU", "1"))
V3 = "--experts {experts} --hidden 7168 --intermediate 2048 --top-k 8"
FLASH = "--experts {experts} --hidden 4096 --intermediate 2048 --top-k 6"


@dataclass(frozen=True)
class Run:
    name: str
    about: str
    minutes: float
    """Time on H200s, roughly; of a proof on four, two ranks each, beside two others. A run that takes twice as long is ended."""
    command: str
    """{python}, {gpus}, {experts} (32 for each GPU) and {out}, a path for files of the run's own, are filled in."""
    gpus: int = 2
    figure: bool = False
    """Measures, so that each rank needs a GPU of its own; else ranks may share one under MPS."""
    alone: bool = False
    """Nothing runs beside it; figures are alone, too."""
    env: tuple[tuple[str, str], ...] = ()


def latency(name: str, about: str, minutes: float, options: str, env: tuple[tuple[str, str], ...] = ()) -> Run:
    command = f"{{python}} bench/latency.py -n {{gpus}} --device cuda --timeout 20 --json {{out}}.json --plot {{out}}.png {options}"
    return Run(name, about, minutes, command, figure=True, env=env)


def layer(name: str, about: str, minutes: float, options: str) -> Run:
    command = f"{{python}} bench/layer.py -n {{gpus}} --device cuda --timeout 60 --json {{out}}.json {options}"
    return Run(name, about, minutes, command, figure=True)


def launched(name: str, about: str, minutes: float, script: str) -> Run:
    """Makes a run of a script that does not start its ranks itself."""
    command = f"{{python}} -m torch.distributed.run --nproc-per-node {{gpus}} {script} --json {{out}}.json"
    return Run(name, about, minutes, command, figure=True)


PROOFS = (
    Run("proof-large", "steps of many tokens", 4, LIVING + "test_large.py"),
    Run("proof-fuzz", "kernels with delays from a seed; compiles both fuzz modules first", 2.4, LIVING + "test_fuzz.py"),
    Run("proof-small", "steps of few tokens: bits, replays, streams, resets", 2.3, LIVING + "test_gpu.py -k 'not memcheck'"),
    Run("proof-hooks", "a kernel that spins on d.arrived", 1.8, LIVING + "test_hooks_gpu.py"),
    Run(
        "proof-nvshmem-steps",
        "40,000 steps over NVSHMEM, fewer where peers are far",
        2,
        PYTEST + " tests/gpu/test_nvshmem.py -m slow -k many_steps",
    ),
    Run("proof-memcheck", "steps under compute-sanitizer", 1.6, LIVING + "test_gpu.py -k memcheck"),
    Run("proof-placement", "blocks in GPU memory", 1.7, LIVING + "test_placement.py"),
    Run("proof-efa", "software EFA NICs; PPLX_LIBFABRIC names a libfabric with efa", 0.7, LIVING + "test_efa.py"),
    Run("proof-nvshmem-far", "NVSHMEM over P2P, peers that are put to", 1.7, LIVING + "test_nvshmem.py -k 'far and not fuzz'"),
    Run("proof-across", "nodes of one GPU, over tcp and shm, chaos among it", 2.1, LIVING + "test_across_nodes.py"),
    Run("proof-moe", "the MoE layer and its products", 1.5, LIVING + "test_moe_gpu.py"),
    Run("proof-nvshmem-near", "NVSHMEM over P2P, peers that stores reach", 1.2, LIVING + "test_nvshmem.py -k 'near and not fuzz'"),
    Run("proof-pieces", "blocks in pieces", 1.1, LIVING + "test_pieces_gpu.py"),
    Run("proof-nvshmem-fuzz", "NVSHMEM with delays from a seed", 1.1, LIVING + "test_nvshmem.py -k fuzz"),
    Run("proof-open-steps", "eager steps among replays, refusals", 0.8, LIVING + "test_open_steps.py"),
    Run("proof-replicas", "ranks that hold the same tokens", 0.9, LIVING + "test_replicas.py"),
    Run("proof-nvshmem-else", "heap, doctor, an NVSHMEM of others", 1, LIVING + "test_nvshmem.py -k 'heap or doctor or already'"),
    Run(
        "proof-alone",
        "ranks that are killed, a GPU that is held: with nothing beside them, a rank a GPU",
        1,
        PYTEST + " -m 'alone and not slow' tests/gpu/",
        alone=True,
        env=NO_MPS,
    ),
    Run(
        "proof-mutants",
        "planted bugs in kernels; not in the two runs of all other proofs",
        25,
        "{python} tests/mutants/run_cuda.py",
    ),
)

FIGURES = (
    latency(
        "large-compact",
        "many tokens, few multiprocessors, beside floor, composite and peers",
        8,
        f"--wire fp8 --layout compact {LARGE}",
    ),
    latency(
        "large-ragged", "the same, a copy of a row for each of its experts", 9, f"--wire fp8 --layout ragged {LARGE} --peers none"
    ),
    latency(
        "large-bf16",
        "a dispatch in bfloat16",
        2,
        "--wire native --layout compact --tokens 4096 --num-sms 24,all --pairs 16 --replays 5",
    ),
    *(
        latency(
            f"large-apart-{share}",
            f"{share} % of a dispatch's thread blocks send, the others receive",
            1,
            "--wire fp8 --layout compact --tokens 4096 --num-sms 24,all --pairs 16 --replays 5 --peers none",
            (("PPLX_COMM_SENDING_SHARE", str(share)),),
        )
        for share in (30, 50, 70, 100)
    ),
    latency(
        "schedules",
        "the floor by order of rows and by way",
        3,
        "--wire fp8 --tokens 4096 --num-sms 8,16,24,32,64,all --schedules all --pairs 16 --replays 5 --peers none",
    ),
    latency("decode", "few tokens, beside floor and peers", 4, f"--wire fp8 {DECODE}"),
    latency("decode-sms", "few tokens on few multiprocessors", 5, f"--wire fp8 {DECODE} --num-sms 8,16,24,32,all --peers none"),
    latency(
        "across",
        "nodes of one GPU over shm and tcp, blocks in parts",
        3,
        f"--wire fp8 {DECODE},1024 --transport mapped,proxy:shm,proxy:tcp --node-size 1 --pairs 16 --replays 5 --peers none",
    ),
    latency(
        "across-whole",
        "the same, blocks as a whole",
        3,
        f"--wire fp8 {DECODE},1024 --transport mapped,proxy:shm,proxy:tcp --node-size 1 --pairs 16 --replays 5 --peers none",
        (("PPLX_COMM_PART_BYTES", "4294967295"),),
    ),
    latency(
        "nvshmem",
        "NVSHMEM over P2P beside mapped memory, and torch's symmetric memory",
        2,
        "--wire fp8 --tokens 1,8,32,128 --transport mapped,nvshmem --node-size 1 --peers symm_mem",
    ),
    launched(
        "crossover",
        "from how many tokens the large kernels win, by multiprocessors",
        4,
        "bench/crossover.py --wire fp8 --layout compact --tokens 128,256,384,512,768,1024 --num-sms 8,16,24,32,all",
    ),
    launched(
        "overlap",
        "a GEMM beside two steps in flight",
        5,
        "bench/overlap.py --tokens 4096 --wire fp8 --layout compact --num-sms 4,8,16,24 --plot {out}.png",
    ),
    layer(
        "layer-v3",
        "the layer of DeepSeek-V3, beside all peers",
        6,
        f"{V3} --tokens 8,128,1024,4096 --plot {{out}}.png",
    ),
    layer(
        "layer-flash",
        "that of a smaller one",
        4,
        f"{FLASH} --tokens 8,128,1024,4096 --plot {{out}}.png",
    ),
    layer(
        "layer-across",
        "nodes of one GPU: what of the network is left beside products",
        2,
        f"{V3} --tokens 128,1024,4096 --precisions fp8 --layers ours --node-size 1 --provider tcp --no-backward",
    ),
    layer(
        "layer-capacity",
        "beside padded capacity",
        2,
        f"{V3} --tokens 1024 --precisions bf16 --routings even,zipf,hot --layers ours,capacity"
        " --capacities 1.25,2,most --capacity-plot {out}.png",
    ),
    Run("l2", "L2 hits of products by the height of supergroups, by ncu", 2, "bash bench/l2.sh", gpus=1, figure=True),
    Run(
        "grouped",
        "grouped products beside loop, torch and DeepGEMM",
        8,
        "{python} bench/grouped.py --device cuda --rounds 7 --json {out}.json --plot {out}.png",
        gpus=1,
        figure=True,
    ),
    Run(
        "train-speed",
        "tokens a second of a model, beside NCCL and torch",
        2,
        "{python} bench/train.py -n {gpus} --device cuda --json {out}.json",
        figure=True,
    ),
    Run(
        "train-losses",
        "500 steps in three precisions",
        8,
        "{python} examples/train.py --device cuda --ranks {gpus} --plot {out}.png",
        figure=True,
    ),
)

RUNS = (*PROOFS, *FIGURES)

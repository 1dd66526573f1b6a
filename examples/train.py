"""A small Mixture-of-Experts language model, trained on bytes, with one precision beside another: python examples/train.py

Its experts are spread over all ranks, everything else is the same on each, and every number of ranks sees the same batches. What
differs between precisions is one argument of the layer. The program starts its ranks itself: one, then two, then four.

It reads the text of this repository's tracked files, so it runs in a git checkout. A tenth of the files is held out: that loss says
whether a model has learned or memorised. On a GPU 500 steps read the rest about four times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is built is found without being installed

import pplx_comm as pc
from pplx_comm.moe import MoE, RouterOptions, expert_parameters

ROOT = Path(__file__).resolve().parents[1]
LAST = 50
"""Steps at the end whose mean loss is compared."""
SIZES = {
    "cpu": {"hidden": 128, "intermediate": 128, "layers": 2, "experts": 8, "batch": 8, "length": 64},
    "cuda": {"hidden": 512, "intermediate": 256, "layers": 4, "experts": 16, "batch": 64, "length": 512},
}
RATES = {"cpu": 2e-3, "cuda": 5e-4}
"""Highest learning rates. At twice that on CPUs, and on GPUs, chance alone can part losses by 1 %."""
HELD_OUT = 10
"""One file of HELD_OUT is held out."""
HELD_OUT_BATCHES = 32


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    """One a step."""
    held_out: float
    """At the end, of text that no step has seen."""


Results = dict[str, Trained]
"""Precision -> result."""


# ---- the model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, comm: pc.Communicator, sizes: dict[str, int], device: str, precision: str, seed: int) -> None:
        super().__init__()
        hidden, tokens = sizes["hidden"], sizes["batch"] // comm.world_size * sizes["length"]
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.moe = MoE(
            hidden, sizes["intermediate"], sizes["experts"], 2, comm, precision, max_tokens_per_rank=tokens,
            shared_intermediate=sizes["intermediate"], param_dtype=torch.float32, seed=seed,
            router=RouterOptions(load_balance=0.01, z=0.001), all_to_all={"device": device},
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.moe(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, comm: pc.Communicator, sizes: dict[str, int], device: str, precision: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the same on all ranks, and for every precision
        hidden = sizes["hidden"]
        self.bytes, self.places = nn.Embedding(256, hidden), nn.Embedding(sizes["length"], hidden)
        self.blocks = nn.Sequential(*(Block(comm, sizes, device, precision, seed + n) for n in range(sizes["layers"])))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight
        return self.head(self.norm(self.blocks(x)))


# ---- training ------------------------------------------------------------------------------------------------------------


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The text of all tracked files: what to learn from, and what is held out."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        sys.exit(f"{Path(__file__).name} reads the tracked files of a git checkout: {listed.stderr.strip()}")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = [content for path in paths if path.is_file() and b"\0" not in (content := path.read_bytes())]
    parts = [[text for n, text in enumerate(texts) if (n % HELD_OUT == 0) == held_out] for held_out in (False, True)]
    learnt, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return learnt, held_out


def batch(text: torch.Tensor, sizes: dict[str, int], step: int, comm: pc.Communicator) -> torch.Tensor:
    """This rank's part of a batch that depends on the step alone: [sequences, length + 1]."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - sizes["length"] - 1, (sizes["batch"],), generator=generator)[comm.rank :: comm.world_size]
    return torch.stack([text[b : b + sizes["length"] + 1] for b in begins.tolist()]).long()


def rate(step: int, steps: int) -> float:
    """Share of the highest rate: up in 20 steps, then down along a cosine, so that the end is not noise."""
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mean_of(loss: torch.Tensor, comm: pc.Communicator) -> float:
    """Over all ranks."""
    mean = loss.detach() / comm.world_size
    dist.all_reduce(mean)
    return float(mean)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: torch.Tensor, sizes: dict[str, int], comm: pc.Communicator, device: str) -> float:
    """Loss on the same batches for every model."""
    model.eval()
    losses = [mean_of(loss_of(model, batch(text, sizes, n, comm).to(device)), comm) for n in range(HELD_OUT_BATCHES)]
    return sum(losses) / len(losses)


def train(comm: pc.Communicator, precision: str, arguments: argparse.Namespace) -> Trained:
    sizes, device, (text, held_out) = SIZES[arguments.device], arguments.device, corpus()
    model = Model(comm, sizes, device, precision, arguments.seed).to(device)
    own = {id(weight) for _, weight in expert_parameters(model)}
    same = [weight for weight in model.parameters() if id(weight) not in own]
    optimiser = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, arguments.steps))
    losses = []
    for step in range(arguments.steps):
        tokens = batch(text, sizes, step, comm).to(device)
        loss = loss_of(model, tokens)
        extra = sum(block.moe.aux_loss for block in model.blocks)
        ((loss + extra) / comm.world_size).backward()
        for weight in same:  # experts have the gradients of all ranks' tokens already
            dist.all_reduce(weight.grad)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(mean_of(loss, comm))
    return Trained(losses, held_out_loss(model, held_out, sizes, comm, device))


def work(arguments: argparse.Namespace) -> None:
    """Runs one rank."""
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        need_gpus(int(os.environ["LOCAL_WORLD_SIZE"]), arguments.share_gpus)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if arguments.device == "cuda" and not arguments.share_gpus else "gloo")
    with pc.Communicator.from_torch() as comm:
        results: Results = {}
        for precision in arguments.precision.split(","):
            begun = time.monotonic()
            one = results[precision] = train(comm, precision, arguments)
            if comm.rank == 0:
                said = f"loss {end(one):.4f}, held out {one.held_out:.4f}, {time.monotonic() - begun:.0f} s"
                print(f"{comm.world_size} ranks, {precision}: {said}", file=sys.stderr)
        if comm.rank == 0:
            print(json.dumps({precision: asdict(one) for precision, one in results.items()}))
    dist.destroy_process_group()


def need_gpus(ranks: int, share: bool) -> None:
    """NCCL takes no two ranks to one GPU."""
    found = torch.cuda.device_count()
    if found == 0 or (ranks > found and not share):
        sys.exit(f"{ranks} ranks of this host need {ranks} GPUs, and there are {found}: see --ranks and --share-gpus")


def end(one: Trained) -> float:
    last = one.losses[-LAST:]
    return sum(last) / len(last)


# ---- beside each other ---------------------------------------------------------------------------------------------------


def start(ranks: int) -> Results:
    """Ranks of this program; what rank 0 printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PPLX_COMM_JOB": f"train-{port}"}
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        world["GLOO_SOCKET_IFNAME"] = "lo"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]], stdout=subprocess.PIPE if rank == 0 else None, text=True,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = started[0].communicate()[0]
    if any([process.wait() for process in started]):
        sys.exit("a rank failed")
    return {precision: Trained(**one) for precision, one in json.loads(said).items()}


def beside(one: Trained, other: Trained) -> tuple[float, float]:
    """How far the losses at the end are apart, relative: of the last steps, and of what was held out."""
    return end(one) / end(other) - 1, one.held_out / other.held_out - 1


def table(results: dict[int, Results]) -> str:
    lines = ["| ranks | precision | loss | beside bf16 | held out | beside bf16 |", "|---|---|---|---|---|---|"]
    for ranks, of in results.items():
        for precision, one in of.items():
            apart = [f"{share:+.2%}" for share in beside(one, of["bf16"])] if "bf16" in of else ["", ""]
            lines.append(f"| {ranks} | {precision} | {end(one):.4f} | {apart[0]} | {one.held_out:.4f} | {apart[1]} |")
    return "\n".join(lines)


def smooth(losses: list[float]) -> list[float]:
    """The mean of each step and those before it, a fiftieth of all."""
    window = max(1, len(losses) // 50)
    return [sum(losses[max(0, n - window) : n + 1]) / (min(n, window) + 1) for n in range(len(losses))]


def plot(results: dict[int, Results], path: str) -> None:
    """Losses, and below them how far each is from that of bf16, by numbers of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(results), figsize=(4 * len(results), 6), sharex=True, sharey="row", squeeze=False)
    for (above, below), (ranks, of) in zip(axes.T, results.items(), strict=True):
        for precision, one in of.items():
            above.plot(smooth(one.losses), label=precision, linewidth=1)
            if "bf16" in of:
                apart = [100 * (a / b - 1) for a, b in zip(smooth(one.losses), smooth(of["bf16"].losses), strict=True)]
                below.plot(apart, linewidth=1)
        above.set_title(f"{ranks} rank{'s' if ranks > 1 else ''}")
        below.set_xlabel("step")
        below.grid(True, alpha=0.3)
    axes[0][0].set_ylabel("loss, nats per byte")
    axes[1][0].set_ylabel("beside bf16, %")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="how many, one number after the other (1,2,4)")
    parser.add_argument("--precision", default="bf16,fp8,mxfp8", help="of the layers, one after the other (bf16,fp8,mxfp8)")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, help=f"of learning, at its highest ({RATES['cpu']}; on GPUs {RATES['cuda']})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=SIZES)
    parser.add_argument(
        "--share-gpus", action="store_true",
        help="more ranks than GPUs: gloo in place of NCCL for what is the same on all; start it by tests/gpu/mps.py",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=float, default=0.01, help="how far from bf16 both losses may end, else 1 is returned (0.01)"
    )
    parser.add_argument("--plot", help="where to draw the losses")
    arguments = parser.parse_args()
    if arguments.rate is None:
        arguments.rate = RATES[arguments.device]
    return arguments


def main() -> int:
    arguments = parsed()
    if "RANK" in os.environ:
        work(arguments)
        return 0
    numbers = [int(ranks) for ranks in arguments.ranks.split(",")]
    if arguments.device == "cuda":
        need_gpus(max(numbers), arguments.share_gpus)
    results = {ranks: start(ranks) for ranks in numbers}
    print(table(results))
    if arguments.plot:
        plot(results, arguments.plot)
    apart = [share for of in results.values() if "bf16" in of for one in of.values() for share in beside(one, of["bf16"])]
    finite = all(math.isfinite(loss) for of in results.values() for one in of.values() for loss in (*one.losses, one.held_out))
    return 0 if finite and max(map(abs, apart), default=0) <= arguments.within else 1


if __name__ == "__main__":
    sys.exit(main())

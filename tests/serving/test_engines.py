"""vLLM's engines on CPUs over pplx_comm: the same tokens as one process, and errors that name the rank at fault."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine import prompts
from engines import SECONDS, Engines, Process, free_port, same

Alone = dict[str, dict[int, list[int]]]
ALL = "192 of 192"  # 24 tokens for each of 8 prompts
PROXY = {"PPLX_COMM_VLLM_TRANSPORT": "proxy", "PPLX_COMM_PROVIDER": "tcp"}

pytestmark = [pytest.mark.timeout(2 * SECONDS), pytest.mark.slow]


def carried(process: Process, proxy: bool = False) -> None:
    """The tokens did go through pplx_comm: each step of a model of four layers is four."""
    told = process.said("CARRIED")
    assert told["steps"] > 4 * 24 and told["proxy"] == proxy and told["all_to_alls"] == 1


def test_one_process_makes_something(alone: Alone) -> None:
    for made in alone.values():
        assert all(len(tokens) == 24 and len(set(tokens)) > 8 for tokens in made.values()), made
    assert alone["qwen3_moe"] != alone["mixtral"]


@pytest.mark.parametrize("env", [{}, PROXY], ids=["mapped", "tcp"])
def test_two_engines(run: Engines, models: dict[str, Path], alone: Alone, env: dict[str, str], tmp_path: Path) -> None:
    """The variable alone makes their metrics, too."""
    metrics = {"PPLX_COMM_METRICS": str(tmp_path), "PPLX_COMM_METRICS_SECONDS": "1"}
    ranks = run.ranks(2, models["qwen3_moe"], **env, **metrics)
    made = finished(ranks)
    assert same(made, alone["qwen3_moe"]) == ALL
    for rank in ranks:
        carried(rank, proxy=bool(env))


def finished(ranks: list[Process]) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    for rank in ranks:
        assert rank.ended() == 0, rank.text[-6000:]
        made |= {int(number): tokens for number, tokens in rank.said("TOKENS").items()}
    return made


def test_mixtral(run: Engines, models: dict[str, Path], alone: Alone) -> None:
    assert same(run.tokens(2, models["mixtral"]), alone["mixtral"]) == ALL


def test_compiled(run: Engines, models: dict[str, Path], alone: Alone) -> None:
    assert same(run.tokens(2, models["qwen3_moe"], "--compiled"), alone["qwen3_moe"]) == ALL


def test_an_engine_with_nothing_to_do(run: Engines, models: dict[str, Path], alone: Alone) -> None:
    """It takes dummy batches while the other goes on."""
    made = run.tokens(2, models["qwen3_moe"], "--share", "first")
    assert same(made, alone["qwen3_moe"]) == f"{7 * 24 + 6} of {7 * 24 + 6}"


@pytest.mark.parametrize("way", ["sequence", "replicas"])
def test_tensor_parallel(run: Engines, models: dict[str, Path], alone: Alone, way: str) -> None:
    """Two engines of two ranks each."""
    made = run.tokens(4, models["qwen3_moe"], "--tensor-parallel", "2", PPLX_COMM_VLLM_TP=way)
    assert same(made, alone["qwen3_moe"]) == ALL


def test_combines_without_weights_differ(run: Engines, models: dict[str, Path], alone: Alone) -> None:
    """The tokens depend on what pplx_comm does: else the tests above would say nothing."""
    count, _, of = same(run.tokens(2, models["qwen3_moe"], "--unweighted"), alone["qwen3_moe"]).split()
    assert int(count) < int(of) / 4


def test_a_killed_rank_is_named(run: Engines, models: dict[str, Path]) -> None:
    ranks = run.ranks(2, models["qwen3_moe"], "--tokens", "200")
    for rank in ranks:
        rank.hears("READY")
    ranks[1].signal(signal.SIGKILL)
    begun = time.monotonic()
    assert ranks[0].ended(60) != 0, "it went on without the other"
    assert time.monotonic() - begun < 30
    assert "rank 1 died" in ranks[0].text, ranks[0].text[-6000:]


def test_a_stopped_rank_is_named(run: Engines, models: dict[str, Path]) -> None:
    ranks = run.ranks(2, models["qwen3_moe"], "--tokens", "200", "--stop-at", "100", PPLX_COMM_VLLM_TIMEOUT="5")
    ranks[1].hears("STOPS")
    assert ranks[0].ended(60) != 0, "it went on without the other"
    assert "StepTimeout: rank 0 gave up after 5 s waiting for" in ranks[0].text, ranks[0].text[-6000:]
    assert "of rank 1" in ranks[0].text


# ---- over HTTP -----------------------------------------------------------------------------------------------------------


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def test_a_server(run: Engines, models: dict[str, Path], alone: Alone) -> None:
    port, model = free_port(), str(models["qwen3_moe"])
    server = run.start(
        [
            "-m", "vllm.entrypoints.cli.main", "serve", model, "--data-parallel-size", "2", "--enable-expert-parallel",
            "--all2all-backend", "pplx_comm", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--skip-tokenizer-init",
            "--no-enable-prefix-caching", "--seed", "1",
        ]
    )  # fmt: skip
    end = time.monotonic() + SECONDS
    while True:
        try:
            ask(port, "/health")
            break
        except (urllib.error.URLError, ConnectionError):
            assert server.running and time.monotonic() < end, server.text[-6000:]
            time.sleep(0.2)

    def complete(prompt: list[int]) -> list[int]:
        answer = ask(port, "/v1/completions", {
            "model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        })  # fmt: skip
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(8) as pool:
        made = dict(enumerate(pool.map(complete, prompts(8))))
    assert same(made, alone["qwen3_moe"]) == ALL
    server.signal(signal.SIGINT)
    server.ended(60)

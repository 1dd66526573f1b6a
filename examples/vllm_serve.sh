#!/usr/bin/env bash
# vLLM over pplx_comm on a machine without a GPU: makes a tiny model, asks one process, then a server of two data parallel engines
# that share its experts, and prints the tokens per second of both. Usage: examples/vllm_serve.sh, in a checkout after `make build`
#
# PYTHON   the Python that pplx_comm was built with (.venv/bin/python, else python3)
# SERVING  the Python that vLLM is installed in; without it tools/serving_env.sh makes one, 2.3 GB, which `make check-serving` shares
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
serving=${SERVING:-$(PYTHON="$python" tools/serving_env.sh)}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; [ -z "$server" ] || wait "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

# The entry point by which vLLM finds the plug-in; an installed pplx_comm brings its own.
"$python" -c "import scikit_build_core.build as b; b.prepare_metadata_for_build_wheel('$work/metadata')" >"$work/metadata.log"
export PYTHONPATH="$PWD:$work/metadata" VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1
"$serving" tests/serving/models.py "$work/model" qwen3_moe
port=$("$serving" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# serve ARGUMENTS...: starts a server and waits until it answers.
serve() {
    "$serving" -m vllm.entrypoints.cli.main serve "$work/model" --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager \
        --max-model-len 256 --max-num-seqs 8 --max-num-batched-tokens 256 --skip-tokenizer-init "$@" >"$work/server.log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        kill -0 "$server" 2>/dev/null || { tail -40 "$work/server.log" >&2; exit 1; }
        ! "$serving" - "$port" <<'END' 2>/dev/null || return 0
import sys, urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
END
        sleep 0.5
    done
    echo "the server did not answer within 5 minutes" >&2
    exit 1
}

# ask FILE: 8 requests at once; the tokens go to FILE.
ask() {
    "$serving" - "$port" "$work/model" "$1" <<'END'
import json, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor

port, model, file = sys.argv[1:]

def complete(n):
    body = {"model": model, "prompt": [3 + (31 * n + 7 * k) % 509 for k in range(3 + 5 * n)], "max_tokens": 64, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["token_ids"]

with ThreadPoolExecutor(8) as pool:
    list(pool.map(complete, range(8)))  # the first requests find everything cold
    begun = time.monotonic()
    made = list(pool.map(complete, range(8)))
    seconds = time.monotonic() - begun
json.dump(made, open(file, "w"))
print(f"8 requests of 64 tokens: {sum(map(len, made)) / seconds:.0f} tokens per second")
END
}

stop() { kill -INT "$server"; wait "$server" || true; server=; }

echo "one process:"
serve && ask "$work/one" && stop
echo "two engines over pplx_comm:"
serve --data-parallel-size 2 --enable-expert-parallel --all2all-backend pplx_comm && ask "$work/two"
grep -o 'pplx_comm [^ ]* serves.*' "$work/server.log" | head -1
stop
cmp "$work/one" "$work/two" && echo "the same tokens from both"

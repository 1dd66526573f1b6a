#!/usr/bin/env bash
# Makes the development environment: a venv with everything that constraints.txt pins, and what only a host can give.
# Usage: [PYTHON=python3] [TORCH_INDEX=url] tools/install_deps.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

have_libfabric_headers() {
    echo '#include <rdma/fabric.h>' |
        cc -E -x c ${PPLX_LIBFABRIC_INCLUDE:+-I"$PPLX_LIBFABRIC_INCLUDE"} -I/opt/amazon/efa/include - >/dev/null 2>&1
}

# system_packages NAME...: false where there is no apt, or we may not.
system_packages() {
    local sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo -n)
    local install=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
    command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; } &&
        { "${install[@]}" || { "${sudo[@]}" apt-get update -qq && "${install[@]}"; }; } && echo "installed $*"
}

# Packages of the system, where we may; without libfabric there is no network transport, but everything else works.
if ! have_libfabric_headers; then
    if ! system_packages libfabric-dev libfabric1; then
        echo "NOTE: no libfabric headers, and no way to install them from here. Going on without libfabric transports." >&2
        echo "      Install libfabric-dev (or libfabric-devel), or set PPLX_LIBFABRIC_INCLUDE, and build again." >&2
    fi
fi
# Only for tests of several hosts, which only root can run.
if [ "$(id -u)" = 0 ] && ! PATH=$PATH:/usr/sbin:/sbin command -v tc >/dev/null && ! system_packages iproute2; then
    echo "NOTE: no ip and tc commands, and no way to install iproute2 from here. Tests of several hosts are skipped." >&2
fi
# Only for tests of metrics.
if ! command -v promtool >/dev/null && ! system_packages prometheus; then
    echo "NOTE: no prometheus, and no way to install it from here. Two tests of metrics fail." >&2
fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)

# torch alone first, and from its own index where one is given: that index has little else.
"${pip[@]}" -c constraints.txt --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
# uv takes seconds for what takes pip a minute. It reads none of pip's configuration, so that its index may lack what pip finds.
"${pip[@]}" uv || true
install() {
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -c constraints.txt "$@" || "${pip[@]}" -c constraints.txt "$@"
}

# at_least WANTED HAS: of versions.
at_least() { [ "$(printf '%s\n' "$@" | sort -V | head -n 1)" = "$1" ]; }

# The host's own cmake where it will do. The host's ninja may be too old to say how long a build takes.
tools=(ninja)
wanted=$(sed -n 's/^cmake_minimum_required(VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
has=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p' || true)
{ [ -n "$has" ] && at_least "$wanted" "$has"; } || tools+=("cmake>=$wanted")
# The mpich wheel brings its own mpirun, which works as root and with more ranks than cores.
install torch scikit-build-core pybind11 numpy mpich mpi4py \
    pytest pytest-timeout pytest-xdist hypothesis matplotlib ruff mypy import-linter pybind11-stubgen prometheus_client perfetto "${tools[@]}"

# An older libfabric for tests of the efa provider: that of a wheel whose MPI is not used.
if [ ! -d "$venv/libfabric-1.22" ]; then
    wheel=$(mktemp -d)
    if "${pip[@]:0:3}" download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$wheel" mpich==4.3.2; then
        "$venv/bin/python" - "$wheel" "$venv/libfabric-1.22" <<'END'
import pathlib, sys, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("mpich-*.whl")))
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if "/lib/mpich/libfabric" in name])
END
    else
        echo "NOTE: no mpich 4.3.2 to be had from here. Tests of the efa provider of libfabric 1.22 are skipped." >&2
    fi
    rm -r "$wheel"
fi

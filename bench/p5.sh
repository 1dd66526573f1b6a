#!/usr/bin/env bash
# Latency between the GPUs of AWS p5, p5e and p5en nodes: NVLink inside a node, EFA between them.
#
#     bench/p5.sh --hosts FILE                       8 ranks on each host of FILE, a name a line; Open MPI or MPICH
#     bench/p5.sh --ranks 4 --node-size 2 --provider tcp      the same on one host without EFA, in groups that play nodes
#
# And on one host over software NICs (docs/efa-soft.md), on CPUs or on two GPUs:
#
#     python -m pplx_comm efa-soft --machine p5 -- bench/p5.sh --ranks 8 --node-size 4 --provider efa --device cpu
#     PPLX_COMM_PLACEMENT=host python -m pplx_comm efa-soft --machine p5 -- bench/p5.sh --ranks 2 --node-size 1 --provider efa
#
# Ranks on other hosts get PATH, LD_LIBRARY_PATH, PYTHONPATH and all PPLX_*, FI_*, NCCL_* and NVSHMEM_* that are set here.
# Further arguments go to bench/latency.py; PYTHON names the interpreter.
set -euo pipefail
. "$(dirname "$0")/over_mpi.sh"

hosts="" ranks="" node_size=8 provider=efa
options "--hosts --ranks --node-size --provider" "$@"
if [ -n "$hosts" ]; then
    on_hosts
    measure "auto:$provider"
elif [ -n "$ranks" ]; then
    here "$ranks"
    measure "mapped,auto:$provider"  # all ranks are on one host: its memory's part of the floor can be measured
else
    stop "needs --hosts FILE, or --ranks N for this host alone; see --help"
fi

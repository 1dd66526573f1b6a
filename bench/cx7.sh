#!/usr/bin/env bash
# Latency between the GPUs of nodes with ConnectX NICs: NVLink inside a node, and across nodes GPUs that post to the NIC themselves
# (NVSHMEM, IBGDA), beside the proxy over verbs.
#
#     bench/cx7.sh --hosts FILE                    8 ranks on each host of FILE, a name a line; Open MPI or MPICH
#     bench/cx7.sh --p2p 2                         two ranks of this host, in NVSHMEM's memory over NVLink, beside mapped memory
#
# `python -m pplx_comm doctor` says what is missing for IBGDA, and which traffic class is in force. Stages of a launch, where over P2P
# something takes longer than mapped (needs a build with -DPPLX_CUDA_STAGES=ON):
#
#     mpirun -n 2 python bench/stages.py --tokens 128 --transport mapped,nvshmem:1
#
# Ranks on other hosts get PATH, LD_LIBRARY_PATH, PYTHONPATH and all PPLX_*, FI_*, NCCL_* and NVSHMEM_* that are set here.
# Further arguments go to bench/latency.py; PYTHON names the interpreter.
set -euo pipefail
. "$(dirname "$0")/over_mpi.sh"

export NVSHMEM_DISABLE_NVLS="${NVSHMEM_DISABLE_NVLS:-1}"  # multicast: also for an NVSHMEM that something else starts

hosts="" ranks="" node_size=8 p2p=""
options "--hosts --ranks --node-size --p2p" "$@"
if [ -n "$hosts" ]; then
    on_hosts
    measure nvshmem,auto:verbs
elif [ -n "$p2p" ]; then
    here "$p2p"
    node_size=1
    measure mapped,nvshmem
else
    stop "needs --hosts FILE, or --p2p N for this host alone; see --help"
fi

#!/usr/bin/env bash
# Latency between the GPUs of nodes with ConnectX NICs: NVLink inside a node, and across nodes GPUs that post to the NIC themselves
# (NVSHMEM, IBGDA), beside the proxy over verbs.
#
#     bench/cx7.sh --hosts FILE                    8 ranks on each host of FILE (Open MPI's: a name a line)
#     bench/cx7.sh --p2p 2                         two ranks of this host, in NVSHMEM's memory over NVLink, beside mapped memory
#
# `python -m pplx_comm doctor` says what is missing for IBGDA, and which traffic class is in force; NVSHMEM_* variables that are set
# here reach the ranks. Stages of a launch, where over P2P something takes longer than mapped (needs a build with
# -DPPLX_CUDA_STAGES=ON):  mpirun -n 2 python bench/stages.py --tokens 128 --transport mapped,nvshmem:1
#
# What else is given goes to bench/latency.py; PYTHON names the interpreter.
set -euo pipefail

hosts="" ranks="" node_size=8 p2p=""
more=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,13s/^# \{0,1\}//p' "$0" && exit 0 ;;
        --hosts | --ranks | --node-size | --p2p)
            [ $# -gt 1 ] || { echo "bench/cx7.sh: $1 needs a value" >&2 && exit 2; }
            name=${1#--} && printf -v "${name//-/_}" %s "$2" && shift 2 ;;
        *) more+=("$1") && shift ;;
    esac
done
launch=(mpirun)
open_mpi=$(mpirun --version 2>&1 | grep -c 'Open MPI' || true)  # MPICH's mpirun knows neither of these options and needs neither
[ "$open_mpi" = 0 ] || launch+=(--allow-run-as-root)
if [ -n "$hosts" ]; then
    [ -r "$hosts" ] || { echo "bench/cx7.sh: cannot read $hosts" >&2 && exit 2; }
    # MPI itself only starts the ranks.
    launch+=(-N "$node_size" --hostfile "$hosts" --bind-to none --mca pml ob1 --mca btl tcp,self -x PATH -x LD_LIBRARY_PATH)
    for name in $(compgen -e NVSHMEM_ || true); do launch+=(-x "$name"); done
    [ -z "$ranks" ] || launch+=(-n "$ranks")
    transport=nvshmem,auto:verbs
elif [ -n "$p2p" ]; then
    [ "$open_mpi" = 0 ] || launch+=(--oversubscribe)
    launch+=(--bind-to none -n "$p2p")
    transport=mapped,nvshmem node_size=1
else
    echo "bench/cx7.sh: needs --hosts FILE, or --p2p N for this host alone; see --help" >&2 && exit 2
fi
cd "$(dirname "$0")/.."
set -x
exec "${launch[@]}" "${PYTHON:-python3}" bench/latency.py --device cuda --tokens 1,8,32,128 --hidden 7168 --experts 256 --top-k 8 \
    --wire fp8 --transport "$transport" --node-size "$node_size" "${more[@]}"

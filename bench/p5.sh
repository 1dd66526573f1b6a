#!/usr/bin/env bash
# Latency between the GPUs of AWS p5, p5e and p5en nodes: NVLink inside a node, EFA between them.
#
#     bench/p5.sh --hosts FILE                       8 ranks on each host of FILE (Open MPI's: a name a line)
#     bench/p5.sh --ranks 4 --node-size 2 --provider tcp      the same on one host without EFA, in groups that play nodes
#
# And on one host over software NICs (docs/efa-soft.md), on CPUs or on two GPUs:
#
#     python -m pplx_comm efa-soft --machine p5 -- bench/p5.sh --ranks 8 --node-size 4 --provider efa --device cpu
#     PPLX_COMM_PLACEMENT=host python -m pplx_comm efa-soft --machine p5 -- bench/p5.sh --ranks 2 --node-size 1 --provider efa
#
# What else is given goes to bench/latency.py; PYTHON names the interpreter.
set -euo pipefail

hosts="" ranks="" node_size=8 provider=efa transport=auto
more=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,12s/^# \{0,1\}//p' "$0" && exit 0 ;;
        --hosts | --ranks | --node-size | --provider)
            [ $# -gt 1 ] || { echo "bench/p5.sh: $1 needs a value" >&2 && exit 2; }
            name=${1#--} && printf -v "${name//-/_}" %s "$2" && shift 2 ;;
        *) more+=("$1") && shift ;;
    esac
done
launch=(mpirun)
open_mpi=$(mpirun --version 2>&1 | grep -c 'Open MPI' || true)  # MPICH's mpirun knows neither of these options and needs neither
[ "$open_mpi" = 0 ] || launch+=(--allow-run-as-root)
if [ -n "$hosts" ]; then
    [ -r "$hosts" ] || { echo "bench/p5.sh: cannot read $hosts" >&2 && exit 2; }
    # MPI itself only starts the ranks: it needs no EFA, and TCP is always there.
    launch+=(-N "$node_size" --hostfile "$hosts" --bind-to none --mca pml ob1 --mca btl tcp,self -x PATH -x LD_LIBRARY_PATH)
    [ -z "$ranks" ] || launch+=(-n "$ranks")
elif [ -n "$ranks" ]; then
    [ "$open_mpi" = 0 ] || launch+=(--oversubscribe)
    launch+=(--bind-to none -n "$ranks")
    transport=mapped,auto  # all ranks are on one host: its memory's part of the floor can be measured
else
    echo "bench/p5.sh: needs --hosts FILE, or --ranks N for this host alone; see --help" >&2 && exit 2
fi
cd "$(dirname "$0")/.."
set -x
exec "${launch[@]}" "${PYTHON:-python3}" bench/latency.py --device cuda --tokens 1,8,32,128 --hidden 7168 --experts 256 --top-k 8 \
    --wire fp8 --transport "$transport:$provider" --node-size "$node_size" "${more[@]}"

# What bench/p5.sh and bench/cx7.sh share, which source it: bench/latency.py on ranks that mpirun starts, or where there is no mpirun on
# ranks of this host that it starts itself.

launch=(mpirun) started=() more=()
open_mpi=$(mpirun --version 2>&1 | grep -c 'Open MPI' || true)  # MPICH's mpirun knows neither of these options and needs neither
[ "$open_mpi" = 0 ] || launch+=(--allow-run-as-root)

stop() { echo "bench/$(basename "$0"): $1" >&2 && exit 2; }

# options "--one --two" "$@": the values of those options, in variables of their names; what else is given is latency.py's.
options() {
    local known=" $1 " name
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;;
            *)
                [[ $known == *" $1 "* ]] || { more+=("$1") && shift && continue; }
                [ $# -gt 1 ] || stop "$1 needs a value"
                name=${1#--} && printf -v "${name//-/_}" %s "$2" && shift 2 ;;
        esac
    done
}

on_hosts() {
    [ -r "$hosts" ] || stop "cannot read $hosts"
    [ "$open_mpi" != 0 ] || stop "--hosts needs Open MPI's mpirun in PATH"
    hosts=$(realpath "$hosts")  # measure() goes elsewhere
    # MPI itself only starts the ranks: it needs no NIC of theirs, and TCP is always there.
    launch+=(-N "$node_size" --hostfile "$hosts" --bind-to none --mca pml ob1 --mca btl tcp,self -x PATH -x LD_LIBRARY_PATH)
    for name in "$@"; do launch+=(-x "$name"); done
    [ -z "$ranks" ] || launch+=(-n "$ranks")
}

here() {
    command -v mpirun > /dev/null || { launch=() && started=(-n "$1") && return; }
    [ "$open_mpi" = 0 ] || launch+=(--oversubscribe)
    launch+=(--bind-to none -n "$1")
}

measure() {
    cd "$(dirname "$0")/.."
    set -x
    exec "${launch[@]}" "${PYTHON:-python3}" bench/latency.py "${started[@]}" --device cuda --tokens 1,8,32,128 --hidden 7168 \
        --experts 256 --top-k 8 --wire fp8 --transport "$1" --node-size "$node_size" "${more[@]}"
}

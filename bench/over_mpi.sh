# Shared by bench/p5.sh and bench/cx7.sh, which source it: bench/latency.py on ranks that mpirun starts (Open MPI's or MPICH's), or,
# where there is no mpirun, on ranks of this host that it starts itself.

launch=(mpirun) started=() more=() mpi=none
# The environment variables that ranks on other hosts get, where they are set.
passed_on='^(PATH|LD_LIBRARY_PATH|PYTHONPATH|(PPLX|FI|NCCL|NVSHMEM|MPIR_CVAR)_.*)$'
case $(mpirun --version 2>&1 || true) in
    *"Open MPI"*) mpi=open && launch+=(--allow-run-as-root) ;;
    *HYDRA* | *"Intel(R) MPI"*) mpi=hydra ;;
esac

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

# Starts node_size ranks on each host of the file $hosts, a name a line, or $ranks in all.
on_hosts() {
    local line name names=()
    [ -r "$hosts" ] || stop "cannot read $hosts"
    while read -r line || [ -n "$line" ]; do
        [[ $line != "#"* && -n $line ]] || continue
        [[ $line =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || stop "$hosts has the line '$line': a host's name alone, a line each; --node-size says how many ranks"
        names+=("$line")
    done < "$hosts"
    [ ${#names[@]} -gt 0 ] || stop "$hosts names no host"
    hosts=$(realpath "$hosts")  # measure() goes elsewhere
    ranks=${ranks:-$((${#names[@]} * node_size))}
    # MPI only starts the ranks and gathers their results: over TCP, which every host has.
    export MPIR_CVAR_OFI_USE_PROVIDER=${MPIR_CVAR_OFI_USE_PROVIDER:-tcp}
    mapfile -t names < <(compgen -e | grep -E "$passed_on")
    case $mpi in
        open)
            launch+=(--hostfile "$hosts" -N "$node_size" --mca pml ob1 --mca btl tcp,self)
            for name in "${names[@]}"; do launch+=(-x "$name"); done ;;
        hydra) launch+=(-f "$hosts" -ppn "$node_size" -genvlist "$(IFS=, && echo "${names[*]}")") ;;
        *) stop "--hosts needs mpirun in PATH, Open MPI's or MPICH's (.venv/bin has one: . .venv/bin/activate)" ;;
    esac
    launch+=(--bind-to none -n "$ranks")
}

here() {
    command -v mpirun > /dev/null || { launch=() && started=(-n "$1") && return; }
    [ $mpi != open ] || launch+=(--oversubscribe)
    launch+=(--bind-to none -n "$1")
}

measure() {
    cd "$(dirname "$0")/.."
    set -x
    exec "${launch[@]}" "${PYTHON:-python3}" bench/latency.py "${started[@]}" --device cuda --tokens 1,8,32,128 --hidden 7168 \
        --experts 256 --top-k 8 --wire fp8 --transport "$1" --node-size "$node_size" "${more[@]}"
}

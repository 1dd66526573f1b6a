#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces joined by a cable, each with a name, a /dev/shm and IPC of its own. Runs
#
#     mpirun -f hosts -ppn 2 -n 4 PROGRAM...
#
# on the first of them, with two ranks on each, as docs/across-nodes.md says for two real hosts; where mpirun would call ssh, a script enters
# the other namespace. Nothing of it stays. Needs root and iproute2; exits with 77 where namespaces are not permitted.
# Usage: tools/two_hosts.sh python examples/hosts.py
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

tag=${PPLX_TWO_HOSTS_TAG:-pplx$$}
folder=$(mktemp -d)
tidy() {
    for host in node0 node1; do
        ip netns pids "$tag-$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns delete "$tag-$host" 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap tidy EXIT
trap 'exit 130' INT TERM HUP

cannot() {
    echo "tools/two_hosts.sh: $1" >&2
    exit 77
}
[ "$(id -u)" = 0 ] || cannot "network namespaces need root"
command -v ip >/dev/null || cannot "no ip command: install iproute2"
for host in node0 node1; do
    ip netns add "$tag-$host" || cannot "this machine does not permit network namespaces (a container without CAP_SYS_ADMIN?)"
    ip -n "$tag-$host" link set lo up
done
ip -n "$tag-node0" link add eth0 type veth peer name eth0 netns "$tag-node1" || cannot "this kernel has no veth"
for number in 0 1; do
    ip -n "$tag-node$number" address add "10.213.8.1$number/24" dev eth0
    ip -n "$tag-node$number" link set eth0 up
done
printf '127.0.0.1 localhost\n10.213.8.10 node0\n10.213.8.11 node1\n' >"$folder/etc_hosts"
printf 'node0\nnode1\n' >"$folder/hosts"

# on.sh HOST COMMAND...: what ssh would do. Each process that enters has /dev/shm and IPC to itself, and hands them to its children.
cat >"$folder/on.sh" <<EOF
#!/bin/sh
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\$1
shift
exec ip netns exec "$tag-\$host" unshare --ipc --uts sh -c '
    hostname "\$0" && mount --bind "$folder/etc_hosts" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && eval "exec \$*"' "\$host" "\$@"
EOF
chmod +x "$folder/on.sh"

export PPLX_COMM_ADDR=node0:29713
PPLX_COMM_SECRET=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export PPLX_COMM_SECRET
command -v mpirun >/dev/null || cannot "no mpirun"
"$folder/on.sh" node0 mpirun -launcher ssh -launcher-exec "$folder/on.sh" -f "$folder/hosts" -ppn 2 -n 4 "$(printf '%q ' "$@")" &
wait $!   # a shell that waits for a child in the foreground would hear no signal

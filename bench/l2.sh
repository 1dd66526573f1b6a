#!/usr/bin/env bash
# L2 hit rate and time of our product of rows in bfloat16, by the height of its supergroups: M 4096, K 2048, N 7168, 8 groups of rows.
#
#     bench/l2.sh [HEIGHT ...]        in tiles of rows (1 2 4 8); 1 is without supergroups
#
# Needs ncu, triton, and the right to read the GPU's counters. ncu runs each launch with cold caches, at the base clock. PYTHON names
# the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' bench/l2.sh && exit 0; }
[ $# -gt 0 ] || set -- 1 2 4 8
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
for height in "$@"; do
    ncu --csv --log-file "$folder/$height.csv" --kernel-name regex:rows_by_weights \
        --metrics lts__t_sector_hit_rate.pct,gpu__time_duration.sum \
        "$python" bench/grouped.py --device cuda --formats bf16 --ops forward --shapes 2048x7168 --experts 8 --rows 512 --spreads even \
        --only triton --rounds 1 --between 0 --group "$height" >&2
done
"$python" bench/l2.py "${@/#/$folder/}"

#!/bin/sh
# Runs a compiler, and keeps what it says in a file beside the object.
# Usage: tools/keep_output.sh COMPILER ... -o OBJECT ...
for word; do
    [ "$before" != -o ] || object=$word
    before=$word
done
"$@" >"$object.txt" 2>&1 || { cat "$object.txt" && exit 1; }

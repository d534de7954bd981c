#!/bin/bash
# Nodes to work on by hand: a shell in which `run_ranks python train.py` starts all ranks; `exit` gives the nodes back.
#
#   bash slurm/interactive.sh --nodes=2 --ntasks-per-node=2 --time=00:30:00
#   bash slurm/interactive.sh --nodes=2 --ntasks-per-node=2 --time=00:30:00 -- train.py --epochs 1     # no shell
#
# What comes before -- are options of salloc.
JOB_ENV=${JOB_ENV:-$(dirname "$0")/env.sh}
if [ ! -f "$JOB_ENV" ]; then
    echo "there is no $JOB_ENV: copy env.sh beside this script, or JOB_ENV=/path/env.sh bash ..." >&2
    exit 2
fi
options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    options+=("$1")
    shift
done
if [ $# -gt 0 ]; then
    # shellcheck disable=SC2016
    exec salloc ${options[@]+"${options[@]}"} \
        bash -c 'source "$0"; shift; run_ranks "${python[@]}" "$@"' "$JOB_ENV" "$@"
fi
# shellcheck disable=SC2016
shell='source "$0"; export -f run_ranks; export MPI_TYPE; exec bash'
exec salloc ${options[@]+"${options[@]}"} bash -c "$shell" "$JOB_ENV"

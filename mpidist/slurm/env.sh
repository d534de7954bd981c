# shellcheck shell=bash
# What the job scripts have in common: each sources it. Copy it with them. Lines marked EDIT are the site's.
# EDIT: the modules that mpidist was installed with, such as `module load python openmpi`, `module load cray-python`,
# `spack load py-mpi4py` or `conda activate training`, and its virtual environment.
# shellcheck disable=SC1091
[ ! -f "${VIRTUAL_ENV:-.venv}/bin/activate" ] || source "${VIRTUAL_ENV:-.venv}/bin/activate"
set -euo pipefail # from here on: `module` and `activate` may use variables that are not set
[ -n "${python:-}" ] || python=(python) # container.sbatch has another one

# Variables may be those of the job that this one was submitted from: scontrol reports the facts, of all of an array.
facts=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n "/^JobId=$SLURM_JOB_ID /p")
attempt=$(sed -n 's/.* Restarts=\([0-9]*\) .*/\1/p' <<<"$facts") cpus=${SLURM_CPUS_PER_TASK:-1}
export SLURM_RESTART_COUNT="${attempt:=0}" SLURM_EXPORT_ENV=ALL # NONE after `sbatch --export=NONE`, also for ranks
[[ $facts == *" ArrayTaskId="* ]] || unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID
[[ $facts == *" HetJobId="* ]] || unset SLURM_HET_SIZE
[[ $facts =~ " TresPer"[A-Z][a-z]+=[^\ ]*gpu ]] || unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK
# Which MPI mpi4py found decides how srun must start it. On Cray systems: MPI_TYPE=cray_shasta sbatch ...
if [ -z "${MPI_TYPE:-}" ]; then
    library=$("${python[@]}" -m mpi4py --mpi-lib-version | tr -d '\0') ||
        { echo "${python[*]} -m mpi4py fails: load modules and mpidist's packages in ${BASH_SOURCE[0]}" >&2 && exit 2; }
    case $library in *"Open MPI"*) MPI_TYPE=pmix ;; *) MPI_TYPE=pmi2 ;; esac
    # UCX's addresses are too long for pmi2. mpidist sets these, too, unless the program has started MPI before.
    ! grep -q "^MPICH Device:.*ch4:.*ofi" <<<"$library" ||
        export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}" FI_PROVIDER="${FI_PROVIDER:-^sockets}"
fi
export components="" # also for the shell of interactive.sh, which an array would not reach
if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
    components="--het-group=$(seq -s, 0 $((SLURM_HET_SIZE - 1)))"
    cpus=$(for ((i = 0; i < SLURM_HET_SIZE; i++)); do
        printenv "SLURM_CPUS_PER_TASK_HET_GROUP_$i" || echo "$cpus"
    done | sort -n | sed -n 1p) # srun takes one number for all components: the least fits all
    [ "$MPI_TYPE" != pmi2 ] || export SLURM_DISTRIBUTION="${SLURM_DISTRIBUTION:-cyclic}" # else MPI_Init may hang
    echo "job $SLURM_JOB_ID, attempt $attempt; components: $SLURM_HET_SIZE"
else
    SLURM_NTASKS="${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}" # where nobody has said how many: one a node, as srun does
    echo "job $SLURM_JOB_ID, attempt $attempt; ranks: $SLURM_NTASKS, nodes: $SLURM_JOB_NUM_NODES"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cpus}" SRUN_CPUS_PER_TASK="$cpus" # which srun does not take by itself
# After a requeue MPICH would take the shared memory that a killed attempt left behind.
[ "$attempt" -eq 0 ] || srun ${components:+"$components"} --mpi=none \
    find /dev/shm -maxdepth 1 -user "$(id -u)" -name 'mpich_shm_*' -delete 2>/dev/null || true

# Start ranks: run_ranks [OPTION OF SRUN]... PROGRAM [ARGUMENT]... Returns the exit code of the rank that ended them.
# Of a job that a rank ends, srun may only say that it was killed: the rank writes its exit code into a file.
run_ranks() {
    local code=0 started words=(srun ${components:+"$components"} --mpi="$MPI_TYPE" --kill-on-bad-exit=1 "$@")
    [[ " $* " != *" ${python[*]-python} " || " $*" == *" ${python[*]-python} "* ]] ||
        { echo "there is no program to run: sbatch JOB_SCRIPT train.py" >&2 && return 2; }
    export MPIDIST_EXIT_CODE_FILE="$PWD/.exit-code-$SLURM_JOB_ID" && rm -f "$MPIDIST_EXIT_CODE_FILE"
    if [ -z "$components" ]; then
        "${words[@]}" || code=$?
    else # with PMIx srun of Slurm 22.05 may wait for ever for tasks that have ended. It has 40 seconds.
        "${words[@]}" &
        started=$!
        until [ -s "$MPIDIST_EXIT_CODE_FILE" ] || ! kill -0 "$started" 2>/dev/null; do sleep 0.5; done
        timeout 40 tail --pid="$started" --follow /dev/null || kill -KILL "$started" || true
        wait "$started" || code=$?
    fi
    [ ! -s "$MPIDIST_EXIT_CODE_FILE" ] || code=$(cat "$MPIDIST_EXIT_CODE_FILE")
    rm -f "$MPIDIST_EXIT_CODE_FILE"
    return "$code"
}

# Tell whether a node is lost: ranks may notice it before Slurm does. Other failures of srun are none.
is_node_lost() {
    local said n=$SLURM_JOB_NUM_NODES
    said=$(timeout 60 srun --mpi=none --overlap -N "$n" -n "$n" --ntasks-per-node=1 /bin/true 2>&1) || said="$? $said"
    [ -z "$said" ] || echo "srun on each node: $said" >&2
    [[ $said =~ ^124|"failed on node"|"ode failure"|"node not available" ]]
}

#!/usr/bin/env bash
# The task of one node: starts torchrun for the node's ranks, and forwards Slurm's signals to them instead of torchrun.
#
# torchrun kills its ranks 30 seconds after a SIGTERM and dies of SIGUSR1. Here it ignores both. Some versions of Slurm
# signal all processes of a task, others only its first: the ranks get the signal either way.
set -u
# shellcheck source=slurm/lib/node_rank.sh
. "$LIB/node_rank.sh"
if ((node_rank == 0)); then echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$ATTEMPT/step"; fi

files=()
for ((i = node_rank * RANKS_PER_NODE; i < (node_rank + 1) * RANKS_PER_NODE; i++)); do
    files+=("$ATTEMPT/rank-$(printf %04d "$i")")
done

tell() {
    local file pid # no $(...), because bash 5.2 breaks when a signal arrives during one
    for file in "${files[@]}"; do
        if [[ -s $file.pid && ! -e $file.code ]]; then read -r pid <"$file.pid" && kill -s "$1" "$pid" 2>/dev/null; fi
    done
}

# Whether every rank of this node finished, or saved because it was asked to stop or because of an alarm.
all_well() {
    local file
    for file in "${files[@]}"; do
        [[ -s $file.code && $(<"$file.code") =~ ^(0|4|75)$ ]] || return 1
    done
}

trap 'tell USR1' TERM USR1
trap 'tell USR2' USR2
(
    trap '' TERM USR1 USR2
    exec "$PYTHON" -P -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE" \
        --node-rank="$node_rank" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
        --signals-to-handle=SIGINT,SIGQUIT --no-python bash "$LIB/rank.sh" "$@"
) &
while :; do
    wait $!
    kill -0 $! 2>/dev/null || break
done
trap '' TERM USR1 USR2
for file in "${files[@]}"; do # helpers of a rank that was killed would live on into the next attempt
    [[ ! -s $file.group ]] || kill -KILL -- "-$(<"$file.group")" 2>/dev/null
done
all_well

# shellcheck shell=bash
# shellcheck disable=SC2154,SC2153,SC2034 # names that the other files set or use
# While the ranks run: a request to stop is passed on, and those that hang are ended.

# One task per node, on all of its cores: it is bound to one unless told otherwise. It starts although a task before it
# cannot be killed, and no site's WaitTime ends the nodes that finish last.
STEP=(--ntasks-per-node=1 --cpu-bind=none --overlap --wait=0)

# Starts the ranks, and comes back when all of them are gone. Sets `hung`.
run_attempt() {
    local container=()
    export NODE_NAMES="${chosen[*]}"
    meeting_point "${chosen[0]}" 0
    keep_environment
    containers
    hung=''
    phase "attempt $attempt on ${chosen[*]}"
    srun "${STEP[@]}" --nodes="$NODES" --ntasks="$NODES" --nodelist="$(list "${chosen[@]}")" \
        --kill-on-bad-exit=1 --output="$ATTEMPT/node-%n.log" "${container[@]}" \
        bash "$LIB/inside.sh" bash "$LIB/node.sh" "$@" &
    srun_id=$!
    watch_attempt
    wait "$srun_id"
}

# Where ranks find each other: `$1` is the node. A new port every time, for old sockets linger; `$2` tells steps apart.
meeting_point() {
    MASTER_ADDR=$(slurm scontrol show node -o "$1" | grep -oP ' NodeAddr=\K\S+')
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 31 + restart * 7 + attempt + $2) % 10000))
    export MASTER_ADDR MASTER_PORT
}

# What an image may set as well, for inside.sh to set again where it runs.
keep_environment() {
    local name names
    mapfile -t names < <(grep -oP '^\w+(?==)' "$CODE/slurm/clusters/$CLUSTER.env")
    for name in PYTHONPATH NODE_NAMES MASTER_ADDR MASTER_PORT "${SETTINGS[@]}" "${INTERFACES[@]}" "${names[@]}"; do
        if [[ -n ${!name+set} ]]; then declare -px "$name"; fi
    done >"$ATTEMPT/environment"
}

# Sets `container`, what comes between srun and its command. What the run reads and writes is mounted where it lies.
containers() {
    local mounts=$PWD:$PWD place
    for place in "$(dirname "$RUN")" "${reads[@]}"; do
        [[ $place/ == "$PWD"/* ]] || mounts+=,$place:$place
    done
    mounts+=${MOUNTS:+,$MOUNTS}
    case $RUNTIME in
        bare) container=() ;;
        apptainer) container=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$IMAGE") ;;
        pyxis) container=(--container-image="$IMAGE" --container-name="grpo_mega-$SLURM_JOB_ID" --container-mounts="$mounts" --container-workdir="$PWD") ;;
    esac
}

# Passes a request to stop on, again and again, for a rank that starts may miss it; ends ranks that hang.
watch_attempt() {
    local beat='' new since=$SECONDS bound=$START_SECONDS stopping=''
    status running
    while kill -0 "$srun_id" 2>/dev/null; do
        nap "$POLL_SECONDS"
        new=$(cat "$ATTEMPT/rank-0000.beat" 2>/dev/null)
        if [[ $new != "$beat" ]]; then
            beat=$new since=$SECONDS bound=$HANG_SECONDS
            status running
        fi
        if heard_stop; then
            if [[ -z $stopping ]]; then stopping=$SECONDS && phase "asked to stop by SIG$asked"; fi
            signal_ranks USR1
            ((SECONDS - stopping <= STOP_SECONDS)) || end_hung "did not stop within $STOP_SECONDS s"
        elif ((SECONDS - since > bound)); then
            end_hung "no sign of life from rank 0 for $bound s, last phase: ${beat:-none}"
        fi
    done
}

# Sleeps, but not through the end of the step.
nap() {
    sleep "$1" &
    local sleeper=$!
    wait -n "$sleeper" "$srun_id"
    disown "$sleeper" 2>/dev/null # nobody needs to hear how it ends
    kill -KILL "$sleeper" 2>/dev/null
}

signal_ranks() {
    [[ ! -s $ATTEMPT/step ]] || scancel --signal="$1" "$(<"$ATTEMPT/step")" 2>/dev/null
}

# The stacks of all ranks go to their logs, then the step ends.
end_hung() {
    if [[ -z $hung ]]; then
        hung=$1
        phase "$1: stacks of all ranks go to $ATTEMPT/rank-*.log"
        signal_ranks USR2
        nap 5
    fi
    signal_ranks KILL
}

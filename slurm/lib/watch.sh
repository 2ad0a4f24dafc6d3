# shellcheck shell=bash
# shellcheck disable=SC2154,SC2153,SC2034 # names that the other files set or use
# While the ranks run: forwards requests to stop, and ends ranks that hang.

# Options of all steps: one task per node on all of its cores, not bound to one of them. --overlap starts it even if an
# earlier task cannot be killed, and --wait=0 keeps a site's WaitTime from ending the nodes that finish last.
STEP=(--ntasks-per-node=1 --cpu-bind=none --overlap --wait=0)

# Starts the ranks, and returns when all of them have ended. Sets `hung`.
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

# Sets the rendezvous address of the ranks: node `$1`, and a new port each time, because old sockets linger; `$2` is an
# offset for another step.
meeting_point() {
    MASTER_ADDR=$(slurm scontrol show node -o "$1" | grep -oP ' NodeAddr=\K\S+')
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 31 + restart * 7 + attempt + $2) % 10000))
    export MASTER_ADDR MASTER_PORT
}

# Writes the variables that an image may set differently to a file, for inside.sh to set again in the container: NAME=VALUE,
# each with a zero byte behind it.
keep_environment() {
    local name names
    mapfile -t names < <(grep -oP '^\w+(?==)' "$CODE/slurm/clusters/$CLUSTER.env")
    for name in PYTHONPATH PROGRAM NODE_NAMES MASTER_ADDR MASTER_PORT "${SETTINGS[@]}" "${INTERFACES[@]}" "${names[@]}"; do
        if [[ -n ${!name+set} ]]; then printf '%s=%s\0' "$name" "${!name}"; fi
    done >"$ATTEMPT/environment"
}

# Sets `container`, the arguments between srun and its command. What the run reads and writes is mounted at its own path.
containers() {
    local mounts=$PWD:$PWD path
    for path in "$(dirname "$TOP")" "${reads[@]}"; do
        [[ $path/ == "$PWD"/* ]] || mounts+=,$path:$path
    done
    mounts+=${MOUNTS:+,$MOUNTS}
    case $RUNTIME in
        bare) container=() ;;
        apptainer) container=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$IMAGE") ;;
        pyxis) container=(--container-image="$IMAGE" --container-name="grpo_mega-$SLURM_JOB_ID" --container-mounts="$mounts" --container-workdir="$PWD") ;;
    esac
}

# Forwards a request to stop, repeatedly, because a rank that is starting may miss it; ends ranks that hang.
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

# Sleeps until the time is over or the step ends.
nap() {
    sleep "$1" &
    local sleeper=$!
    wait -n "$sleeper" "$srun_id"
    disown "$sleeper" 2>/dev/null # its end needs no message
    kill -KILL "$sleeper" 2>/dev/null
}

signal_ranks() {
    [[ ! -s $ATTEMPT/step ]] || scancel --signal="$1" "$(<"$ATTEMPT/step")" 2>/dev/null
}

# Has all ranks print their stacks to their logs, then ends the step.
end_hung() {
    if [[ -z $hung ]]; then
        hung=$1
        phase "$1: stacks of all ranks go to $ATTEMPT/rank-*.log"
        signal_ranks USR2
        nap 5
    fi
    signal_ranks KILL
}

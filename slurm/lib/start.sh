# shellcheck shell=bash
# shellcheck disable=SC2154,SC2153,SC2034 # names that the other files set or use
# Before the ranks start: sets up the job, and chooses nodes that are fit.

# Sets everything that does not change until the end of the job.
enter_job() {
    restart=${SLURM_RESTART_COUNT:-0} attempt=0
    export LIB CODE PYTHONPATH=$CODE:$CODE/kernels${PYTHONPATH:+:$PYTHONPATH}
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it
    ask_configuration "$@"
    JOB=$TOP/slurm/job-$SLURM_JOB_ID LOCK=$RUN/run.lock
    mkdir -p "$JOB"
    keep_code
    mapfile -t history < <(cat "$JOB/attempts" 2>/dev/null)
    mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    phase "started on ${allocated[*]}, restart $restart"
    ((${#allocated[@]} == NODES + SPARES)) || refuse "the job has ${#allocated[@]} nodes, NODES=$NODES and" \
        "SPARES=$SPARES ask for $((NODES + SPARES)): submit with --nodes=$((NODES + SPARES)), or set NODES and SPARES"
    most_nodes=$NODES most_ranks=$RANKS_PER_NODE
    if [[ -n $RECIPE ]]; then keep_others_out "$@"; fi
}

# Copies the code for a script that was given to sbatch directly; later starts of the job use the copy.
keep_code() {
    if [[ -z ${GRPO_MEGA_CODE:-} ]]; then
        echo "warning: this job was submitted with sbatch directly, so each start reads the launcher from $CODE;" \
            "run the script itself to keep the code of the submission."
        [[ -s $JOB/code ]] || snapshot >"$JOB/code" || exit "$BAD_INPUT"
        GRPO_MEGA_CODE=$(<"$JOB/code")
        slurm scontrol update jobid="$SLURM_JOB_ID" comment="$TOP" # where status.sh looks for the run
    fi
    CODE=$GRPO_MEGA_CODE LIB=$GRPO_MEGA_CODE/slurm/lib
    PYTHONPATH=$CODE:$CODE/kernels:$PYTHONPATH
}

# Sets `chosen`, the nodes of this attempt: the first of the allocation that pass the checks. Ends the job when there are
# too few.
choose_nodes() {
    local candidates=() fit=() node verdict
    declare -gA unfit=() silent=() down=()
    for node in $(down_nodes); do down[$node]=1; done
    for node in "${allocated[@]}"; do [[ -n ${down[$node]:-} ]] || candidates+=("$node"); done
    unpack "${candidates[@]}"
    check_nodes "${candidates[@]}"
    sort_nodes "${candidates[@]}"
    # Of two nodes it is unknown whose link is slow, and without GPUs there is no fabric.
    if ((CHECK_LINKS && ${#fit[@]} > 2)); then
        check_links "${fit[@]}"
        sort_nodes "${fit[@]}"
    fi
    local others=''
    ((${#silent[@]} == 0)) || others+="; no answer from ${!silent[*]}"
    ((${#down[@]} == 0)) || others+="; down: ${!down[*]}"
    phase "checked: ${#fit[@]} of ${#allocated[@]} nodes are fit$others"
    if heard_stop; then leave_for_later; fi
    if ((${#fit[@]} < NODES)); then too_few; fi
    rm -f "$JOB/excluded"
    chosen=("${fit[@]:0:NODES}")
}

# Prints the nodes of the allocation that Slurm considers down.
down_nodes() {
    slurm sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,drain,fail --format=%N | sort -u
}

# Puts each node into `fit`, `silent` or `unfit`, by the reports that its checks have written so far.
sort_nodes() {
    local node verdict judged=0
    fit=()
    while read -r node verdict; do
        judged=$((judged + 1))
        case $verdict in
            ok) fit+=("$node") ;;
            silent) silent[$node]=1 ;;
            *) unfit[$node]=$verdict && phase "$node is left out, $verdict" ;;
        esac
    done < <("$HOST_PYTHON" -P "$CODE/grpo_mega/forecast/doctor/preflight.py" judge --folder "$ATTEMPT/preflight" --seconds "$checked" \
        --nodes "$@")
    ((judged == $#)) || give_up "preflight.py judged $judged of $# nodes; its message is above"
}

# Makes a container from the image on every node, which takes pyxis minutes; later steps use it by its name.
unpack() {
    local container=()
    [[ $RUNTIME == pyxis ]] || return 0
    containers
    timeout --kill-after=10 "$START_SECONDS" srun "${STEP[@]}" --nodes=$# --ntasks=$# --nodelist="$(list "$@")" \
        "${container[@]}" true >"$ATTEMPT/unpack.log" 2>&1 || phase "not all nodes have the image, see $ATTEMPT/unpack.log"
}

# Checks nodes. A dead node may end the whole step, so nodes without report are checked again one by one.
check_nodes() {
    local folder=$ATTEMPT/preflight node token=$RANDOM$RANDOM began=$SECONDS
    mkdir -p "$folder"
    echo "$token" >"$folder/token"
    keep_environment
    check_on "$@"
    ls "$folder" >/dev/null # without this, new files may stay invisible over NFS
    for node in "$@"; do
        [[ -s $folder/$node.json ]] || check_on "$node" &
    done
    wait
    checked=$((SECONDS - began + 1))
}

# Measures links between pairs of nodes. A failure of the whole names no node; the ranks will report more.
check_links() {
    local container=() NODE_NAMES="$*" processes=$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))
    meeting_point "$1" 5000
    export NODE_NAMES
    keep_environment
    containers
    # shellcheck disable=SC2016 # expanded on the node
    timeout --kill-after=10 "$CHECK_SECONDS" srun "${STEP[@]}" --nodes=$# --ntasks=$# --nodelist="$(list "$@")" \
        --kill-on-bad-exit=1 "${container[@]}" bash "$LIB/inside.sh" bash -c '. "$LIB/node_rank.sh" && exec "$PYTHON" \
        -P -m torch.distributed.run --nnodes="$1" --nproc-per-node="$2" --node-rank="$node_rank" \
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$3" --folder "$4"' links $# "$processes" \
        "$CODE/grpo_mega/forecast/doctor/links.py" "$ATTEMPT/preflight" >>"$ATTEMPT/preflight/links.log" 2>&1 ||
        phase "links between the nodes could not be measured, see $ATTEMPT/preflight/links.log"
}

check_on() {
    local container=()
    containers
    timeout --kill-after=10 "$CHECK_SECONDS" srun "${STEP[@]}" --nodes=$# --ntasks=$# --nodelist="$(list "$@")" \
        "${container[@]}" bash "$LIB/inside.sh" "$PYTHON" -P "$CODE/grpo_mega/forecast/doctor/preflight.py" check --folder "$folder" \
        --gpus "$GPUS_PER_NODE" --free-mb "$MIN_FREE_MB" --interface "$INTERFACE" --token "$token" \
        --reads "${reads[@]}" >>"$folder/log" 2>&1
}

# Handles too few fit nodes: those that Slurm considers down are replaced when the job is requeued, others are excluded.
too_few() {
    local node all=("${allocated[@]}")
    await_slurms_verdict
    if ((${#unfit[@]} + ${#silent[@]} == 0)); then leave_for_later; fi
    {
        echo "too few nodes are fit for NODES=$NODES:"
        for node in "${!unfit[@]}"; do echo "    $node ${unfit[$node]}"; done
        for node in "${!silent[@]}"; do echo "    $node does not answer"; done
    } | tee -a "$JOB/report.txt" >&2
    if ((${#all[@]} > 1 && ${#unfit[@]} + ${#silent[@]} == ${#all[@]})); then # a single node may well be the cause
        status unfit
        echo "error: no node of this job is fit, so others are not tried; see $JOB/report.txt" >&2
        exit "$UNFIT"
    fi
    exclude "${!unfit[@]}" "${!silent[@]}"
}

# Waits for Slurm to notice nodes that do not answer. After its SlurmdTimeout it ends the job, or with --no-kill removes
# only the node.
await_slurms_verdict() {
    local deadline=$((SECONDS + NOTICE_SECONDS)) node
    while ((${#silent[@]})) && ((SECONDS < deadline)); do
        sleep 1
        if heard_stop; then leave_for_later; fi
        for node in $(down_nodes); do unset "silent[$node]"; done
    done
}

# Waits for the run directory's lock. A dead node's lock remains until the file system's servers have noticed.
await_lock() {
    local deadline=$((SECONDS + LOCK_SECONDS)) holder=''
    [[ -e $LOCK ]] || return 0
    until flock --nonblock --conflict-exit-code 75 "$LOCK" true; do
        (($? == 75)) || return # a file system without locks: the ranks will report it
        if [[ -z $holder ]]; then
            holder=$(<"$LOCK")
            phase "$RUN is in use by ${holder:=a process that just started}: waiting for up to $LOCK_SECONDS s"
        fi
        if heard_stop; then leave_for_later; fi
        if ((SECONDS >= deadline)); then
            refuse "$RUN is in use by $holder: wait for it, stop it, or choose another run.name. If that machine is gone," \
                "the file system still keeps its lock: ask for it to be released, or wait longer (LOCK_SECONDS)"
        fi
        sleep 1
    done
}

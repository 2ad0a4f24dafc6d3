# shellcheck shell=bash
# shellcheck disable=SC2154 # launch.sh sets `user`, common.sh settings and exit codes
# shellcheck disable=SC2153
# Run by Slurm, a script starts its experiment on the nodes it was given, watches it, and decides what comes next:
#
#     every rank ended with 0        done, exit 0
#     a rank ended with 75           the run saved because it was asked to: back into the queue, exit 0
#     a rank ended with 2            the input cannot run: exit 2
#     anything else, or a hang       again in this allocation, on nodes that pass the checks; MAX_FAILURES failures
#                                    at the same checkpoint: a report, exit 1
#     too few nodes pass the checks  a new job that leaves them out, at most MAX_RESUBMISSIONS times: exit 3
#
# srun's exit code says nothing (--kill-on-bad-exit masks it) and torchrun's is always 1: each rank leaves its own in a
# file. SIGUSR1 (Slurm, ahead of the time limit) and SIGTERM (preemption, scancel) ask for a stop.

run_job() {
    asked=''
    trap 'asked=${asked:-USR1}' USR1
    trap 'asked=${asked:-TERM}' TERM
    enter_job "$@"
    while :; do
        attempt=$((attempt + 1))
        ATTEMPT=$JOB/restart-$restart-attempt-$attempt
        mkdir -p "$ATTEMPT"
        choose_nodes
        run_attempt "$@"
        note_attempt
        decide
    done
}

# Everything that stays the same from here to the end of the job.
enter_job() {
    restart=${SLURM_RESTART_COUNT:-0} attempt=0
    export LIB CODE PYTHONPATH=$CODE:$CODE/kernels${PYTHONPATH:+:$PYTHONPATH}
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it
    ask_configuration "$@"
    JOB=$RUN/slurm/job-$SLURM_JOB_ID
    mkdir -p "$JOB"
    ln -sfn "job-$SLURM_JOB_ID" "$RUN/slurm/latest"
    keep_code
    mapfile -t history < <(cat "$JOB/attempts" 2>/dev/null)
    mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    phase "started on ${allocated[*]}, restart $restart"
    ((${#allocated[@]} >= NODES)) || refuse "the job has ${#allocated[@]} nodes and NODES=$NODES: submit with --nodes=$NODES"
}

# A script that was given to sbatch as it is copies its code now, and uses the copy when it is started again.
keep_code() {
    if [[ -z ${GRPO_MEGA_CODE:-} ]]; then
        [[ -s $JOB/code ]] || snapshot >"$JOB/code" || exit "$BAD_INPUT"
        GRPO_MEGA_CODE=$(<"$JOB/code")
        scontrol update jobid="$SLURM_JOB_ID" comment="$RUN" # where status.sh looks for the run
    fi
    CODE=$GRPO_MEGA_CODE LIB=$GRPO_MEGA_CODE/slurm/lib
    PYTHONPATH=$CODE:$CODE/kernels:$PYTHONPATH
}

# What happened when, in seconds since the job started.
phase() {
    local line
    line=$(printf '%8d  %s' "$SECONDS" "$*")
    echo "$line"
    echo "$line" >>"$JOB/phases-restart-$restart.log"
}

# The status file: one line for people and scripts.
status() {
    local newest
    newest=$(newest_checkpoint)
    printf 'state=%s job=%s restart=%s attempt=%s %s checkpoint=%s updated=%s\n' "$1" "$SLURM_JOB_ID" "$restart" \
        "$attempt" "$(progress)" "${newest:-none}" "$(date +%FT%T)" >"$RUN/slurm/.status.tmp"
    mv "$RUN/slurm/.status.tmp" "$RUN/slurm/status"
}

# Step, reward and seconds per step from the last line of the metrics.
progress() {
    local line
    line=$(tail -n 1 "$RUN/metrics.jsonl" 2>/dev/null)
    echo "step=$(number step "$line") reward=$(number reward/mean "$line") step_seconds=$(number time/step "$line")"
}

number() {
    local found
    found=$(grep -o "\"$1\": *[-+.0-9e]*" <<<"$2")
    echo "${found##*[: ]}"
}

newest_checkpoint() {
    local found
    found=$(find "$RUN/checkpoints" -maxdepth 1 -name 'step-*' -printf '%f\n' 2>/dev/null | sort | tail -n 1)
    echo "$found"
}

# Sets `chosen`, the nodes of this attempt: the first of the allocation that pass the checks. Leaves when they are too few.
choose_nodes() {
    local candidates=() fit=() node verdict
    declare -gA unfit=() silent=() down=()
    for node in $(down_nodes); do down[$node]=1; done
    for node in "${allocated[@]}"; do [[ -n ${down[$node]:-} ]] || candidates+=("$node"); done
    while read -r node verdict; do
        case $verdict in
            ok) fit+=("$node") ;;
            silent) silent[$node]=1 ;;
            *) unfit[$node]=$verdict && phase "$node is left out, $verdict" ;;
        esac
    done < <(preflight "${candidates[@]}")
    phase "checked: ${#fit[@]} of ${#allocated[@]} nodes are fit; no answer: ${!silent[*]}; down: ${!down[*]}"
    if [[ -n $asked ]]; then leave_for_later; fi
    if ((${#fit[@]} < NODES)); then too_few; fi
    chosen=("${fit[@]:0:NODES}")
}

# Nodes of the allocation that Slurm has given up.
down_nodes() {
    sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,drain,fail --format=%N | sort -u
}

# Prints a verdict per node. A dead node may take the whole step with it: who said nothing is asked again, alone.
preflight() {
    local folder=$ATTEMPT/preflight node token=$RANDOM$RANDOM
    mkdir -p "$folder"
    echo "$token" >"$folder/token"
    check_on "$@"
    for node in "$@"; do
        [[ -s $folder/$node.json ]] || check_on "$node" &
    done
    wait
    "$HOST_PYTHON" -P "$CODE/grpo_mega/platform/preflight.py" judge --folder "$folder" --nodes "$@"
}

check_on() {
    local container=()
    containers
    timeout "$CHECK_SECONDS" srun --nodes=$# --ntasks=$# --ntasks-per-node=1 --nodelist="$(list "$@")" --wait=5 \
        "${container[@]}" "$PYTHON" -P "$CODE/grpo_mega/platform/preflight.py" check --folder "$folder" \
        --gpus "$GPUS_PER_NODE" --free-mb "$MIN_FREE_MB" --token "$token" >>"$folder/log" 2>&1
}

# Too few nodes: those that Slurm has given up are replaced when the job is queued again, others must be excluded.
too_few() {
    local node all=("${allocated[@]}")
    await_slurms_verdict
    if ((${#unfit[@]} + ${#silent[@]} == 0)); then leave_for_later; fi
    {
        echo "too few nodes are fit for NODES=$NODES:"
        for node in "${!unfit[@]}"; do echo "    $node ${unfit[$node]}"; done
        for node in "${!silent[@]}"; do echo "    $node does not answer"; done
    } | tee -a "$JOB/report.txt" >&2
    if ((${#unfit[@]} + ${#silent[@]} == ${#all[@]})); then
        status unfit
        echo "error: no node of this job is fit, so others are not tried; see $JOB/report.txt" >&2
        exit "$UNFIT"
    fi
    resubmit "${!unfit[@]}" "${!silent[@]}"
}

# A node that does not answer is dead or cut off. Slurm finds out after its SlurmdTimeout, and then takes the job away,
# or with --no-kill only the node.
await_slurms_verdict() {
    local deadline=$((SECONDS + NOTICE_SECONDS)) node
    while ((${#silent[@]})) && ((SECONDS < deadline)); do
        sleep 1
        if [[ -n $asked ]]; then leave_for_later; fi
        for node in $(down_nodes); do unset "silent[$node]"; done
    done
}

# A new job with the same script, settings and options that leaves the nodes `$@` out, and starts when this one is over.
resubmit() {
    local without=("$@") count=${GRPO_MEGA_RESUBMISSION:-0} job options script name excluded unset=()
    if ((count >= MAX_RESUBMISSIONS)); then
        status unfit
        echo "error: this is resubmission $count of $MAX_RESUBMISSIONS (MAX_RESUBMISSIONS); see $JOB/report.txt" >&2
        exit "$UNFIT"
    fi
    job=$(scontrol show job -o "$SLURM_JOB_ID")
    excluded=$(field ExcNodeList "$job")
    options=(--nodes="${#allocated[@]}" --exclude="$(list "${without[@]}")${excluded:+,$excluded}"
        --dependency="afterany:$SLURM_JOB_ID" --job-name="$SLURM_JOB_NAME" --partition="$(field Partition "$job")"
        --time="$(field TimeLimit "$job")" --output="$RUN/slurm/job-%j.log" --comment="$RUN")
    if ((SPARES)); then options+=(--no-kill); fi
    for name in Account QOS Reservation; do
        if [[ -n $(field "$name" "$job") ]]; then options+=("--${name,,}=$(field "$name" "$job")"); fi
    done
    script=$CODE/slurm/$(basename "$(field Command "$job")")
    for name in ${!SLURM_*}; do [[ $name == SLURM_CONF ]] || unset+=(-u "$name"); done
    export GRPO_MEGA_RESUBMISSION=$((count + 1)) GRPO_MEGA_CODE
    if ! job=$(env "${unset[@]}" sbatch --parsable "${options[@]}" "$script" "${user[@]}"); then
        status unfit
        echo "error: Slurm takes no job without ${without[*]}; see $JOB/report.txt" >&2
        exit "$UNFIT"
    fi
    status resubmitted
    phase "job $job goes on without ${without[*]}"
    exit 0
}

# A field of what `scontrol show job -o` says; empty for (null).
field() {
    local found
    found=$(grep -oP "(^| )$1=\K\S+" <<<"$2" | head -n 1)
    [[ $found == "(null)" ]] || echo "$found"
}

# Starts the ranks, and comes back when all of them are gone. Sets `hung`.
run_attempt() {
    local container=()
    export ATTEMPT NODE_NAMES="${chosen[*]}"
    MASTER_ADDR=$(scontrol show node -o "${chosen[0]}" | grep -oP ' NodeAddr=\K\S+')
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 31 + restart * 7 + attempt) % 10000)) # a new one: old sockets linger
    export MASTER_ADDR MASTER_PORT
    containers
    hung=''
    phase "attempt $attempt on ${chosen[*]}"
    # A task is bound to one core unless told otherwise, and the task of a node is all of its ranks.
    srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --nodelist="$(list "${chosen[@]}")" \
        --cpu-bind=none --kill-on-bad-exit=1 --output="$ATTEMPT/node-%n.log" "${container[@]}" bash "$LIB/node.sh" "$@" &
    srun_id=$!
    watch_attempt
    wait "$srun_id"
}

list() {
    local IFS=,
    echo "$*"
}

# Sets `container`, what comes between srun and its command.
containers() {
    local mounts=$PWD:$PWD,$RUN:$RUN${MOUNTS:+,$MOUNTS}
    case $RUNTIME in
        bare) container=() ;;
        apptainer) container=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$IMAGE") ;;
        pyxis) container=(--container-image="$IMAGE" --container-mounts="$mounts" --container-workdir="$PWD") ;;
    esac
}

# Passes a request to stop on, again and again, for a rank that starts may miss it; ends ranks that hang.
watch_attempt() {
    local beat='' new since=$SECONDS bound=$START_SECONDS stopping=''
    while kill -0 "$srun_id" 2>/dev/null; do
        nap "$POLL_SECONDS"
        status running
        new=$(cat "$ATTEMPT/rank-0000.beat" 2>/dev/null)
        if [[ $new != "$beat" ]]; then beat=$new since=$SECONDS bound=$HANG_SECONDS; fi
        if [[ -n $asked ]]; then
            if [[ -z $stopping ]]; then stopping=$SECONDS && phase "asked to stop by SIG$asked"; fi
            signal_ranks USR1
            ((SECONDS - stopping <= STOP_SECONDS)) || end_hung "did not stop within $STOP_SECONDS s"
        elif ((SECONDS - since > bound)); then
            read -r new <<<"$beat"
            end_hung "no sign of life from rank 0 for $bound s, last phase: ${new:-none}"
        fi
    done
}

# Sleeps, but not through a signal or the end of the step.
nap() {
    sleep "$1" &
    local sleeper=$!
    wait -n "$sleeper" "$srun_id"
    kill "$sleeper" 2>/dev/null
    wait "$sleeper" 2>/dev/null
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

# How the attempt ended, from the codes that the ranks left.
outcome() {
    local codes
    codes=$(cat "$ATTEMPT"/rank-*.code 2>/dev/null | sort -n | uniq -c | tr -s ' ' | paste -sd,)
    if [[ $codes == " $((NODES * RANKS_PER_NODE)) 0" ]]; then
        echo completed
    elif [[ $codes =~ " $STOPPED"(,|$) ]]; then
        echo stopped
    elif [[ $codes =~ " $BAD_INPUT"(,|$) ]]; then
        echo refused
    elif [[ -n $hung ]]; then
        echo hung
    else
        echo failed
    fi
}

note_attempt() {
    outcome=$(outcome)
    history+=("$restart $attempt $outcome $(newest_checkpoint)") # also in memory: the disk may be full
    echo "${history[-1]}" >>"$JOB/attempts"
    phase "attempt $attempt $outcome"
    status "$outcome"
}

decide() {
    case $outcome in
        completed) exit 0 ;;
        refused) last_lines "$(first_to_fail)" >&2 && exit "$BAD_INPUT" ;;
        stopped) leave_for_later ;;
    esac
    report
    [[ -z $asked ]] || leave_for_later
    if (($(failures_here) >= MAX_FAILURES)); then
        status gave-up
        echo "error: $(failures_here) failures at the same checkpoint; $JOB/report.txt says how" >&2
        exit 1
    fi
}

# Failures in a row, over all starts of the job, since the newest checkpoint was written.
failures_here() {
    local here count=0 how where
    here=$(newest_checkpoint)
    while read -r _ _ how where; do
        if [[ $how =~ ^(failed|hung)$ && $where == "$here" ]]; then count=$((count + 1)); else count=0; fi
    done < <(printf '%s\n' "${history[@]}")
    echo "$count"
}

# Which rank failed before the others, as the prefix of its files; nothing when none did.
#
# What the kernel killed is a cause: it is named first, for the others may say that it is gone before its shell has seen
# it. Aborts are left to their place in time: NCCL aborts ranks that have waited in vain.
first_to_fail() {
    local moment file code class
    find "$ATTEMPT" \( -name 'rank-*.failed' -o -name 'rank-*.code' \) -printf '%T@ %p\n' | while read -r moment file; do
        code=$(cat "${file%.*}.code" 2>/dev/null)
        case $code in
            0 | 75) continue ;;
            132 | 135 | 136 | 137 | 139) class=0 ;;
            *) class=1 ;;
        esac
        echo "$class $moment ${file%.*}"
    done | sort -k 1,1n -k 2,2n | head -n 1 | cut -d' ' -f3
}

# The ranks that entered the fewest phases: the others wait for them.
behind() {
    local fewest
    fewest=$(cat "$ATTEMPT"/rank-*.beat 2>/dev/null | sort -n | head -n 1)
    grep -l "^${fewest%% *} " "$ATTEMPT"/rank-*.beat 2>/dev/null | xargs -r -n 1 basename -s .beat | paste -sd' '
}

# Ranks by the innermost line of their stacks, the rare ones first: who hangs is seldom where those are that wait for it.
places() {
    local file
    for file in "$ATTEMPT"/rank-*.log; do
        echo "$(basename "$file" .log)$(grep -A 1 '^Current thread' "$file" | tail -n 1)"
    done | awk '{ rank = $1; $1 = ""; ranks[$0] = ranks[$0] " " rank; count[$0]++ }
        END { for (place in ranks) print count[place], "at" (place == "" ? " an unknown place" : place) ":" ranks[place] }' |
        sort -n | cut -c 1-500 | sed 's/^/    /'
}

last_lines() {
    [[ -z $1 ]] || tail -n 25 "$1.log"
}

# Ranks that left no exit code: their node died, or torchrun had to kill them.
without_a_word() {
    local rank
    for ((rank = 0; rank < NODES * RANKS_PER_NODE; rank++)); do
        [[ -e $ATTEMPT/rank-$(printf %04d "$rank").code ]] || echo "rank $rank on ${chosen[rank / RANKS_PER_NODE]}"
    done | paste -sd, | cut -c 1-500
}

report() {
    local first rank gone
    first=$(first_to_fail)
    gone=$(without_a_word)
    {
        echo "attempt $attempt, restart $restart, on ${chosen[*]}: $outcome${hung:+: $hung}"
        if [[ $outcome == hung ]]; then
            echo "behind the others: $(behind)"
            echo "where each rank is (whole stacks in $ATTEMPT/rank-*.log):"
            places
        elif [[ -n $first ]]; then
            rank=$((10#${first##*-}))
            echo "first to fail: rank $rank on ${chosen[rank / RANKS_PER_NODE]}, exit code $(cat "$first.code" 2>/dev/null || echo none)," \
                "last sign of life: $(cat "$first.beat" 2>/dev/null || echo none)"
            echo "its last lines ($first.log):"
            last_lines "$first" | sed 's/^/    /'
        else
            echo "no rank said why; see $ATTEMPT/node-*.log"
        fi
        [[ -z $gone ]] || echo "gone without a word: $gone"
    } | tee -a "$JOB/report.txt"
}

# Back into the queue, unless Slurm has taken the job away or puts it back itself.
leave_for_later() {
    local state
    state=$(scontrol show job -o "$SLURM_JOB_ID" | grep -oP ' JobState=\K\S+')
    if [[ $state != RUNNING ]]; then
        status "taken-away"
        exit 0
    fi
    status requeued
    phase "back into the queue"
    trap '' TERM USR1 # requeueing ends this script
    scontrol requeue "$SLURM_JOB_ID" || { status stopped && refuse "Slurm does not requeue this job: submit it again"; }
    exit 0
}

# shellcheck shell=bash
# shellcheck disable=SC2154,SC2153,SC2034 # names that the other files set or use
# After the ranks have ended: the outcome, its cause, and what to do next.

note_attempt() {
    outcome=$(outcome)
    history+=("$restart $attempt $outcome $(newest_checkpoint)") # also in memory: the disk may be full
    echo "${history[-1]}" >>"$JOB/attempts"
    phase "attempt $attempt $outcome"
    if [[ -z $RECIPE || $outcome != completed ]]; then status "$outcome"; fi # a recipe is after its last stage
}

# Prints the outcome of the attempt, from the files of its ranks. A program may exit with 0 for no reason: a run is
# completed when its summary says so, and a run that begins or continues has no summary.
outcome() {
    local ranks=$((NODES * RANKS_PER_NODE))
    if all_ended_well && is_whole; then
        echo completed
    elif [[ $(first_code) == "$STOPPED" ]]; then
        echo stopped
    elif [[ $(first_code) == "$ALARMED" ]]; then
        echo alarmed
    elif (($(compgen -G "$ATTEMPT/rank-*.refused" | wc -l) == ranks)); then
        echo refused
    elif [[ -n $hung ]]; then
        echo hung
    else
        echo failed
    fi
}

# Whether there is what the attempt was for; a recipe notes then that its stage is done.
is_whole() {
    if [[ -n $RECIPE ]]; then
        ask_of_stages "done" "${given[@]}"
    else
        grep -q '"status": "completed"' "$RUN/summary.json" 2>/dev/null
    fi
}

# Whether every rank exited with 0.
all_ended_well() {
    (($(cat "$ATTEMPT"/rank-*.code 2>/dev/null | grep -cx 0) == NODES * RANKS_PER_NODE))
}

# Prints the exit code of the rank that was the first to end, or to report that it will: others may end because of it.
first_code() {
    local file
    file=$(find "$ATTEMPT" -name 'rank-*' \( -name '*.failed' -o -name '*.refused' -o -name '*.code' \) -printf '%T@ %p\n' |
        sort -n | head -n 1 | cut -d' ' -f2-)
    [[ -z $file ]] || cat "${file%.*}.code" 2>/dev/null
}

decide() {
    case $outcome in
        completed)
            [[ -n $RECIPE ]] || exit 0
            phase "stage $stage is done"
            rm -f "$JOB/leaves" # how often it left is counted for each stage
            return
            ;;
        refused)
            [[ -z $RECIPE ]] || echo "error: stage $stage of the recipe $RECIPE cannot run:" >&2
            last_lines "$(first_to_fail)" >&2 && exit "$BAD_INPUT"
            ;;
        stopped) leave_for_later ;;
        alarmed)
            last_lines "$ATTEMPT/rank-0000" >&2
            exit "$ALARMED"
            ;;
    esac
    report
    if heard_stop; then leave_for_later; fi
    if (($(failures_here) >= MAX_FAILURES)); then
        give_up "$(failures_here) failures at the same checkpoint; $JOB/report.txt says how"
    fi
}

give_up() {
    status gave-up
    echo "error: $1" >&2
    exit 1
}

# Prints the number of failures in a row, over all starts of the job, since the newest checkpoint was written.
failures_here() {
    local newest count=0 how checkpoint
    newest=$(newest_checkpoint)
    while read -r _ _ how checkpoint; do
        if [[ $how =~ ^(failed|hung)$ && $checkpoint == "$newest" ]]; then count=$((count + 1)); else count=0; fi
    done < <(printf '%s\n' "${history[@]}")
    echo "$count"
}

# Prints the rank that failed before the others, as the prefix of its files; nothing when none failed.
#
# A rank that the kernel killed is a cause and comes first, because others may report its end before its own shell does.
# Aborts are ordered by time: NCCL aborts ranks that have waited in vain. A rank that only tells of an error elsewhere
# comes last, however early.
first_to_fail() {
    local moment file code class
    find "$ATTEMPT" \( -name 'rank-*.failed' -o -name 'rank-*.code' \) -printf '%T@ %p\n' | while read -r moment file; do
        code=$(cat "${file%.*}.code" 2>/dev/null)
        case $code in
            0 | 4 | 75) continue ;;
            132 | 135 | 136 | 137 | 139) class=0 ;;
            *) class=1 ;;
        esac
        ! grep -qs elsewhere "${file%.*}.failed" || class=2
        echo "$class $moment ${file%.*}"
    done | sort -k 1,1n -k 2,2n | head -n 1 | cut -d' ' -f3-
}

# Prints the ranks that entered the fewest phases: the others wait for them.
slowest() {
    local fewest
    fewest=$(cat "$ATTEMPT"/rank-*.beat 2>/dev/null | sort -n | head -n 1)
    grep -l "^${fewest%% *} " "$ATTEMPT"/rank-*.beat 2>/dev/null | xargs -r -n 1 basename -s .beat | paste -sd' '
}

# Prints ranks by the innermost line of their stacks, rare lines first: waiting ranks share a line, a hanging one
# does not.
stacks() {
    local file
    for file in "$ATTEMPT"/rank-*.log; do
        echo "$(basename "$file" .log)$(grep -A 1 '^Current thread' "$file" | tail -n 1)"
    done | awk '{ rank = $1; $1 = ""; ranks[$0] = ranks[$0] " " rank; count[$0]++ }
        END { for (line in ranks) print count[line], "at" (line == "" ? " an unknown line" : line) ":" ranks[line] }' |
        sort -n | cut -c 1-500 | sed 's/^/    /'
}

last_lines() {
    [[ -z $1 ]] || tail -n 25 "$1.log"
}

# Prints the ranks without exit code: their node died, or torchrun had to kill them.
without_code() {
    local rank
    for ((rank = 0; rank < NODES * RANKS_PER_NODE; rank++)); do
        [[ -e $ATTEMPT/rank-$(printf %04d "$rank").code ]] || echo "rank $rank on ${chosen[rank / RANKS_PER_NODE]}"
    done | paste -sd, | cut -c 1-500
}

report() {
    local first rank gone
    first=$(first_to_fail)
    gone=$(without_code)
    {
        echo "attempt $attempt, restart $restart,${stage:+ stage $stage,} on ${chosen[*]}: $outcome${hung:+: $hung}"
        if [[ $outcome == hung ]]; then
            echo "behind the others: $(slowest)"
            echo "where each rank is (whole stacks in $ATTEMPT/rank-*.log):"
            stacks
            [[ ! -d $RUN/flight ]] || echo "what each rank did last: python tools/trace.py $RUN --last"
        elif [[ -n $first ]]; then
            rank=$((10#${first##*-}))
            echo "first to fail: rank $rank on ${chosen[rank / RANKS_PER_NODE]}, exit code $(cat "$first.code" 2>/dev/null || echo none)," \
                "last sign of life: $(cat "$first.beat" 2>/dev/null || echo none)"
            echo "its last lines ($first.log):"
            last_lines "$first" | sed 's/^/    /'
        elif all_ended_well; then
            echo "every rank ended with exit code 0, but $RUN/summary.json does not say that the run is completed${stage:+,}" \
                "${stage:+or $RUN is not what stage $stage makes }(something has ended the ranks too early, see $ATTEMPT/rank-*.log)"
        else
            echo "no rank said why; see $ATTEMPT/node-*.log"
        fi
        [[ -z $gone ]] || echo "ended without an exit code: $gone"
    } | tee -a "$JOB/report.txt"
}

# Puts the job back into the queue, unless Slurm has taken it away or puts it back itself.
leave_for_later() {
    local state
    state=$(field JobState)
    if [[ -n $state && $state != RUNNING ]]; then
        status "taken-away"
        exit 0
    fi
    if heard_stop && [[ $asked == USR1 ]]; then count_leave; fi
    status requeued
    phase "back into the queue"
    back_into_queue
    exit 0
}

# Gives up when the time limit has stopped the job several times in a row at the same checkpoint: it is too short.
count_leave() {
    local here count
    here=$(newest_checkpoint)
    echo "${here:-none}" >>"$JOB/leaves"
    count=$(tac "$JOB/leaves" | awk -v here="${here:-none}" '$0 != here { exit } { count++ } END { print count }')
    ((count < MAX_FAILURES)) || give_up "asked to stop $count times in a row at the same checkpoint (${here:-none}): the time limit is \
too short for --signal, which asks for a stop ahead of it; give a longer --time"
}

# Puts the job back into the queue with all its options, to start on other nodes than those in `$@`.
exclude() {
    local all nodes rest needed=${#allocated[@]} before
    before=$(field ExcNodeList)
    nodes=$(slurm sinfo --noheader --Node --partition="$(field Partition)" --format=%N) ||
        give_up "Slurm does not say which nodes there are; submit again"
    mapfile -t all < <({ [[ -z $before ]] || scontrol show hostnames "$before"; printf '%s\n' "$@"; } | sort -u)
    rest=$(comm -13 <(printf '%s\n' "${all[@]}") <(sort -u <<<"$nodes") | wc -l)
    list "$@" >>"$JOB/excluded"
    if ((rest < needed)); then too_bad "there are $rest nodes besides ${all[*]}, and the job needs $needed"; fi
    if (($(wc -l <"$JOB/excluded") > MAX_EXCLUSIONS)); then
        too_bad "unfit nodes were left out MAX_EXCLUSIONS=$MAX_EXCLUSIONS times in a row"
    fi
    status requeued
    phase "back into the queue without ${all[*]}"
    back_into_queue
    # Slurm accepts the list only now; a requeued job waits for longer than this takes (cred_expire).
    slurm scontrol update jobid="$SLURM_JOB_ID" ExcNodeList="$(list "${all[@]}")"
    exit 0
}

too_bad() {
    status unfit
    echo "error: $1; see $JOB/report.txt" >&2
    exit "$UNFIT"
}

# Requeues the job, which ends this script a little later. A job that may not be requeued can permit it to itself.
back_into_queue() {
    slurm scontrol update jobid="$SLURM_JOB_ID" requeue=1
    if ! slurm scontrol requeue "$SLURM_JOB_ID"; then
        status stopped
        echo "error: Slurm does not put this job back into the queue; its work is saved: submit it again" >&2
        exit 1
    fi
}

# Prints a field of this job in Slurm; nothing for (null).
field() {
    local value
    value=$(slurm scontrol show job -o "$SLURM_JOB_ID" | grep -oP "(^| )$1=\K\S+" | head -n 1)
    [[ $value == "(null)" ]] || echo "$value"
}

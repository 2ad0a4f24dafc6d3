# shellcheck shell=bash
# shellcheck disable=SC2154,SC2153,SC2034 # names that the other files set or use
# In a job, a script starts its experiment on the nodes of the allocation, watches it, and decides what to do next:
#
#     every rank ended with 0,       done, exit 0
#     and summary.json is there
#     a rank ended with 75           the run saved because it was asked to: back into the queue, exit 0
#     a rank ended with 4            an alarm of run.stop_on stopped the run, which is saved: exit 4
#     every rank refused its input   it cannot run: exit 2
#     anything else, or a hang       again in this allocation, on nodes that pass the checks; MAX_FAILURES failures
#                                    at the same checkpoint: a report, exit 1
#     too few nodes pass the checks  back into the queue without those that do not, MAX_EXCLUSIONS times: then exit 3
#
# With a RECIPE this is done for each stage that is not done yet, in order (stages.sh); after the last one, exit 0.
#
# srun's exit code is useless (--kill-on-bad-exit masks it) and torchrun's is always 1: each rank writes its own into a
# file. SIGUSR1 (Slurm, ahead of the time limit) and SIGTERM (preemption, scancel) ask for a stop.

# The shell that Slurm signals only forwards signals: bash 5.2 breaks when a signal arrives while it expands $(...). The
# shell that does the work, and all that it starts, ignore signals.
run_job() {
    asked=''
    exec {heard}<> <(:) # a pipe, open at both ends here: writing never fails
    trap '' USR1 TERM
    work "$@" &
    trap 'echo USR1 >&"$heard"' USR1
    trap 'echo TERM >&"$heard"' TERM
    while kill -0 $! 2>/dev/null; do wait $!; done
    wait $!
    exit
}

# Whether a stop was asked for; sets `asked` to the first signal.
heard_stop() {
    [[ -n $asked ]] || { read -r -t 0 -u "$heard" && read -r -u "$heard" asked; }
}

work() {
    enter_job "$@"
    while :; do
        words=("$@")
        if [[ -n $RECIPE ]]; then next_stage "$@"; fi
        attempt=$((attempt + 1))
        ATTEMPT=$JOB/restart-$restart-attempt-$attempt
        export ATTEMPT
        mkdir -p "$ATTEMPT"
        await_lock
        ln -sfn "job-$SLURM_JOB_ID" "$TOP/slurm/latest"
        choose_nodes
        await_lock # the checks take a while
        run_attempt "${words[@]}"
        note_attempt
        decide
    done
}

# Logs an event with its time, in seconds since the job started.
phase() {
    local line
    line=$(printf '%8d  %s' "$SECONDS" "$*")
    echo "$line"
    echo "$line" >>"$JOB/phases-restart-$restart.log"
}

# Writes the status file, one line, if the run belongs to this job.
status() {
    local newest
    [[ $(readlink "$TOP/slurm/latest") == "job-$SLURM_JOB_ID" ]] || return 0
    newest=$(newest_checkpoint)
    printf 'state=%s job=%s restart=%s attempt=%s %s checkpoint=%s updated=%s%s\n' "$1" "$SLURM_JOB_ID" "$restart" \
        "$attempt" "$(progress)" "${newest:-none}" "$(date +%FT%T)" "${stage:+ stage=$stage}" >"$TOP/slurm/.status.tmp"
    mv "$TOP/slurm/.status.tmp" "$TOP/slurm/status"
}

# Prints step, reward and seconds per step from the last line of a step in the metrics; a line after it may be held-out
# results. Before the first step of reinforcement learning, it is from the earlier stage, which has no reward.
progress() {
    local line
    line=$(tail -n 2 "$RUN/metrics.jsonl" 2>/dev/null | grep '"reward/mean"' | tail -n 1)
    [ -n "$line" ] || line=$(tail -q -n 1 "$RUN/pretrain.jsonl" "$RUN/sft.jsonl" 2>/dev/null | tail -n 1)
    echo "step=$(number step "$line") reward=$(number reward/mean "$line") step_seconds=$(number time/step "$line")"
}

number() {
    local value
    value=$(grep -o "\"$1\": *[-+.0-9e]*" <<<"$2")
    echo "${value##*[: ]}"
}

newest_checkpoint() {
    local value
    value=$(find "$RUN/checkpoints" -maxdepth 1 -name '*step-*' ! -name '.*' -printf '%f\n' 2>/dev/null |
        LC_ALL=C sort | tail -n 1) # numbers of earlier stages sort before the last stage's "step"
    if [[ -d $RUN/parts ]]; then value=parts-$(find "$RUN/parts" -name 'problem-*' | wc -l); fi # of a pool of samples
    echo "$value"
}

# Runs a command of Slurm. A controller that restarts or is busy answers later: the command is repeated for
# CONTROLLER_SECONDS, unless the controller forbids it.
slurm() {
    local deadline=$((SECONDS + CONTROLLER_SECONDS)) why
    until { why=$("$@" 2>&1 >&3); } 3>&1; do
        echo "$1: $why" >&2
        if ((SECONDS >= deadline)) || grep -qiE 'denied|not permitted|disabled|invalid job' <<<"$why"; then return 1; fi
        sleep 5
    done
}

list() {
    local IFS=,
    echo "$*"
}

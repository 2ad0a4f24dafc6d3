# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # names that the other files set or use
# In the job of a recipe: which stage is next, and on how many nodes of the allocation.

# Keeps other jobs, and tools/recipe.py, from walking through the recipe at the same time: the lock is held by this shell
# and what it starts, until all of them have ended. It is that of only_one (grpo_mega/platform/files.py).
keep_others_out() {
    local deadline=$((SECONDS + LOCK_SECONDS)) file=$TOP/.recipe.lock code
    given=("$@")
    while :; do
        exec {others}>>"$file"
        flock --nonblock --conflict-exit-code 75 "$others"
        code=$?
        if ((code == 0)) && [[ ! $file -ef /dev/fd/$others ]]; then code=75; fi # who had it has removed the file
        ((code != 0)) || return 0
        if ((code != 75)); then
            phase "$TOP is on a file system without locks: nothing keeps another job from walking through this recipe"
            return 0
        fi
        exec {others}>&-
        if heard_stop; then leave_for_later; fi
        ((SECONDS < deadline)) || refuse "$TOP is in use: tools/recipe.py or another job walks through this recipe; wait" \
            "for it, or stop it"
        sleep 1
    done
}

# Asks stage.py; the rest of the arguments are the settings.
ask_of_stages() {
    "$HOST_PYTHON" -P "$LIB/stage.py" "$1" --recipe "$RECIPE" --root "$RECIPE_ROOT" --nodes "$most_nodes" \
        --ranks-per-node "$most_ranks" --file "$JOB/stage" -- "${@:2}"
}

# Sets what the attempts of the next stage need: `stage`, `words`, RUN, LOCK, PROGRAM, NODES, RANKS_PER_NODE and `reads`.
# Ends the job when all stages are done.
next_stage() {
    local entry value path before=${stage:-} code tries=0
    [[ -n ${planned+set} ]] || planned=("${reads[@]}") # what all stages read
    until ask_of_stages next "$@"; do
        code=$?
        if ((code == BAD_INPUT)); then status refused && exit "$BAD_INPUT"; fi
        tries=$((tries + 1)) # a disk that is full, or a file system that is away
        ((tries < MAX_FAILURES)) || give_up "which stage is next cannot be told; see above"
        sleep "$POLL_SECONDS"
    done
    if [[ ! -s $JOB/stage ]]; then
        phase "all stages are done"
        status completed
        exit 0
    fi
    words=() reads=()
    for path in "${planned[@]}"; do # a pool reads what its run does; what stages that are done have read may be gone
        [[ ! -e $path ]] || reads+=("$path")
    done
    while IFS= read -r -d '' entry; do
        value=${entry#* }
        case ${entry%% *} in
            stage) stage=$value ;;
            run) RUN=$value ;;
            lock) LOCK=$value ;;
            program) PROGRAM=$value ;;
            nodes) NODES=$value ;;
            ranks) RANKS_PER_NODE=$value ;;
            reads) reads+=("$value") ;;
            word) words+=("$value") ;;
        esac
    done <"$JOB/stage"
    [[ $stage == "$before" ]] || phase "stage $stage on $NODES nodes with $RANKS_PER_NODE ranks"
}

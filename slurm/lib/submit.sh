# shellcheck shell=bash
# shellcheck disable=SC2154 # launch.sh sets `own`
# Run by hand, a script makes all checks that are possible without a node, copies the code, and submits itself.

# Submits the script with the user's arguments; `own` has the script's settings, which it adds again when Slurm runs it.
submit() {
    local word before='' dry=0 options=() settings=()
    for word in "$@"; do
        [[ ! $word =~ ^(-N|--nodes) ]] || refuse "$word does not account for spares: give NODES=N, and SPARES=N, before the script"
        if [[ $word == --dry-run ]]; then
            dry=1
        elif [[ $word == -* ]]; then
            options+=("$word")
        elif [[ $word == *=* || $word == "~"* ]]; then
            settings+=("$word")
        else
            refuse_word "$before" "$word"
        fi
        before=$word
    done
    options=(--export=ALL --nodes=$((NODES + SPARES)) "${options[@]}") # the settings are in the environment
    if ((GPUS_PER_NODE)) && [[ $GPUS_PER_NODE != "$(gpus_asked_for)" ]]; then
        options+=(--gpus-per-node="$GPUS_PER_NODE")
    fi
    if ((SPARES)); then options+=(--no-kill); fi
    if ((dry)); then dry_run "${own[@]}" "${settings[@]}"; fi
    check_time_limit
    command -v sbatch >/dev/null || refuse "there is no Slurm here (no sbatch): log in to a machine of the cluster, or" \
        "run without it: $(without_slurm "${settings[@]}")"
    forget_job
    check_slurm_takes "$0" "${options[@]}" # sooner than a plan
    ask_configuration "${own[@]}" "${settings[@]}"
    GRPO_MEGA_CODE=$(snapshot) || exit
    export GRPO_MEGA_CODE
    sbatch --output="$TOP/slurm/job-%j.log" --comment="$TOP" "${options[@]}" "$GRPO_MEGA_CODE/slurm/${0##*/}" \
        "${settings[@]}" || exit "$BAD_INPUT"
    echo "run directory $TOP; slurm/status.sh $TOP shows its progress"
}

# Prints the command that does the same on this machine.
without_slurm() {
    if [[ -n $RECIPE ]]; then
        echo "python tools/recipe.py run $RECIPE${RECIPE_ROOT:+ --root $RECIPE_ROOT} $*"
    else
        echo "torchrun --nproc-per-node N -m grpo_mega.train ${own[*]} $*"
    fi
}

# Ends the script with all problems of a job with these settings and `options`; Slurm is asked where there is one.
dry_run() {
    local problem checks=() checker=("$LIB/check.py")
    if [[ -n $RECIPE ]]; then checker=("$LIB/stage.py" check --recipe "$RECIPE" --root "$RECIPE_ROOT"); fi
    if ! problem=$( (check_time_limit) 2>&1); then checks+=("--known=${problem#error: }"); fi
    forget_job
    if sinfo >/dev/null 2>&1 && ! problem=$( (check_slurm_takes "$0" "${options[@]}") 2>&1); then
        checks+=("--known=${problem#error: }")
    fi
    if ((GPUS_PER_NODE)); then
        checks+=(--stop-seconds "$STOP_SECONDS" --hang-seconds "$HANG_SECONDS"
            --save-gb-per-second "$SAVE_GB_PER_SECOND")
    fi
    exec "$HOST_PYTHON" -P "${checker[@]}" --dry-run --nodes "$NODES" --ranks-per-node "$RANKS_PER_NODE" \
        "${checks[@]}" -- "$@"
}

# Refuses a word that is neither an option nor a setting; mostly it is the value of the option before it.
refuse_word() {
    local option=$1 value=$2
    [[ $option == -* ]] || refuse "$value is not a setting of the experiment (FIELD=VALUE) and not an option of sbatch"
    case $option in
        -p) option=--partition ;;
        -t) option=--time ;;
        -A) option=--account ;;
        -q) option=--qos ;;
        -w) option=--nodelist ;;
        -x) option=--exclude ;;
        -J) option=--job-name ;;
        -C) option=--constraint ;;
    esac
    [[ $option == --* ]] || refuse "$1 $value: options of sbatch are one word here: $option$value"
    refuse "$1 $value: options of sbatch are one word here: $option=$value"
}

# Slurm asks for a stop some seconds ahead of the time limit, or up to a minute earlier: there must be time before that.
check_time_limit() {
    local limit seconds window other
    limit=$(time_limit)
    seconds=$(seconds_of "$limit")
    window=$(asked_for 'signal=.*@')
    if [[ -n $seconds ]] && ((seconds <= ${window:=300} + 60)); then
        ((seconds > 150)) && other=", or less time to save in, such as --signal=B:USR1@90"
        refuse "--time=$limit is $seconds s, and the job is asked to stop $window s ahead of its end (--signal): give" \
            "--time=$(((window + 660) / 60)) or more${other:-}"
    fi
}

time_limit() {
    local asked
    asked=$(printf '%s\n' "${user[@]}" | grep -oP '^(--time=|-t)\K\d.*' | head -n 1)
    : "${asked:=${SBATCH_TIMELIMIT:-$(grep -oP '^#SBATCH --time=\K.*' "$0")}}"
    echo "$asked"
}

# Prints the seconds of a time limit in Slurm's notation: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; nothing for UNLIMITED.
seconds_of() {
    local days=0 parts
    [[ $1 =~ ^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$ ]] || return
    IFS=: read -ra parts <<<"${1#*-}"
    if [[ $1 == *-* ]]; then
        days=${1%%-*}
    elif ((${#parts[@]} < 3)); then
        parts=(0 "${parts[@]}") # minutes come first
    fi
    echo $((((10#$days * 24 + 10#${parts[0]}) * 60 + 10#${parts[1]:-0}) * 60 + 10#${parts[2]:-0}))
}

# Unsets the variables of a surrounding job (salloc, srun --pty), which sbatch would take for options of the new job.
forget_job() {
    local name
    [[ -n ${SLURM_JOB_ID:-} ]] || return 0
    for name in $(compgen -e SLURM_); do
        [[ $name =~ ^SLURM_(CONF|JWT)$ ]] || unset "$name"
    done
}

# Refuses a job that Slurm would not accept, with Slurm's own answer; queues nothing.
check_slurm_takes() {
    local script=$1 answer
    shift
    if [[ $RUNTIME == pyxis ]] && ! srun --help 2>&1 | grep -q -e --container-image; then
        refuse "RUNTIME=pyxis, but srun has no --container-image here: ask for the pyxis plugin, or use apptainer or bare"
    fi
    if ! answer=$(sbatch --test-only "$@" "$script" 2>&1); then
        refuse "Slurm would not take this job: $answer" "it asks for $((NODES + SPARES)) nodes with $GPUS_PER_NODE GPUs" \
            "what there is (partition, nodes, GPUs, time limit); choose with --partition=NAME, NODES=N and layout=NAME:" \
            "$(sinfo --noheader --format='    %P %D %G %l')"
    fi
}

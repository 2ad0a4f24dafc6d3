# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # used by the files that are sourced after this one; launch.sh sets `user`
# Functions for both submitting and running: settings, refusals, the check of the configuration, the copy of the code.

BAD_INPUT=2 # exit code: the input cannot run, nothing was started
UNFIT=3     # exit code: too few nodes pass the checks
ALARMED=4   # exit code of a rank that saved because of an alarm of run.stop_on, and of its job
STOPPED=75  # exit code of a rank that saved because it was asked to stop

SETTINGS=(NODES RANKS_PER_NODE GPUS_PER_NODE SPARES CLUSTER RUNTIME IMAGE MOUNTS PYTHON HOST_PYTHON INTERFACE
    START_SECONDS HANG_SECONDS STOP_SECONDS SAVE_GB_PER_SECOND CHECK_SECONDS CHECK_LINKS NOTICE_SECONDS LOCK_SECONDS
    CONTROLLER_SECONDS POLL_SECONDS MIN_FREE_MB MAX_FAILURES MAX_EXCLUSIONS RECIPE RECIPE_ROOT)
INTERFACES=(NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME)

refuse() {
    printf 'error: ' >&2
    printf '%s\n' "$@" >&2
    exit "$BAD_INPUT"
}

# Loads the cluster's profile, then sets defaults for variables that neither it nor the user has set.
load_profile() {
    : "${CLUSTER:=default}"
    local window profile=$CODE/slurm/clusters/$CLUSTER.env
    [[ -f $profile ]] || refuse "CLUSTER=$CLUSTER has no profile $profile; there are: $(profiles)"
    set -a
    # shellcheck source=slurm/clusters/default.env
    . "$profile"
    set +a
    : "${SPARES:=0}" "${RUNTIME:=bare}" "${IMAGE:=}" "${MOUNTS:=}" "${INTERFACE:=}"
    if [[ -n $INTERFACE ]]; then export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE; fi
    : "${NODES:=$(asked_for nodes)}" "${GPUS_PER_NODE:=$(gpus_asked_for)}"
    : "${GPUS_PER_NODE:=0}"
    : "${RANKS_PER_NODE:=$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}"
    if [[ $RUNTIME == bare ]]; then : "${PYTHON:=$(host_python)}" "${HOST_PYTHON:=$PYTHON}"; fi
    : "${PYTHON:=python3}" "${HOST_PYTHON:=$(host_python)}"
    window=$(asked_for 'signal=.*@')
    : "${START_SECONDS:=1800}" "${HANG_SECONDS:=5400}" "${STOP_SECONDS:=$((${window:-300} - 60))}"
    ((STOP_SECONDS >= 30)) || refuse "STOP_SECONDS=$STOP_SECONDS is too short to save: give --signal=B:USR1@90 or more"
    : "${SAVE_GB_PER_SECOND:=5}" "${CHECK_SECONDS:=180}" "${NOTICE_SECONDS:=400}" "${LOCK_SECONDS:=600}"
    : "${CHECK_LINKS:=$((GPUS_PER_NODE > 0))}" "${POLL_SECONDS:=5}" "${MIN_FREE_MB:=}" "${MAX_FAILURES:=3}" "${MAX_EXCLUSIONS:=3}"
    : "${CONTROLLER_SECONDS:=300}" "${RECIPE_ROOT:=}"
    export PROGRAM=grpo_mega.train # what every rank runs; a stage of a recipe may be something else
    export "${SETTINGS[@]}"
    check_runtime
}

# Prints the number in the option --$1, a pattern, of the user's arguments or else of the script's #SBATCH lines.
asked_for() {
    { printf '%s\n' "${user[@]}" && grep -oP '^#SBATCH \K.*' "$0"; } | grep -oP "^--$1=?\K[0-9]+$" | head -n 1
}

gpus_asked_for() { asked_for 'gpus-per-node(?:=.*:)?'; } # the option may have a type, as in h100:8

profiles() {
    local file
    for file in "$CODE"/slurm/clusters/*.env; do basename "$file" .env; done | paste -sd' '
}

host_python() {
    if [[ -x $PWD/.venv/bin/python ]]; then echo "$PWD/.venv/bin/python"; else echo python3; fi
}

# Checks RUNTIME, which decides how a node's task gets its software: bare, apptainer or pyxis.
check_runtime() {
    case $RUNTIME in
        bare) ;;
        apptainer | pyxis)
            [[ -n $IMAGE ]] || refuse "RUNTIME=$RUNTIME needs IMAGE: export IMAGE=/path/to/image.sif (apptainer) or" \
                "IMAGE=/path/to/image.sqsh or registry#name:tag (pyxis), or RUNTIME=bare for software on the nodes"
            [[ $IMAGE != /* || -e $IMAGE ]] || refuse "IMAGE=$IMAGE does not exist"
            ;;
        *) refuse "RUNTIME=$RUNTIME is none of: bare, apptainer, pyxis" ;;
    esac
}

# Makes all checks that need no node. Sets RUN, the run directory, and TOP, where the job's own folder lies: the same, or
# a recipe's root; `reads`, the paths that are read; MIN_FREE_MB.
ask_configuration() {
    local answer what value checker=("$LIB/check.py") options=(--nodes "$NODES" --ranks-per-node "$RANKS_PER_NODE")
    if [[ -n ${GRPO_MEGA_CODE:-} ]]; then # in a job: all was planned at its submission
        options+=(--queued)
    elif ((GPUS_PER_NODE)); then
        options+=(--stop-seconds "$STOP_SECONDS" --hang-seconds "$HANG_SECONDS"
            --save-gb-per-second "$SAVE_GB_PER_SECOND")
    fi
    if [[ -n $RECIPE ]]; then checker=("$LIB/stage.py" check --recipe "$RECIPE" --root "$RECIPE_ROOT"); fi
    answer=$("$HOST_PYTHON" -P "${checker[@]}" "${options[@]}" -- "$@") || exit "$BAD_INPUT"
    reads=()
    while read -r what value; do
        case $what in
            run) RUN=$value ;;
            reads) reads+=("$value") ;;
            room) : "${MIN_FREE_MB:=$value}" ;;
        esac
    done <<<"$answer"
    TOP=$RUN
    : "${MIN_FREE_MB:=1024}"
}

# Copies the code into the job's folder, under the digest of its content, and prints the folder; a copy that is there is
# taken if it is whole and nobody has changed it. Large files are left out: they are data, and are read from their own path.
snapshot() {
    local digest folder temporary list
    mkdir -p "$TOP/slurm"
    list=$(code_files)
    digest=$(cd "$CODE" && digest_of "$list")
    folder=$TOP/slurm/code-$digest
    if [[ -e $folder ]]; then
        find "$folder" -depth -name __pycache__ -exec rm -rf {} + # of earlier jobs; Python would trust what is in it
        list=$(cd "$folder" && find . ! -type d -not -path '*/__pycache__/*' -printf '%P\n' | sort)
        [[ $(cd "$folder" && digest_of "$list") == "$digest" ]] ||
            refuse "$folder does not match the digest in its name: it was changed or damaged; remove it when no job uses it"
    else
        temporary=$(mktemp -d "$TOP/slurm/.code-XXXXXX")
        if ! { tar -C "$CODE" -cf - -T - <<<"$list" | tar -C "$temporary" -xf - && chmod 755 "$temporary" &&
            mv -T "$temporary" "$folder"; }; then
            refuse "the code cannot be copied to $folder: see above"
        fi
    fi
    echo "$folder"
}

digest_of() { tr '\n' '\0' <<<"$1" | xargs -0 sha256sum | sha256sum | cut -c1-32; }

code_files() {
    cd "$CODE" || exit
    {
        git ls-files --cached --others --exclude-standard 2>/dev/null ||
            find . -type f -not -path './runs/*' -not -path '*/.*' -printf '%P\n'
    } | xargs -d '\n' stat --format='%s %n' -- 2>/dev/null | while read -r size file; do
        if [[ -f $file && $size -lt 10000000 ]]; then echo "$file"; fi
    done | sort
}

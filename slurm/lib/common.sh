# shellcheck shell=bash
# shellcheck disable=SC2034 # used by the files that come after this one
# What submitting and running share: settings, refusals, questions to the configuration, the copy of the code.

BAD_INPUT=2 # exit code: the input cannot run, nothing was started
UNFIT=3     # exit code: too few nodes pass the checks
STOPPED=75  # exit code of a rank that saved because it was asked to stop

SETTINGS=(NODES RANKS_PER_NODE GPUS_PER_NODE SPARES CLUSTER RUNTIME IMAGE MOUNTS PYTHON HOST_PYTHON START_SECONDS HANG_SECONDS
    STOP_SECONDS CHECK_SECONDS NOTICE_SECONDS POLL_SECONDS MIN_FREE_MB MAX_FAILURES MAX_RESUBMISSIONS)

refuse() {
    printf 'error: ' >&2
    printf '%s\n' "$@" >&2
    exit "$BAD_INPUT"
}

# The cluster's profile, then defaults for what neither it nor the user has set.
load_profile() {
    : "${CLUSTER:=default}"
    local profile=$CODE/slurm/clusters/$CLUSTER.env
    [[ -f $profile ]] || refuse "CLUSTER=$CLUSTER has no profile $profile; there are: $(profiles)"
    set -a
    # shellcheck source=slurm/clusters/default.env
    . "$profile"
    set +a
    : "${SPARES:=0}" "${RUNTIME:=bare}" "${IMAGE:=}" "${MOUNTS:=}"
    if [[ $RUNTIME == bare ]]; then : "${PYTHON:=$(host_python)}" "${HOST_PYTHON:=$PYTHON}"; fi
    : "${PYTHON:=python3}" "${HOST_PYTHON:=$(host_python)}"
    : "${START_SECONDS:=1800}" "${HANG_SECONDS:=3600}" "${STOP_SECONDS:=240}" "${CHECK_SECONDS:=180}"
    : "${NOTICE_SECONDS:=400}" "${POLL_SECONDS:=5}" "${MIN_FREE_MB:=1024}"
    : "${MAX_FAILURES:=3}" "${MAX_RESUBMISSIONS:=3}"
    export "${SETTINGS[@]}"
    check_runtime
}

profiles() {
    local file
    for file in "$CODE"/slurm/clusters/*.env; do basename "$file" .env; done | paste -sd' '
}

host_python() {
    if [[ -x $PWD/.venv/bin/python ]]; then echo "$PWD/.venv/bin/python"; else echo python3; fi
}

# RUNTIME=bare|apptainer|pyxis decides how a node's task gets its software.
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

# Sets RUN, the run directory, after checking settings, layout and the directory's experiment.
ask_configuration() {
    RUN=$("$HOST_PYTHON" -P "$LIB/check.py" --ranks $((NODES * RANKS_PER_NODE)) -- "$@") || exit "$BAD_INPUT"
}

# Copies the code into the run directory, under the digest of its content, and prints where. Large files stay out: they
# are data, and read from where they are.
snapshot() {
    local digest folder temporary list
    mkdir -p "$RUN/slurm"
    list=$(code_files)
    digest=$(cd "$CODE" && tr '\n' '\0' <<<"$list" | xargs -0 sha256sum | sha256sum | cut -c1-12)
    folder=$RUN/slurm/code-$digest
    if [[ ! -d $folder ]]; then
        temporary=$(mktemp -d "$RUN/slurm/.code-XXXXXX")
        if ! { tar -C "$CODE" -cf - -T - <<<"$list" | tar -C "$temporary" -xf - && chmod 755 "$temporary" &&
            mv -T "$temporary" "$folder"; }; then
            refuse "the code cannot be copied to $folder: see above"
        fi
    fi
    echo "$folder"
}

code_files() {
    cd "$CODE" || exit
    {
        git ls-files --cached --others --exclude-standard 2>/dev/null ||
            find . -type f -not -path './runs/*' -not -path '*/.*' -printf '%P\n'
    } | while read -r file; do
        if [[ -f $file && $(stat -c %s "$file") -lt 10000000 ]]; then echo "$file"; fi
    done | sort
}

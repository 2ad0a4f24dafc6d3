# shellcheck shell=bash
# shellcheck disable=SC2154 # launch.sh sets `own`
# Run by hand, a script checks everything that can be known now, copies the code, and submits itself.

# The arguments are the user's; `own` holds the script's settings, which it adds again when Slurm runs it.
submit() {
    local word options=() settings=()
    for word in "$@"; do
        [[ ! $word =~ ^(-N|--nodes) ]] || refuse "$word says nothing of spares: give NODES=N, and SPARES=N, before the script"
        if [[ $word == -* ]]; then options+=("$word"); else settings+=("$word"); fi
    done
    command -v sbatch >/dev/null || refuse "there is no Slurm here (no sbatch): log in to a machine of the cluster, or" \
        "run without it: torchrun --standalone --nproc-per-node N -m grpo_mega.train ${own[*]} ${settings[*]}"
    forget_job
    ask_configuration "${own[@]}" "${settings[@]}"
    options=(--export=ALL --nodes=$((NODES + SPARES)) "${options[@]}") # the settings travel in the environment
    if ((GPUS_PER_NODE)) && [[ $GPUS_PER_NODE != "$(gpus_asked_for)" ]]; then
        options+=(--gpus-per-node="$GPUS_PER_NODE")
    fi
    if ((SPARES)); then options+=(--no-kill); fi
    check_slurm_takes "$0" "${options[@]}"
    GRPO_MEGA_CODE=$(snapshot) || exit
    export GRPO_MEGA_CODE
    sbatch --output="$RUN/slurm/job-%j.log" --comment="$RUN" "${options[@]}" "$GRPO_MEGA_CODE/slurm/${0##*/}" \
        "${settings[@]}" || exit "$BAD_INPUT"
    echo "run directory $RUN; slurm/status.sh $RUN shows how it goes"
}

# From within salloc or srun --pty, what describes that job would be taken for options of the new one.
forget_job() {
    local name
    [[ -n ${SLURM_JOB_ID:-} ]] || return 0
    for name in $(compgen -e SLURM_); do
        [[ $name =~ ^SLURM_(CONF|JWT)$ ]] || unset "$name"
    done
}

# Slurm's own verdict, without queueing anything.
check_slurm_takes() {
    local script=$1 said
    shift
    if [[ $RUNTIME == pyxis ]] && ! srun --help 2>&1 | grep -q -e --container-image; then
        refuse "RUNTIME=pyxis, but srun has no --container-image here: ask for the pyxis plugin, or use apptainer or bare"
    fi
    if ! said=$(sbatch --test-only "$@" "$script" 2>&1); then
        refuse "Slurm would not take this job: $said" "it asks for $((NODES + SPARES)) nodes with $GPUS_PER_NODE GPUs" \
            "what there is (partition, nodes, GPUs, time limit); choose with --partition=NAME, NODES=N and layout=NAME:" \
            "$(sinfo --noheader --format='    %P %D %G %l')"
    fi
}

#!/usr/bin/env bash
# experiment=tiny on two nodes with two processes each, without GPUs: what to try first on a cluster.
#
#     slurm/tiny.sh                                 check, copy the code, submit
#     slurm/tiny.sh --partition=cpu run.steps=20    options of sbatch and settings of the experiment
#
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
: "${RANKS_PER_NODE:=2}"
if [[ $0 == */slurm_script ]]; then here=$SLURM_SUBMIT_DIR; else here=$(dirname "$0")/..; fi # Slurm runs a copy
# shellcheck source=slurm/lib/launch.sh
. "${GRPO_MEGA_CODE:-$here}/slurm/lib/launch.sh"
launch experiment=tiny layout=ep2 -- "$@"

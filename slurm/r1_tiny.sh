#!/usr/bin/env bash
# The recipe r1_tiny, DeepSeek-R1 in miniature, on two nodes without GPUs: a chain of stages to try first on a cluster.
#
#     slurm/r1_tiny.sh                                  check, copy the code, submit
#     slurm/r1_tiny.sh --partition=cpu run.seed=1       options of sbatch, and settings of the stages
#     RECIPE=my.yaml RECIPE_ROOT=runs/mine slurm/r1_tiny.sh    another recipe, and where its products lie
#
#SBATCH --job-name=r1_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=06:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
: "${RANKS_PER_NODE:=1}"
if [[ $0 == */slurm_script ]]; then here=$SLURM_SUBMIT_DIR; else here=$(dirname "$0")/..; fi # Slurm runs a copy
# shellcheck source=slurm/lib/launch.sh
. "${GRPO_MEGA_CODE:-$here}/slurm/lib/launch.sh"
launch recipe=r1_tiny -- "$@"

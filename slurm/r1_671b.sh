#!/usr/bin/env bash
# The recipe r1_671b, DeepSeek-R1 as published, from R1-Zero to a distilled model: all its stages on 512 H100 with 80 GB.
#
#     CLUSTER=mine SPARES=2 slurm/r1_671b.sh --partition=NAME --account=NAME r1_zero:run.init_from=/path/to/DeepSeek-V3-Base
#
#SBATCH --job-name=r1_671b
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=7-00:00:00
#SBATCH --signal=B:USR1@4700
#SBATCH --requeue
#SBATCH --open-mode=append
if [[ $0 == */slurm_script ]]; then here=$SLURM_SUBMIT_DIR; else here=$(dirname "$0")/..; fi # Slurm runs a copy
# shellcheck source=slurm/lib/launch.sh
. "${GRPO_MEGA_CODE:-$here}/slurm/lib/launch.sh"
launch recipe=r1_671b -- "$@"

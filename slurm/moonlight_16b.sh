#!/usr/bin/env bash
# GRPO on Moonlight-16B-A3B: one node of 8 H100 with 80 GB.
#
#     slurm/moonlight_16b.sh --partition=NAME --account=NAME run.init_from=/models/Moonlight data.tokenizer=/models/mine
#
#SBATCH --job-name=moonlight_16b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
if [[ $0 == */slurm_script ]]; then here=$SLURM_SUBMIT_DIR; else here=$(dirname "$0")/..; fi # Slurm runs a copy
# shellcheck source=slurm/lib/launch.sh
. "${GRPO_MEGA_CODE:-$here}/slurm/lib/launch.sh"
launch experiment=moonlight_16b -- "$@"

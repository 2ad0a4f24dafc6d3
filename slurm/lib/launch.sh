# shellcheck shell=bash
# Sourced by the scripts in slurm/. `launch SETTING... -- "$@"` checks and submits when a person runs the script, and
# runs the experiment when Slurm does; `launch recipe=NAME -- "$@"` all stages of a recipe. What each variable means:
# docs/clusters.md.
set -uo pipefail

CODE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
LIB=$CODE/slurm/lib
# shellcheck source=slurm/lib/common.sh
. "$LIB/common.sh"
# shellcheck source=slurm/lib/submit.sh
. "$LIB/submit.sh"
# shellcheck source=slurm/lib/job.sh
. "$LIB/job.sh"
# shellcheck source=slurm/lib/start.sh
. "$LIB/start.sh"
# shellcheck source=slurm/lib/stages.sh
. "$LIB/stages.sh"
# shellcheck source=slurm/lib/watch.sh
. "$LIB/watch.sh"
# shellcheck source=slurm/lib/end.sh
. "$LIB/end.sh"

launch() {
    own=()
    local recipe=''
    while [[ $1 != -- ]]; do
        if [[ $1 == recipe=* ]]; then recipe=${1#*=}; else own+=("$1"); fi
        shift
    done
    if [[ -z $recipe ]]; then RECIPE='' RECIPE_ROOT=''; else : "${RECIPE:=$recipe}"; fi
    user=("${@:2}")
    load_profile
    if [[ $0 == */slurm_script ]]; then run_job "${own[@]}" "${user[@]}"; else submit "${user[@]}"; fi
}

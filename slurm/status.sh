#!/usr/bin/env bash
# Shows the progress of a job, and where it hangs: slurm/status.sh JOB, or slurm/status.sh runs/NAME.
set -uo pipefail

code=$(realpath "$(dirname "$0")/..")
python=$code/.venv/bin/python
[[ -x $python ]] || python=${HOST_PYTHON:-python3}

# What lies in a run directory is only text, whoever wrote it: nothing of it is run, and no escape sequence is printed.
visible() { LC_ALL=C sed 's/\xc2[\x80-\x9f]/?/g; s/[\x01-\x08\x0b-\x1f\x7f]/?/g'; }

run=${1:-}
if [[ $run =~ ^[0-9]+$ ]]; then
    run=$(scontrol show job -o "$1" 2>/dev/null | grep -oP ' Comment=\K\S+')
    [[ -n $run ]] || { echo "error: Slurm knows no job $1 any more, or it was not submitted by a script of slurm/;" \
        "name the run directory: slurm/status.sh runs/NAME" >&2 && exit 2; }
fi
[[ -z $run ]] || run=$(realpath -m "$run")

# Prints the pending jobs of this run, why they wait, and when Slurm expects them to start.
waiting() {
    local id why start comment latest
    latest=$(basename "$(readlink -f "$run/slurm/latest")")
    squeue --noheader --states=PENDING --format='%i|%r|%S|%k' 2>/dev/null | while IFS='|' read -r id why start comment; do
        [[ $comment == "$run" && job-$id != "$latest" ]] || continue
        [[ $start != N/A ]] || start="unknown yet"
        echo "job $id is in the queue: $why; its start, as Slurm estimates it: $start"
    done
}

waits=$(waiting)
[[ -z $waits ]] || echo "$waits"
if [[ ! -f $run/slurm/status ]]; then
    [[ -z $waits ]] || exit 0
    echo "error: ${run:-nothing} has no slurm/status, and no job of it waits: name a job or a run directory of one" >&2
    exit 2
fi

job=$(readlink -f "$run/slurm/latest")
attempt=$(find "$job" -maxdepth 1 -name 'restart-*-attempt-*' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)

# The panel of the run, or of the stage in progress of a recipe.
panel() {
    local stage
    stage=$(grep -oP ' stage=\K[\w.-]+' "$run/slurm/status")
    PYTHONPATH=$code "$python" -P -m grpo_mega.show.status "$run${stage:+/$stage}"
}

visible <"$run/slurm/status"
# Where that is not possible, such as with an interpreter that has no rich: the newest row of the run's table, as its main
# rank prints it. Then the newest alarms.
panel 2>/dev/null || grep -hE '^(after )?step [0-9]+/[0-9]+: ' "$attempt/rank-0000.log" 2>/dev/null | tail -n 1 | visible
grep -hE '^ *[0-9]+  (ALARM|alarm) ' "$attempt/rank-0000.log" 2>/dev/null | tail -n 3 | visible
[[ ! -f $run/slurm/stages ]] || visible <"$run/slurm/stages" # a recipe: as it was when the stage in progress began
squeue --noheader --job="${job##*-}" --format='in the queue: %T, nodes %N, ends %e, %r' 2>/dev/null
echo "phases (seconds since the job started):"
tail -n 5 "$(find "$job" -name 'phases-*' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)" | visible

# All ranks enter the same phases, so the others wait for those that entered the fewest.
echo "ranks by phases entered and last phase:"
cat "$attempt"/rank-*.beat 2>/dev/null | sort -n | uniq -c | while read -r ranks count phase; do
    printf '  %5d ranks  %s (phase %s)' "$ranks" "$phase" "$count"
    if ((ranks < 9)); then
        printf ': %s' "$(grep -l "^$count " "$attempt"/rank-*.beat | xargs -n 1 basename -s .beat | paste -sd' ')"
    fi
    echo
done | visible
if [[ -f $job/report.txt ]]; then
    echo "failures so far ($job/report.txt):"
    grep -E '^(attempt|first|the others)' "$job/report.txt" | visible
fi

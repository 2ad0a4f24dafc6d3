#!/usr/bin/env bash
# One rank: its output goes to a file, its process id and exit code to others, because torchrun would lose them.
files=$ATTEMPT/rank-$(printf %04d "$RANK")
echo $$ >"$files.group" # torchrun gives every rank a process group of its own
export GRPO_MEGA_SIGNS=$files
trap : TERM # torchrun signals the process group; this shell stays to see how the training process ends
(
    echo "$BASHPID" >"$files.pid"
    if [[ $PROGRAM == *.py ]]; then exec "$PYTHON" -P "$PROGRAM" "$@"; fi
    exec "$PYTHON" -P -m "$PROGRAM" "$@"
) >"$files.log" 2>&1
code=$?
echo "$code" >"$files.code"
exit "$code"

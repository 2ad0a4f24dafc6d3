#!/usr/bin/env bash
# Runs a command on a node, in the container if there is one, with the job's variables instead of the image's.
image=${PYTHONPATH:-}
while IFS= read -r -d '' pair; do export "${pair?}"; done <"$ATTEMPT/environment"
if [[ -n $image && $image != "$PYTHONPATH" ]]; then PYTHONPATH+=:$image; fi # the image's paths come after the project's
exec "$@"

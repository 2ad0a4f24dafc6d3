#!/usr/bin/env bash
# Runs a command on a node, in the container if there is one, with the job's variables where the image has its own.
image=${PYTHONPATH:-}
# shellcheck source=/dev/null
. "$ATTEMPT/environment"
if [[ -n $image && $image != "$PYTHONPATH" ]]; then PYTHONPATH+=:$image; fi # what the image needs, behind the project
exec "$@"

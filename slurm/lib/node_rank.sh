# shellcheck shell=bash
# Sourced on a node: sets node_rank, its index in NODE_NAMES.
read -ra names <<<"$NODE_NAMES"
for node_rank in "${!names[@]}"; do [[ ${names[node_rank]} == "$SLURMD_NODENAME" ]] && break; done

#!/usr/bin/env bash
# Replaces the replicas behind the proxy, one after another, by replicas of the current image and settings.
# Each new replica is ready before an old one is drained. The old one finishes its requests before it stops.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/compose.sh
export COMPOSE_PROFILES=scale

fail() { echo "failed: $1" >&2; exit 1; }

# Send a command to the proxy, and print its answer.
tell() { docker exec "$proxy" sh -c "echo '$1' | nc 127.0.0.1 9999"; }

address() { docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$1"; }

# Print the proxy's names of the servers at an address, as `backend/server`.
servers() { tell "show servers state" | awk -v address="$1" '$5 == address {print $2 "/" $4}'; }

# Succeed if a container passes its own health check, and the proxy's at both ports (2: up, 0: not in maintenance).
in_turn() {
    [ "$(docker inspect --format '{{.State.Health.Status}}' "$1")" = healthy ] || return 1
    [ "$(tell "show servers state" | awk -v address="$(address "$1")" '$5 == address && $6 == 2 && $7 == 0' | wc -l)" -eq 2 ]
}

wait_for() {
    for _ in $(seq 240); do
        if in_turn "$1"; then return; fi
        sleep 0.25
    done
    fail "the new replica $1 does not answer; the old ones go on"
}

proxy=$(compose ps --quiet proxy)
old=$(compose ps --quiet replica)
[ -n "$proxy" ] && [ -n "$old" ] || fail "no proxy with replicas runs"
count=$(wc -l <<< "$old")

for container in $old; do
    compose up --detach --no-deps --no-recreate --scale "replica=$((count + 1))" replica > /dev/null 2>&1
    for each in $(compose ps --quiet replica); do
        grep --quiet "$each" <<< "$old" || wait_for "$each"
    done
    here=$(servers "$(address "$container")")
    for server in $here; do tell "set server $server state drain" > /dev/null; done
    docker stop --time 45 "$container" > /dev/null
    docker rm "$container" > /dev/null
    # The next container may get the same address.
    for server in $here; do tell "set server $server state ready" > /dev/null; done
    echo "replaced ${container:0:12}"
done

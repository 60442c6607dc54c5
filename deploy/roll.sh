#!/usr/bin/env bash
# Replaces the replicas behind the proxy, one after another, by ones of the image and settings that there are now.
# A new one answers before an old one is asked to stop; that gets no new request by then, and ends those it has.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/compose.sh
export COMPOSE_PROFILES=scale

fail() { echo "failed: $1" >&2; exit 1; }

# Tell the proxy something, and print what it says.
tell() { docker exec "$proxy" sh -c "echo '$1' | nc 127.0.0.1 9999"; }

address() { docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$1"; }

# The names of the servers, `backend/server`, that are at an address.
servers() { tell "show servers state" | awk -v address="$1" '$5 == address {print $2 "/" $4}'; }

# A container is in turn when its own test has passed, and the proxy's at both ports (2 is up, 0 in no maintenance).
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
    # The next container may get its place.
    for server in $here; do tell "set server $server state ready" > /dev/null; done
    echo "replaced ${container:0:12}"
done

#!/usr/bin/env bash
# Builds both images, brings the stack up, sends a request through it and takes it down again.
# All of it under a project name of its own; only the images stay, tagged `smoke`, so that the next run builds little.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "skipped: $1"; exit 0; }
fail() { echo "failed: $1" >&2; exit 1; }

command -v curl > /dev/null || skip "curl is not installed"
command -v docker > /dev/null || skip "docker is not installed"
docker ps > /dev/null 2>&1 || skip "no container engine answers"
if docker compose version > /dev/null 2>&1; then
    compose() { docker compose "$@"; }
elif command -v docker-compose > /dev/null; then
    compose() { docker-compose "$@"; }
else
    skip "neither docker compose nor docker-compose is installed"
fi

# Port 0: the engine picks a free one.
export COMPOSE_PROJECT_NAME="incipit-smoke-$$" INCIPIT_TAG=smoke INCIPIT_PORT=0

finish() {
    status=$?
    [ "$status" -eq 0 ] || compose logs --tail 50 || true
    compose down --volumes > /dev/null 2>&1
    exit "$status"
}
trap finish EXIT

wait_until_healthy() {
    for _ in $(seq 120); do
        [ "$(docker inspect --format '{{.State.Health.Status}}' "$(compose ps --quiet service)")" != healthy ] || return 0
        sleep 0.5
    done
    fail "the service is not healthy after a minute"
}

inside() { compose exec -T service "$@"; }

compose build
SECONDS=0
compose up --detach
wait_until_healthy
echo "ok: healthy $SECONDS s after up, the export included"

address=$(compose port service 8000)
answer=$(curl --silent --show-error --fail-with-body --json '{"input_ids": [[101, 7592, 102]]}' \
    "http://$address/models/minilm/embed")
shape=$(inside python -c '
import base64, json, sys, numpy
answer = json.load(sys.stdin)
print(list(numpy.frombuffer(base64.b64decode(answer["embeddings"]), answer["dtype"]).reshape(answer["shape"]).shape))
' <<< "$answer")
[ "$shape" = "[1, 3, 384]" ] || fail "the embeddings have the shape $shape"
echo "ok: embeddings of the shape $shape from http://$address"

inside python -c '
from importlib.util import find_spec
assert not find_spec("torch") and not find_spec("onnx")
' || fail "the serving image holds torch or onnx"
echo "ok: neither torch nor onnx in the serving image"

[ "$(inside id -u)" -ne 0 ] || fail "the service runs as root"
echo "ok: not root"

compose up --detach
wait_until_healthy
versions=$(inside ls /models/minilm)
[ "$versions" = 1 ] || fail "after a second up the versions are: $versions"
echo "ok: a second up exported nothing"

container=$(compose ps --quiet service)
compose stop service
[ "$(docker inspect --format '{{.State.ExitCode}}' "$container")" -eq 0 ] || fail "SIGTERM does not end the service well"
echo "ok: SIGTERM ended the service"

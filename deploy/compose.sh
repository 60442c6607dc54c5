# Sourced by bash scripts. Defines `compose`: docker compose, or else docker-compose.
if docker compose version > /dev/null 2>&1; then
    compose() { docker compose "$@"; }
elif command -v docker-compose > /dev/null; then
    compose() { docker-compose "$@"; }
else
    compose() { echo "neither docker compose nor docker-compose is installed" >&2; return 127; }
fi

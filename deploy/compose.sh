# For bash: `compose` is whichever Compose there is.
if docker compose version > /dev/null 2>&1; then
    compose() { docker compose "$@"; }
elif command -v docker-compose > /dev/null; then
    compose() { docker-compose "$@"; }
else
    compose() { echo "neither docker compose nor docker-compose is installed" >&2; return 127; }
fi

#!/usr/bin/env bash
# Makes substitutes for the images of a registry from Debian packages, for machines without access to one. Needs root
# and debootstrap. Existing images are kept; remove one with `docker rmi` to make it again.
set -euo pipefail

FOLDER=$(mktemp --directory)
trap 'rm -rf "$FOLDER"' EXIT
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

there() { docker image inspect "$1" > /dev/null 2>&1; }

# bootstrap RELEASE PACKAGES
bootstrap() {
    rm -rf "${FOLDER:?}/root"
    debootstrap --variant=minbase --include="$2" "$1" "$FOLDER/root" "$MIRROR" > "$FOLDER/log" 2>&1 \
        || { tail "$FOLDER/log" >&2; exit 1; }
    # The network may use a private certificate authority.
    cp /etc/ssl/certs/ca-certificates.crt "$FOLDER/root/etc/ssl/certs/"
}

# pack IMAGE CHANGES...
pack() {
    local image=$1 change changes=()
    shift
    for change; do changes+=(--change "$change"); done
    tar -C "$FOLDER/root" --create . | docker import "${changes[@]}" - "$image" > /dev/null
    echo "made $image"
}

if ! there preblock-standin-python-cc; then
    bootstrap bookworm python3,python3-venv,python3-pip,libpython3-dev,gcc,libc6-dev,ca-certificates,curl
    # Copy the wheels of PIP_FIND_LINKS, so pip finds them inside the image.
    mkdir "$FOLDER/root/wheels"
    if [ -d "${PIP_FIND_LINKS:-}" ]; then cp -r "$PIP_FIND_LINKS/." "$FOLDER/root/wheels"; fi
    pack preblock-standin-python-cc "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_FIND_LINKS=/wheels"
fi
if ! there preblock-standin-haproxy || ! there preblock-standin-prometheus; then
    bootstrap trixie ca-certificates,wget,haproxy,prometheus,netcat-openbsd
    install --directory --owner=65534 --group=65534 "$FOLDER/root/prometheus"
    pack preblock-standin-haproxy "USER 99"
    pack preblock-standin-prometheus "USER 65534"
fi

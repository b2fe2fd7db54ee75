#!/usr/bin/env bash
# Builds the images of docker/compose.yaml where there is no Docker engine: as root on Debian, after
#   apt-get install --no-install-recommends buildah crun mmdebstrap
# docker/Dockerfile stays as it is; Flower's images below it are replaced by stand-ins of the same
# user, virtual environment and flwr, on a base of this machine's own Debian. FEDNAS_WHEELS may name a
# folder of wheels that are taken before others, such as CPU-only torch, and FEDNAS_TAG the images' tag.
# scripts/run_images.py runs a search in them.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${FEDNAS_TAG:-latest}
flower=$(sed -n 's/^ARG FLOWER=//p' docker/Dockerfile)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}

# What the steps of a build see of this machine: its certificates and how its pip is set up.
given=(--network host --volume /etc/ssl/certs:/etc/ssl/certs:ro)
if [ -e /etc/pip.conf ]; then given+=(--volume /etc/pip.conf:/etc/pip.conf:ro); fi
if [ -n "${FEDNAS_WHEELS:-}" ]; then
    mkdir "$folder/pip"
    for wheel in "$FEDNAS_WHEELS"/*.whl; do
        name=$(basename "$wheel")
        echo "${name%%-*}==$(cut -d- -f2 <<<"$name")"
    done >"$folder/pip/constraints.txt"
    printf '[global]\nfind-links = /wheels\nconstraint = /etc/xdg/pip/constraints.txt\n' >"$folder/pip/pip.conf"
    given+=(--volume "$folder/pip:/etc/xdg/pip:ro" --volume "$(realpath "$FEDNAS_WHEELS"):/wheels:ro")
fi

if ! buildah inspect --type image fednas-base >/dev/null 2>&1; then
    apt-config dump | grep -E '^Acquire::https?[: ]' >"$folder/apt.conf" || true
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    mmdebstrap --quiet --mode=root --variant=minbase --include=python3,python3-venv,ca-certificates \
        --aptopt="$folder/apt.conf" "$release" "$folder/root.tar" /etc/apt/sources.list.d/debian.sources
    made=$(buildah from scratch)
    buildah add --quiet "$made" "$folder/root.tar" / >/dev/null
    buildah commit --quiet --rm "$made" fednas-base >/dev/null
fi

if ! buildah inspect --type image "flwr/superlink:$flower" >/dev/null 2>&1; then
    cat >"$folder/Dockerfile" <<DOCKERFILE
FROM fednas-base
RUN useradd --create-home --uid 49999 app && mkdir /python /app && chown app:app /python /app
USER app
RUN python3 -m venv /python/venv && /python/venv/bin/pip install --no-cache-dir --quiet flwr==${flower%%-*}
ENV PATH=/python/venv/bin:/usr/local/bin:/usr/bin:/bin
WORKDIR /app
DOCKERFILE
    buildah bud --quiet "${given[@]}" --pull-never --tag "flwr/superlink:$flower" \
        --tag "flwr/superexec:$flower" "$folder" >/dev/null
fi

# One copy for all images: sites refuse a server whose package differs from theirs.
mkdir "$folder/context"
tar -c --exclude=__pycache__ pyproject.toml README.md LICENSE hatch_build.py conf fednas_flwr docker |
    tar -x -C "$folder/context"
for target in server serverapp client; do
    buildah bud --quiet "${given[@]}" --pull-never --layers --build-arg "PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-}" \
        --file docker/Dockerfile --ignorefile docker/Dockerfile.dockerignore --target "$target" \
        --tag "fednas-$target:$tag" "$folder/context" >/dev/null
done
buildah images --format '{{.Size}}  {{.Name}}:{{.Tag}}'

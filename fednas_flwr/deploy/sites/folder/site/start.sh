#!/usr/bin/env bash
# Runs this site's SuperNode and the executor of its client app: `start.sh`, or one of them each in a
# container of its own: `start.sh supernode`, which offers its Runtime interface on RUNTIME_HOST, and
# `start.sh executor`, which finds it there. Ends when one of them ends.
# The first start makes the site's keys and ends: their public halves go to the server's operator.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
set -a
source ./site.env
FLWR_HOME=$PWD/state/flwr FLWR_TELEMETRY_ENABLED=0
set +a
source ./parts.sh

supernode() {
    [ -e state/sum.pub ] || fednas key --sum state/sum.key
    if [ ! -e state/node.key ]; then
        fednas key state/node.key
        exit
    fi
    fednas doctor .
    make_secret state/split.key
    cat >state/node.toml <<TOML
partition-id = $PARTITION_ID
num-partitions = $NUM_PARTITIONS
tag = "$SITE"
device = "$DEVICE"
data-path = "$DATA_PATH"
data-set = "$DATA_SET"
dataset = "$PWD/dataset.yaml"
cache = "$PWD/state/cache"
policy = "$PWD/policy.yaml"
ledger = "$PWD/state/ledger/ledger.sqlite"
ledger-key = "$PWD/state/ledger.key"
roster = "$PWD/roster.json"
sum-key = "$PWD/state/sum.key"
sums = "$PWD/state/sums.sqlite"
models = "$PWD/state/models"
signer = "$PWD/signing.pub"
superlink = "$SUPERLINK"
split-key = "$(cat state/split.key)"
TOML
    exec python -m fednas_flwr.deploy.sites.supernode --superlink "$SUPERLINK" --root-certificates ca.crt \
        --auth-supernode-private-key state/node.key --node-config state/node.toml \
        --host "${RUNTIME_HOST:-127.0.0.1}" --port "$PORT" --isolation process \
        --superexec-auth-secret-file state/executor.secret
}

executor() {
    exec python -P -m fednas_flwr.deploy.sites.executor --insecure \
        --runtime-api-address "${RUNTIME_HOST:-127.0.0.1}:$PORT" --superexec-auth-secret-file state/executor.secret
}

run_parts supernode executor

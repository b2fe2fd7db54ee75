#!/usr/bin/env bash
# Runs the SuperLink and the executor of the server's app: `start.sh`, or one of them each in a
# container of its own: `start.sh superlink`, `start.sh executor`, which finds the first at
# RUNTIME_HOST. Ends when one of them ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./common.sh

superlink() {
    fednas doctor .
    exec python -m fednas_flwr.deploy.sites.superlink --host "$HOST" --port "$PORT" \
        --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \
        --enable-supernode-auth --database state/superlink.db --isolation process \
        --superexec-auth-secret-file state/executor.secret --disable-runtime-dependency-installation
}

executor() {
    exec flower-superexec --root-certificates ca.crt --runtime-api-address "${RUNTIME_HOST:-127.0.0.1}:$PORT" \
        --superexec-auth-secret-file state/executor.secret
}

run_parts superlink executor

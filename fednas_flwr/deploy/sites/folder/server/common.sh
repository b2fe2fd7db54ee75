# Settings of this server, its state and how its commands find it; sourced by the scripts beside it.
set -a
source ./server.env
FLWR_HOME=$PWD/state/flwr FLWR_TELEMETRY_ENABLED=0
FEDNAS_SIGNING_KEY=$PWD/signing.key # signs the models that return to the sites
set +a
source ./parts.sh
mkdir -p "$FLWR_HOME"
printf '[superlink.server]\naddress = "127.0.0.1:%s"\nroot-certificates = "%s"\n' \
    "$PORT" "$PWD/ca.crt" >"$FLWR_HOME/config.toml"

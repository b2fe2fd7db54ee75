#!/usr/bin/env bash
# A SuperLink and three SuperNodes on loopback, with TLS and registered node keys, run the
# quickstart; then this process alone runs it, and both must end in the same bits. Of a private run,
# whose noise never repeats, the ledgers are checked instead.
# Arguments are overrides of `fednas run` for both, e.g. rounds=2 retrain.rounds=2.
# Results and logs stay in runs/deploy_local_<time>, or the new folder that FEDNAS_RESULTS names;
# every process is stopped at the end.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

num_nodes=3
results=${FEDNAS_RESULTS:-$PWD/runs/deploy_local_$(date +%Y%m%d-%H%M%S)_$$}
logs=$results/logs
secrets=$(mktemp -d)   # keys, certificates and Flower's own state
jobs=()                # process ids of what was started
ports=()
export FLWR_HOME=$secrets/flwr
export FLWR_TELEMETRY_ENABLED=${FLWR_TELEMETRY_ENABLED:-0}

# Jobs are out of reach of the terminal's Ctrl-C: this script ends them, in its own order.
start() {
    set -m
    "$@" &
    set +m
    jobs+=($!)
}

# `wait` for the newest job, unlike the job itself, lets a trap act at once.
run() {
    start "$@"
    wait $!
}

alive() { kill -0 "$1" 2>/dev/null; }

# What was started: the jobs, all below them, and what Flower has cut loose, told by our ports.
started() {
    ps -eo pid=,ppid=,stat=,args= | awk -v roots="${jobs[*]-}" -v ports="${ports[*]-}" '
        BEGIN {
            n = split(roots, list, " ")
            for (i = 1; i <= n; i++) root[list[i]]
            m = split(ports, port, " ")
        }
        $3 !~ /^Z/ {
            parent[$1] = $2
            if ($1 in root) ours[$1]
            if ($0 ~ /flwr-|flower-/)
                for (i = 1; i <= m; i++) if (index($0, "127.0.0.1:" port[i])) ours[$1]
        }
        END {
            do {
                found = 0
                for (pid in parent)
                    if (!(pid in ours) && parent[pid] in ours) { ours[pid]; found = 1 }
            } while (found)
            for (pid in ours) print pid
        }'
}

stop() {
    local code=$? signal=TERM attempt pids
    trap '' INT TERM
    for ((attempt = 0; attempt < 80; attempt++)); do
        pids=$(started)
        [ -n "$pids" ] || break
        [ "$attempt" -lt 40 ] || signal=KILL
        kill -$signal $pids 2>/dev/null || true
        sleep .25
    done
    wait
    rm -rf "$secrets"
    [ "$code" = 0 ] || echo "deploy_local: ended with code $code; logs are in $logs." >&2
    exit "$code"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    tail -n 5 "$logs"/*.log >&2
    echo "deploy_local: $1." >&2
    exit 1
}

# until_true <what> <seconds> <command...>: fails when time is up or a started process has ended.
until_true() {
    local what=$1 deadline=$((SECONDS + $2)) pid
    shift 2
    until "$@"; do
        for pid in "${jobs[@]}"; do
            alive "$pid" || fail "waiting for $what: a process ended"
        done
        ((SECONDS < deadline)) || fail "waiting for $what: not within its time"
        sleep .5
    done
}

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

online() {
    flwr supernode list site --format json 2>/dev/null |
        python -c 'import json, sys
nodes = json.load(sys.stdin).get("nodes", [])
sys.exit(sum(node["status"] == "online" for node in nodes) < int(sys.argv[1]))' "$1" 2>/dev/null
}

mkdir -p "$logs" "$FLWR_HOME"
read -r -a ports < <(python -c 'import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))' $((num_nodes + 1)))

# An authority of our own, and a certificate that names the address that is used.
cd "$secrets"
openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=fednas-local-ca \
    -keyout ca.key -out ca.crt 2>openssl.log
openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr 2>>openssl.log
printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' >server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 1 \
    -extfile server.ext -out server.crt 2>>openssl.log
cd - >/dev/null
printf '[superlink.site]\naddress = "127.0.0.1:%s"\nroot-certificates = "%s"\n' \
    "${ports[0]}" "$secrets/ca.crt" >"$FLWR_HOME/config.toml"

echo "starting a SuperLink and $num_nodes SuperNodes on 127.0.0.1, ports ${ports[*]}"
start flower-superlink --host 127.0.0.1 --port "${ports[0]}" --enable-supernode-auth \
    --ssl-ca-certfile "$secrets/ca.crt" --ssl-certfile "$secrets/server.crt" \
    --ssl-keyfile "$secrets/server.key" --database "$secrets/state.db" \
    --disable-runtime-dependency-installation &>"$logs/superlink.log"
until_true "the SuperLink" 120 listening "${ports[0]}"
for ((node = 0; node < num_nodes; node++)); do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "site-$node" -f "$secrets/node$node"
    flwr supernode register "$secrets/node$node.pub" site --name "site-$node" >>"$logs/register.log" 2>&1
    start flower-supernode --superlink "127.0.0.1:${ports[0]}" --port "${ports[node + 1]}" \
        --root-certificates "$secrets/ca.crt" --auth-supernode-private-key "$secrets/node$node" \
        --node-config "partition-id=$node num-partitions=$num_nodes tag=\"site-$node\"" \
        &>"$logs/node$node.log"
done
until_true "the SuperNodes" 120 online "$num_nodes"

# All three must answer: bits could not agree without one. Flower gives up a client process that does
# not begin within a minute and starts another, so a machine that is too busy ends at the deadline.
run fednas run runtime=deployment runtime.superlink=site runtime.quorum=1 runtime.deadline_s=600 \
    clients=$num_nodes run_dir="$results/deployed" "$@"
if [ -d "$results/deployed/sites" ]; then # private: no noise is drawn twice, but the books must be in order
    for site in "$results"/deployed/sites/*/; do
        run fednas ledger verify "$site/ledger/ledger.sqlite" --key "$site/key"
    done
    exit 0
fi
run fednas run runtime=inline clients=$num_nodes run_dir="$results/inline" "$@"

python - "$results" <<'PYTHON'
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

deployed, inline = (Path(sys.argv[1]) / name for name in ("deployed", "inline"))
found = {
    path.relative_to(folder)
    for folder in (deployed, inline)
    for pattern in ("genotype.json", "model.safetensors", "checkpoints/*.safetensors")
    for path in folder.glob(pattern)
}
differences = [] if found else ["neither run left a result to compare"]
settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (deployed, inline)]
for key in sorted(settings[0].keys() - {"run_dir", "runtime"}):
    if settings[0][key] != settings[1][key]:
        differences.append(f"the runs were not asked for the same {key}: was conf/ edited meanwhile?")
for name in sorted(found):
    pair = [folder / name for folder in (deployed, inline)]
    if not all(path.is_file() for path in pair):
        differences.append(f"{name} is missing in {[str(p.parent) for p in pair if not p.is_file()]}")
    elif pair[0].read_bytes() == pair[1].read_bytes():
        print(f"equal: {name}")
    elif name.suffix == ".json":
        differences.append(f"{name} differs")
    else:
        a, b = (load_file(path) for path in pair)
        unequal = [
            f"{key} by up to {(a[key].double() - b[key].double()).abs().max():g}"
            for key in sorted(a.keys() & b.keys())
            if a[key].shape == b[key].shape and not torch.equal(a[key], b[key])
        ]
        differences.append(f"{name} differs: {'; '.join(unequal) or 'names, shapes or metadata'}")
for difference in differences:
    print(f"deploy_local: {difference}", file=sys.stderr)
if not differences:
    print("deployment and inline agree in every bit.")
sys.exit(bool(differences))
PYTHON

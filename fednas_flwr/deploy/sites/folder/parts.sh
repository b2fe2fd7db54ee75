# How a start script makes secrets and runs its parts; sourced by it.
umask 077
mkdir -p state
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2 # seconds between an executor's questions

# A file of random text, made once; two containers may want it at the same time.
make_secret() {
    local new
    [ -e "$1" ] && return
    new=$(mktemp state/.new.XXXXXX)
    head -c 32 /dev/urandom | base64 | tr -d '\n' >"$new"
    ln "$new" "$1" 2>/dev/null || true
    rm -f "$new"
}
make_secret state/executor.secret

# run_parts <part>...: the part that the script was called with, or all until one ends.
run_parts() {
    local part
    if [ -n "$only" ]; then
        "$only"
        return
    fi
    trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
    trap 'exit 143' TERM INT
    for part in "$@"; do
        "$part" &
    done
    wait -n
}
only=${1:-}

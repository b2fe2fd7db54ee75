# Sourced by the other scripts: makes the environment where it is missing and puts it on PATH.
# FEDNAS_VENV names another environment; PYTHON another interpreter (3.11.1 to 3.13).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${FEDNAS_VENV:-$PWD/.venv}
python=${PYTHON:-python3}
if [ ! -x "$environment/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(not (3, 11, 1) <= sys.version_info < (3, 14))' || {
        echo "$("$python" --version) found, 3.11.1 to 3.13 needed: set PYTHON=<interpreter>." >&2
        exit 1
    }
    "$python" -m venv "$environment"
fi
if [ ! -x "$environment/bin/fednas" ] || [ pyproject.toml -nt "$environment/installed" ]; then
    echo "Installing into $environment; torch makes this take some minutes." >&2
    "$environment/bin/pip" install --quiet --disable-pip-version-check -e ".[dev]"
    touch "$environment/installed"
fi
export PATH="$environment/bin:$PATH"

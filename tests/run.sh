#!/usr/bin/env bash
# Lint and tests: bash tests/run.sh [pytest arguments]. Installs what is missing first. Fails if any of them fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh test quickstart
PY="${VIRTUAL_ENV:-${CONDA_PREFIX:-$PWD/.venv}}/bin/python"

status=0
"$PY" -m ruff check . || status=1
"$PY" -m ruff format --check . || status=1
"$PY" -m pytest "$@" || status=1
exit "$status"

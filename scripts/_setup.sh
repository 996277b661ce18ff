# Sourced by scripts/train and scripts/test: makes .venv with the package in it. prepare EXTRAS is quick once done.

fail() { echo "error: $*" >&2; exit 1; }

# The first Python that runs, is one we support, and can make environments. A pyenv shim for a version that is not
# selected is found on the path but does not run, so each candidate is tried.
find_python() {
  local candidate
  while read -r candidate; do
    [ -x "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null; then
      echo "$candidate"
      return
    fi
  done < <(
    [ -z "${PYTHON:-}" ] || type -aP "$PYTHON"
    for version in 3.11 3.12 3.13; do
      type -aP "python$version"
      ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3 2>/dev/null
    done
    type -aP python3
  )
  fail "no Python 3.11, 3.12 or 3.13 with venv and ensurepip found; install one or set PYTHON=/path/to/python"
}

# An interrupted installation can leave packages that pip takes for whole, so it is thrown away and made again.
discard_interrupted_setup() {
  local owner
  [ -f .venv/.setting-up ] || return 0
  owner=$(cat .venv/.setting-up)
  if [ -n "$owner" ] && [ "$owner" != $$ ] && kill -0 "$owner" 2>/dev/null; then
    fail "process $owner is setting up .venv; try again when it is done (or remove .venv/.setting-up)"
  fi
  echo "An earlier set-up was interrupted; starting it again." >&2
  rm -rf .venv
}

# What an installed environment depends on: where it lies and what the package asks for.
wanted_state() { pwd; cat setup.cfg pyproject.toml "${BASH_SOURCE[0]}"; }

# Whether .venv holds what is wanted with these extras: installed with them, and perhaps with others.
up_to_date() {
  local stamp extra
  [ -x .venv/bin/python ] || return 1
  for stamp in .venv/.installed-*; do
    for extra in ${1//-/ }; do
      [[ $stamp == *-"$extra"* ]] || continue 2
    done
    if wanted_state | cmp -s - "$stamp"; then return; fi
  done
  return 1
}

prepare() {
  local extras=$1 name=${1//,/-} python
  discard_interrupted_setup
  if up_to_date "$name"; then return; fi
  mkdir -p .venv
  echo $$ > .venv/.setting-up
  if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    echo "Making .venv with $python ..." >&2
    "$python" -m venv .venv || fail "$python could not make .venv"
  fi
  echo "Installing tfdp-rec and what it needs into .venv (once; a few minutes) ..." >&2
  .venv/bin/python -m pip install --quiet --editable ".${extras:+[$extras]}" || fail "pip could not install the package"
  # Its statement is compared with ours in the tests. Its pins (NumPy 1, Python below 3.12) are older than what it needs.
  if [[ ",$extras," == *,test,* ]]; then
    .venv/bin/python -m pip install --quiet --no-deps --ignore-requires-python tensorflow-privacy==0.9.0 ||
      fail "pip could not install TensorFlow Privacy's wheel"
  fi
  # With PYTHONDONTWRITEBYTECODE set, every start would compile TensorFlow's Python anew. Some packages ship files
  # that are not meant to compile; those do not matter here.
  .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
  wanted_state > ".venv/.installed-$name"
  rm -f .venv/.setting-up
}

#!/bin/sh
# Installs into a virtual environment during an image build:  pip-install.sh VENV PIP-ARGUMENTS...
# Only from /wheels if it has wheels (a build without a network), else from PyPI; with constraints.txt if it exists.
set -eu
venv=$1
shift
if ls /wheels/*.whl > /dev/null 2>&1; then
  set -- --no-index --find-links /wheels "$@"
fi
for constraints in /build/constraints*.txt; do
  if [ -f "$constraints" ]; then
    set -- --constraint "$constraints" "$@"
  fi
done
# pip runs from another environment, so that the image's environment does not contain pip.
exec /build/pip/bin/python -m pip --python "$venv/bin/python" install --no-cache-dir --disable-pip-version-check \
  --root-user-action=ignore "$@"

#!/bin/sh
# Installs into a virtual environment during an image build:  pip-install.sh VENV PIP-ARGUMENTS...
# From /wheels alone where that folder is filled (a build without network), from PyPI otherwise; under constraints.txt where there is one.
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
# pip works from its own environment on another one, so that the image's has no pip in it.
exec /build/pip/bin/python -m pip --python "$venv/bin/python" install --no-cache-dir --disable-pip-version-check \
  --root-user-action=ignore "$@"

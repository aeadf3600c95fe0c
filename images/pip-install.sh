#!/bin/sh
# Installs packages without what they require into a virtual environment, during an image build:
#     pip-install.sh VENV PIP-ARGUMENTS...
# Only from /wheels if it has wheels (a build without a network), else from the package index.
set -eu
venv=$1
shift
if ls /wheels/*.whl > /dev/null 2>&1; then
  set -- --no-index --find-links /wheels "$@"
fi
# pip runs from another environment, so that the image's environment does not contain pip.
exec /build/pip/bin/python -m pip --python "$venv/bin/python" install --no-deps --no-cache-dir --disable-pip-version-check \
  --root-user-action=ignore "$@"

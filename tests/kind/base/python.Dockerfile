# Replaces python:3.11-slim-bookworm where no registry is reachable: the same Debian release with Debian's Python 3.11.
ARG DEBIAN
FROM ${DEBIAN}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*

# The image of the operator. Build it from the repository's root:
#
#     docker build --tag ddpjob/operator:0.1.0 .
#
# - The base image needs Python 3.11 or newer, venv and CA certificates: --build-arg BASE_IMAGE=...
# - Without a network: put the wheels of requirements/{build,operator}.txt into a folder wheels/ here; only they are used.
# - The image runs as user 65532 and writes only to /tmp, so it works with a read-only root file system under Pod Security
#   "restricted".
ARG BASE_IMAGE=python:3.11-slim-bookworm

# The dependencies, with the hashes of requirements/. Rebuilt only if these or the wheels change.
FROM ${BASE_IMAGE} AS dependencies
RUN python3 -m venv /build/pip && python3 -m venv --without-pip /opt/ddpjob
COPY images/pip-install.sh requirements/build.txt requirements/operator.txt /build/
# The wildcard makes wheels/ optional: COPY requires that one of its sources exists.
COPY requirements/operator.txt wheels* /wheels/
RUN /build/pip-install.sh /build/pip --require-hashes --requirement /build/build.txt \
 && /build/pip-install.sh /opt/ddpjob --require-hashes --requirement /build/operator.txt

# The project in a separate layer, so that a change of code makes one small new layer.
FROM dependencies AS project
COPY LICENSE /src/
COPY operator /src/operator
RUN /build/pip/bin/python -m pip wheel --no-index --no-deps --no-build-isolation --disable-pip-version-check \
    --wheel-dir /build/project /src/operator/ddpjob /src/operator/ddpjob_operator \
 && /build/pip-install.sh /opt/ddpjob --prefix /opt/project /build/project/*.whl

FROM ${BASE_IMAGE}
COPY --from=dependencies /opt/ddpjob /opt/ddpjob
COPY --from=project /opt/project /opt/ddpjob
# pip has compiled the bytecode, and the file system may be read-only. kopf and torch read the user's name, which a user
# without an entry in /etc/passwd gets from here (a cluster may choose any user number).
ENV PATH=/opt/ddpjob/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=ddpjob-operator
# A number, because Kubernetes cannot verify runAsNonRoot with a name.
USER 65532:65532
ENTRYPOINT ["ddpjob-operator"]

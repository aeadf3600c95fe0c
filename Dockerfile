# The image of the operator. Build it from the repository's root:
#
#     docker build --tag ddpjob/operator:dev .
#
# - Any base with Python 3.11 or newer, venv and CA certificates will do: --build-arg BASE_IMAGE=...
# - Without network: fill a folder wheels/ here with the dependencies' wheels (and setuptools'); then nothing else is used.
# - The image runs as user 65532, writes nothing outside /tmp, and so works with a read-only root file system under Pod Security "restricted".
ARG BASE_IMAGE=python:3.11-slim-bookworm

# What the project needs. Rebuilt only when pyproject.toml, the constraints or the wheels change.
FROM ${BASE_IMAGE} AS dependencies
RUN python3 -m venv /build/pip && python3 -m venv --without-pip /opt/ddpjob
# The wildcard lets wheels/ and constraints.txt be absent: COPY wants one of its sources to exist, not all.
COPY images/pip-install.sh pyproject.toml constraints*.txt /build/
COPY pyproject.toml wheels* /wheels/
RUN python3 -c "import tomllib; print(*tomllib.load(open('/build/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /build/requirements.txt \
 && /build/pip-install.sh /opt/ddpjob --requirement /build/requirements.txt

# The project itself, apart, so that a change of code makes one small new layer.
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
COPY trainer_app /src/trainer_app
RUN /build/pip-install.sh /opt/ddpjob --no-deps --prefix /opt/project /src

FROM ${BASE_IMAGE}
COPY --from=dependencies /opt/ddpjob /opt/ddpjob
COPY --from=project /opt/project /opt/ddpjob
# Bytecode was compiled by pip; with a read-only file system there is no point in trying again. kopf and torch ask for the
# user's name, which a user known by number alone (any cluster may choose another) has from here.
ENV PATH=/opt/ddpjob/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=ddpjob-operator
# By number, for Kubernetes cannot see that a name is not root's (runAsNonRoot).
USER 65532:65532
ENTRYPOINT ["ddpjob-operator"]

# The image of the operator. Build it from the repository's root:
#
#     docker build --tag ddpjob/operator:0.1.0 .
#
# - The base image needs Python 3.11 or newer, venv and CA certificates: --build-arg BASE_IMAGE=...
# - Without a network: put the wheels of the dependencies and of setuptools into a folder wheels/ here; only they are used.
# - The image runs as user 65532 and writes only to /tmp, so it works with a read-only root file system under Pod Security
#   "restricted".
ARG BASE_IMAGE=python:3.11-slim-bookworm

# The dependencies. Rebuilt only if pyproject.toml, the constraints or the wheels change.
FROM ${BASE_IMAGE} AS dependencies
RUN python3 -m venv /build/pip && python3 -m venv --without-pip /opt/ddpjob
# The wildcard makes wheels/ and constraints.txt optional: COPY requires that one of its sources exists.
COPY images/pip-install.sh pyproject.toml constraints*.txt /build/
COPY pyproject.toml wheels* /wheels/
RUN python3 -c "import tomllib; print(*tomllib.load(open('/build/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /build/requirements.txt \
 && /build/pip-install.sh /opt/ddpjob --requirement /build/requirements.txt

# The project in a separate layer, so that a change of code makes one small new layer.
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
COPY trainer_app /src/trainer_app
RUN /build/pip-install.sh /opt/ddpjob --no-deps --prefix /opt/project /src

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

# Python and PyTorch alone: the trainer's image without this project and without a shell. The first python3 on PATH has no
# torch; torchrun is that of the environment that has it.
ARG TRAINER
FROM ${TRAINER}
USER 0
COPY torch_only.py /tmp/
RUN ["/opt/ddpjob/bin/python3", "/tmp/torch_only.py"]
ENV PATH=/usr/local/bin:/usr/bin:/bin:/opt/ddpjob/bin
USER 1000:1000
ENTRYPOINT []

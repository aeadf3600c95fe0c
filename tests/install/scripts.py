"""Generate manifests/examples/ddprun-script.yaml: the script that users copy, as a DDPJob."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

from tests.install.chart import ROOT

EXAMPLES = ROOT / "manifests" / "examples"
SCRIPT = EXAMPLES / "train.py"
JOB = EXAMPLES / "ddprun-script.yaml"

_TEXT = """\
# Your own script under ddprun: 2 nodes × 2 processes = world size 4, gloo, some 500 steps. Needs no GPU.
#
#   kubectl apply -f manifests/examples/ddprun-script.yaml
#   kubectl get ddp ddprun-script --watch            # state, nodes, progress, loss
#   kubectl patch ddp ddprun-script --type=merge --patch '{{"spec": {{"suspend": true}}}}'   # saves, and stops
#   kubectl patch ddp ddprun-script --type=merge --patch '{{"spec": {{"suspend": false}}}}'  # resumes
#
# If a rank fails, status.failures names its rank, exception, file and line, and the next attempt resumes from the
# checkpoint. With torchrun in place of ddprun in `command` the same holds, but the status shows no progress.
#
# Without a cluster (Ctrl-C stops, the same command resumes):
#
#   ddpjob run manifests/examples/ddprun-script.yaml
#
# The script in the ConfigMap is manifests/examples/train.py (`make generate` copies it). Put yours there, or into the
# image.
apiVersion: v1
kind: ConfigMap
metadata:
  name: ddprun-script
data:
  train.py: |
{script}---
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata:
  name: ddprun-script
spec:
  # CHANGE to an image with torch, your packages and ddprun (docs/tasks/scripts.md). This is the trainer image of
  # docs/start/install.md.
  image: ddpjob/trainer:0.1.0
  command: [ddprun, /scripts/train.py, --epochs, "20"]
  numNodes: 2
  nprocPerNode: 2
  resources:
    requests:
      cpu: 500m
      memory: 1Gi
    limits:
      memory: 3Gi
  restartPolicy:
    maxRestarts: 3
  # The operator creates a claim named ddprun-script-checkpoints, which every pod mounts. The claim stays when the job
  # is deleted: apply the job again, and it resumes.
  checkpoint:
    claimTemplate:
      spec:
        accessModes: [ReadWriteMany]
        # CHANGE to a storage class that supports ReadWriteMany; `kubectl get storageclass` lists your classes.
        storageClassName: ddpjob-shared
        resources:
          requests:
            storage: 1Gi
  template:
    spec:
      containers:
        # Merged with the short fields above, because it is named `trainer`.
        - name: trainer
          volumeMounts:
            - name: scripts
              mountPath: /scripts
              readOnly: true
      volumes:
        - name: scripts
          configMap:
            name: ddprun-script
"""


def jobs() -> dict[Path, str]:
    """Return the text of the file."""
    return {JOB: _TEXT.format(script=indent(SCRIPT.read_text(encoding="utf-8"), "    "))}

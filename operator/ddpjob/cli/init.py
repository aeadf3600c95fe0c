"""``ddpjob init``: prints a commented DDPJob to begin with; ``#field`` is YAML to uncomment, ``# text`` a comment."""

from ddpjob.api import limits, names

STARTER = f"""\
# A training on one or more nodes, with one pod on each.
#
#   ddpjob validate job.yaml     checks this file without a cluster
#   ddpjob run job.yaml          runs it on this machine, without its image
#   kubectl apply -f job.yaml    runs it on a cluster
#
# Remove the # at the beginning of a line to set its field. docs/reference/fields.md and `kubectl explain ddpjob.spec`
# have all fields.
apiVersion: {names.API_VERSION}
kind: {names.DDPJOBS.kind}
metadata:
  # At most {limits.MAX_JOB_NAME} characters, because names of pods contain it.
  name: train
spec:
  # It must contain Python, PyTorch and the script.
  image: registry.example.com/me/train:1
  # ddprun reads the number of nodes, their addresses and ranks from the environment: it needs no options for them.
  command: [ddprun, train.py]
#  args: [--epochs, "3"]
#  workingDir: /workspace
  # Runs ddprun in place of torchrun in any image with Python 3.10: it names the rank that fails, with exception and
  # line, and the rank that hangs, and restarts failed ranks in the running pods. docs/tasks/scripts.md describes it.
  launcher: Injected
#  env:
#    - name: LOG_LEVEL
#      value: info

  # Pods, and processes in each pod; auto: one process per GPU of the pod, or one without GPUs.
  numNodes: 1
  nprocPerNode: auto

  # Of each pod, that is, of all its processes together.
#  resources:
#    requests:
#      cpu: "4"
#      memory: 16Gi
#    limits:
#      nvidia.com/gpu: 8

  # When a process, pod or node is lost, all pods start again, by default up to 12 times without progress.
#  restartPolicy:
#    maxRestarts: 3
  # Restarts a training that makes no step for so long; the trainer must report its steps, as ddprun does.
#  progressDeadlineSeconds: 1800

  # Without a volume, a restart begins the training again. The script saves to $DDPJOB_CHECKPOINT_DIR and looks there
  # for a checkpoint when it starts. Every pod mounts it, so with several nodes it must be ReadWriteMany.
#  checkpoint:
#    mountPath: /checkpoints
#    claimTemplate:
#      spec:
#        accessModes: [ReadWriteMany]
#        storageClassName: my-shared-storage
#        resources:
#          requests:
#            storage: 10Gi
  # An existing claim with the training data, mounted read-only; the script finds its path in $DDPJOB_DATA_DIR.
#  data:
#    claimName: my-data
#    mountPath: /data

  # Pods run as user 1000 without privileges, as Pod Security "restricted" demands. For an image that needs root:
#  podSecurity:
#    profile: Baseline
#    runAsUser: 0

  # Limits of the whole job, and when a finished job is deleted with its pods.
#  activeDeadlineSeconds: 86400
#  ttlSecondsAfterFinished: 604800

  # Any other field of the pods, for example where they run.
#  template:
#    spec:
#      nodeSelector:
#        accelerator: h200
"""


def init() -> int:
    """Print a commented DDPJob to begin with.

    \b
    Example:
      ddpjob init
    """
    print(STARTER, end="")
    return 0

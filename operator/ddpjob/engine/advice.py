"""What to do about errors of programs, and of containers that do not start, by the text. The first row applies.

Texts: PyTorch 2.1 to 2.13, NCCL 2.18 to 2.27, CPython 3.10 to 3.13, botocore 1.35, google-auth 2.35, huggingface_hub
0.26, runc 1.2, nvidia-container-cli 1.17. tests/situations has each of them.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """What a text means.

    pattern: of the text. reason: in one word, for the tables in which it depends on the text. local: what to do on one
    machine; empty if it is the same, None if the text is about a cluster or an image.
    """

    pattern: str
    hint: str
    next: str
    reason: str = ""
    local: str | None = ""


BY_ADMINISTRATOR = "ask an administrator to run "
"""Before a command that the role ``edit`` of a namespace does not allow."""
DESCRIBE_NODE = f"{BY_ADMINISTRATOR}kubectl describe node {{node}}"
LESS_MEMORY = "increase resources.limits.memory, or use less memory: a smaller batch, fewer data loader workers"
LESS_MEMORY_HERE = "use less memory: fewer processes, a smaller batch, fewer data loader workers"
LESS_GPU_MEMORY = (
    "use a smaller batch with gradient accumulation, or bfloat16; against fragmentation set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True"
)
GPU_MEMORY = "model, batch and activations need more memory than is free on the GPU; another process may use it, too"

ROWS: Sequence[Row] = (
    Row(
        r"out of shared memory|shared memory (?:segment|object)|(?:to write to|open) file </?torch_|/dev/shm",
        "/dev/shm is too small for the data loader or for NCCL",
        "increase sharedMemory.sizeLimit, or use fewer data loader workers",
        local="make room in /dev/shm, or use fewer data loader workers",
    ),
    Row(
        r"DataLoader worker \(pid.*(?:signal: Killed|exited unexpectedly)|OOM-killed|^SIGKILL$",
        "the kernel killed a process, which often means that the memory was used up; or another process did",
        f"{{logs}}; {LESS_MEMORY}",
        local=f"{{logs}}; {LESS_MEMORY_HERE}",
    ),
    Row(
        r"\bibv_\w+ failed|memlock",
        "the process may not lock as much memory as InfiniBand needs",
        "add the capability IPC_LOCK in spec.template; the administrator of the nodes raises the limit memlock",
        local="raise the limit memlock: ulimit -l",
    ),
    Row(
        r"^MemoryError|Cannot allocate memory|bad_alloc",
        "the program needs more memory than there is",
        LESS_MEMORY,
        local=LESS_MEMORY_HERE,
    ),
    Row(
        r"driver on your system is too old|driver version is insufficient|unsatisfied condition: (?:cuda|driver)",
        "the GPU driver is older than the CUDA of PyTorch",
        "use an image with an older CUDA, or nodes with a newer driver",
        local="install a newer driver, or a PyTorch for an older CUDA",
    ),
    Row(
        r"unable to apply cgroup",
        "the runtime of the Kubernetes node cannot limit the container",
        f"{DESCRIBE_NODE}, and to look at its kubelet and runtime",
        local=None,
    ),
    Row(
        r"chdir to cwd",
        "the working directory does not exist in the container, or its user may not enter it",
        "correct workingDir, or podSecurity.runAsUser and fsGroup",
        local=None,
    ),
    Row(
        r"error mounting",
        "a path that the container mounts does not exist on the Kubernetes node, or not in the image",
        f"correct volumeMounts in spec.template; for a path of the GPU driver, {DESCRIBE_NODE}",
        local=None,
    ),
    Row(
        r"No CUDA GPUs are available|Found no NVIDIA driver|no GPUs found|libcuda\.so\S*: cannot open",
        "PyTorch finds no GPU",
        "request nvidia.com/gpu in spec.resources; without GPUs, use the backend gloo",
        local="nvidia-smi shows the GPUs; correct CUDA_VISIBLE_DEVICES, or use the backend gloo",
    ),
    Row(
        r"invalid device ordinal|You requested gpu",
        "a node has more ranks than GPUs",
        "correct nprocPerNode, or nvidia.com/gpu in spec.resources",
        local="correct nprocPerNode, or CUDA_VISIBLE_DEVICES",
    ),
    Row(
        r"Duplicate GPU detected",
        "two ranks of a node use the same GPU",
        "call torch.cuda.set_device(LOCAL_RANK) before init_process_group; nprocPerNode may not exceed the GPUs",
    ),
    Row(
        r"no kernel image|kernel image is invalid|invalid device function",
        "PyTorch is not built for this GPU",
        "use an image whose PyTorch supports the architecture of the GPU, or other nodes",
        local="install a PyTorch that supports the architecture of the GPU",
    ),
    Row(
        r"device-side assert",
        "an index on the GPU is out of range, for example a label that is not below the number of classes",
        "set CUDA_LAUNCH_BLOCKING=1 in env to see the line that used it; {logs}",
    ),
    Row(r"ALLOC_FAILED|NOT_INITIALIZED|'out of memory'", GPU_MEMORY, LESS_GPU_MEMORY),
    Row(
        r"system not yet initialized|cudaGetDeviceCount|nvidia-container-cli|error running \w*hook|CDI devices",
        "the GPU driver, or the fabric manager of the GPUs, does not work",
        f"{DESCRIBE_NODE}, and to restart the driver or the fabric manager",
        local="nvidia-smi shows whether the driver works; restart the driver or the fabric manager",
    ),
    Row(
        r"cuDNN version incompatibility",
        "another cuDNN is found before the one of PyTorch",
        "remove its directory from LD_LIBRARY_PATH, or use another image",
        local="remove its directory from LD_LIBRARY_PATH",
    ),
    Row(r"Mismatched NCCL version", "the nodes run different images", "name the image with its digest", local=None),
    Row(
        r"socket interface found|Unable to find address for",
        "no network interface has the name that NCCL or gloo was given",
        "correct NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in env",
    ),
    Row(
        r"\bsocket(?:Start|Poll|Try|Finish|Progress|Wait|Send|Recv|Connect|Accept)\w*|No route to host"
        r"|Software caused connection abort|transport/tcp",
        "the network does not connect the pods on the interface that was chosen",
        "look at NetworkPolicies; set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface of the pod network",
        local=None,
    ),
    Row(
        r"gai error|[Nn]ame resolution|Name or service not known|getaddrinfo",
        "a host name does not resolve",
        "correct the name (the operator sets MASTER_ADDR); look at DNS, and at NetworkPolicies for it",
        local="correct the name, or look at the name servers of this machine",
    ),
    Row(
        r"^Rendezvous(?:Timeout|Connection)|waiting for (?:clients|workers)|client socket has (?:timed out|failed)",
        "a node did not come to the rendezvous, or the network does not connect it",
        "look at the logs of the other nodes, at NetworkPolicies and DNS",
        local=None,
    ),
    Row(
        r"EADDRINUSE|[Aa]ddress already in use",
        "another process listens on the port",
        "use another rendezvous.port, or no hostNetwork; without it, the program itself opened the port before",
        local="use another rendezvous.port, or end the other process; or the program itself opened the port before",
    ),
    Row(
        r"certificate verify failed|CERTIFICATE_VERIFY_FAILED",
        "the certificate of the server or of a proxy is not known where the program runs",
        "add the CA certificate to the image, or mount it and name it in SSL_CERT_FILE and REQUESTS_CA_BUNDLE",
        local="name the CA certificate in SSL_CERT_FILE and REQUESTS_CA_BUNDLE",
    ),
    Row(
        r"credentials(?: were)? not found|locate credentials|api_key not configured|gated repo|401\)"
        r"|\b401 (?:Client|Un)|\bUnauthorized|ExpiredToken|InvalidAccessKey",
        "the credentials of a service are missing, or it refuses them",
        "put them into a Secret that env or envFrom names (HF_TOKEN, AWS_ACCESS_KEY_ID), or set serviceAccountName",
        local="set them in env (HF_TOKEN, AWS_ACCESS_KEY_ID), or log in with the program of the service",
    ),
    Row(
        r"Access ?Denied|\b403 (?:Client|Forb)|403\)|\bForbidden(?! \w)|does not have \S+ access",
        "the account of the program lacks a right",
        "give the right to the role of its serviceAccountName, or use other credentials in a Secret",
        local="give the right to the account, or use other credentials",
    ),
    Row(
        r"SlowDown|reduce your request rate|\b429 (?:Client|Too)|429\)|rate limit",
        "a service refuses so many requests",
        "use fewer workers, or more retries with longer delays",
    ),
    Row(
        r"(?i)^\w*(?:timeout|connection)\w*(?:error)?\b|n(?:o|')t connect to|max retries exceeded"
        r"|check your (?:internet )?connection|network is unreachable",
        "a service cannot be reached, or does not answer in time",
        "look at its endpoint, at NetworkPolicies for egress, and at the proxy in HTTPS_PROXY; allow more retries",
        local="look at its endpoint, and at the proxy in HTTPS_PROXY; allow more retries",
    ),
    Row(
        r"No space left on device|PytorchStreamWriter failed|[Qq]uota exceeded",
        "the volume or the disk is full, or its quota is used up",
        "make room on the volume, or increase its claim; for files of the container, limits.ephemeral-storage",
        local="make room, or use another directory with --volume",
    ),
    Row(
        r"\[Errno 13\]|^PermissionError",
        "the file or its directory belongs to another user",
        "set podSecurity.fsGroup to the group of the volume; for caches, set HOME or HF_HOME to another directory",
        local="correct its owner or its rights; for caches, set HOME or HF_HOME to another directory",
    ),
    Row(
        r"Read-only file system",
        "the volume or the file system is read-only",
        "mount the volume without readOnly, or write to another path",
        local="write to another path",
    ),
    Row(
        r"[Ss]tale file handle|Input/output error|[Tt]ransport endpoint",
        "the storage of a volume failed, or the connection to its server",
        f"look at the server of the volume, at its mount and at its network; {DESCRIBE_NODE}",
        local="look at the server of the file system, at its mount and at its network",
    ),
    Row(
        r"Too many open files",
        "each data loader worker keeps files and tensors open",
        "use fewer workers, torch.multiprocessing.set_sharing_strategy('file_system'), or a higher ulimit -n",
    ),
    Row(
        r"not compiled with CUDA",
        "PyTorch has no CUDA",
        "use an image with PyTorch for CUDA, or run without GPUs",
        local="install a PyTorch for CUDA, or run without GPUs",
    ),
    Row(
        r"^(?:ModuleNotFound|Import)Error|cannot open shared object file|Failed to find C compiler",
        "a module, a library or a compiler is missing, or has another version",
        "install the right version in the image; send modules of your own with submit --workdir",
        local="install the right version, a module with pip install for the Python that runs the program",
    ),
    Row(
        r"can't open file|error: (?:unrecognized|the following) arguments|error: argument ",
        "the command names a file that does not exist, or an argument that the program does not know",
        "correct command or args, and create the job again",
        local="correct command or args, and run the job again",
    ),
    Row(
        r"PytorchStreamReader|in loading state_dict|[Ww]eights only load failed",
        "the checkpoint is damaged, is of another model, or holds more than tensors",
        "{logs}; use another checkpoint, or correct the model; torch.load(weights_only=False) reads objects, too",
    ),
    Row(
        r"^FileNotFoundError|No such file or directory",
        "the path is wrong, or what it leads to is not mounted",
        "correct the path, or mount the volume: spec.data, or volumes in spec.template",
        local="correct the path, or map its directory with --volume",
    ),
    Row(
        r"^SIG(?:TERM|INT|HUP)$",
        "another process asked the program to end, for example a script or a timeout",
        "{logs}; kubectl describe pod {pod} shows failed probes",
        local="{logs}",
    ),
    Row(
        r"^SIGABRT$",
        "native code found an error: an assertion, damaged memory, or an exception that nothing caught",
        "{logs}, whose last lines name it; PYTHONFAULTHANDLER=1 in env adds the lines of Python",
    ),
    Row(
        r"^SIGSEGV$",
        "native code used memory that is not its own: an extension, or a library of another version",
        "{logs}; PYTHONFAULTHANDLER=1 in env adds the lines of Python",
    ),
    Row(
        r"^SIGBUS$",
        "/dev/shm is full, or a file that is mapped into memory became shorter",
        "increase sharedMemory.sizeLimit, or use fewer data loader workers; {logs}",
        local="make room in /dev/shm, or use fewer data loader workers; {logs}",
    ),
    Row(
        r"^SIGILL$",
        "the processor lacks an instruction, such as AVX-512, that a library uses",
        "use an image that is built for this processor, or other nodes with nodeSelector in spec.template; {logs}",
        local="install a build of the library for this processor; {logs}",
    ),
    Row(
        r"^FloatingPointError|loss is nan",
        "the training diverged, or the data are wrong",
        "use a lower learning rate, and look at the data of the step; {logs}",
    ),
)
"""Placeholders as in ``failures.TABLE``."""
SYNCED_LATER = Row(
    r"failed to sync \w+ cache",
    "the kubelet has not read the Secret or ConfigMap yet",
    f"nothing: the kubelet tries again; if it lasts, {DESCRIBE_NODE}",
)
NO_OBJECT = Row(
    r'(?:secret|configmap) "[^"]+" not found|couldn\'t find key|references non-existent',
    "the Secret, ConfigMap or key that the message names does not exist",
    "create it, or correct env, envFrom, volumes or template and create the job again",
)
TOO_LITTLE_MEMORY = Row(
    r"OOM-killed",
    "the memory limit is too low for a container to start",
    "increase resources.limits.memory",
)
DISK_FULL = Row(
    r"no space left on device|disk quota exceeded",
    "a disk of the Kubernetes node is full",
    f"{DESCRIBE_NODE}, and to make room",
)
OF_CONTAINERS: Sequence[Row] = (
    SYNCED_LATER,
    Row(
        r"runAsNonRoot",
        "the pod may not run as root, and the image does",
        "set runAsUser in podSecurity or in securityContext of spec.template, or a numeric USER in the image",
    ),
    Row(
        r"prepare subPath",
        "the directory of subPath cannot be created on the volume",
        "correct subPath, or the owner and the rights of the volume",
    ),
    Row(r"no command specified", "the image has no command", "set command in the spec"),
    Row(
        r"^CrashLoopBackOff",
        "an init container fails again and again",
        "kubectl logs {pod} -n {namespace} --all-containers; correct initContainers in spec.template",
    ),
    NO_OBJECT,
    Row(
        r"SignatureValidationFailed",
        "a policy of the nodes requires an image that is signed",
        "sign the image, or use a signed one",
    ),
    TOO_LITTLE_MEMORY,
    DISK_FULL,
    Row(
        r"^(?!.*(?:nvidia-|hook)).*executable file",
        "the command is not in the image",
        "correct command, args or image and create the job again",
    ),
    Row(
        r"^PostStartHookError",
        "the command that lifecycle.postStart runs in the container failed",
        "correct lifecycle in spec.template",
    ),
    Row(
        r"^CreateContainerError|^RunContainerError",
        "the container runtime of the Kubernetes node cannot create the container",
        f"{DESCRIBE_NODE}; the kubelet tries again",
    ),
)
"""Of a container that its kubelet does not start: its reason and message, or the message alone."""


def advice(text: str, rows: Sequence[Row] = ROWS, is_local: bool = False, **names: str) -> tuple[str, str] | None:
    """Return hint and next for the text of an error, which begins with its type or reason; None if it is not known.

    is_local: on one machine. names: values of the placeholders in next; without them they stay.
    """
    row = next((row for row in rows if re.search(row.pattern, text)), None)
    if row is None or (is_local and row.local is None):
        return None
    todo = (row.local if is_local else "") or row.next
    return row.hint, todo.format(**names) if names else todo

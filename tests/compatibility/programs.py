"""The public programs: where each comes from, how it is started, what it prints. Not a line of them is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Checkout:
    """A script in a public repository, at one commit."""

    repository: str
    commit: str
    script: str

    @property
    def folder(self) -> str:
        """The name of the checkout's folder."""
        return self.repository.replace("/", "+")

    @property
    def file(self) -> str:
        """The name of the script."""
        return PurePosixPath(self.script).name


@dataclass(frozen=True)
class Installed:
    """A module of a package in requirements.txt."""

    module: str

    @property
    def file(self) -> str:
        """The name of the module's file."""
        return self.module.rpartition(".")[2] + ".py"


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        losses: the pattern of a loss in its output; all of them, of both ranks, are compared.
        count: how many losses a run has.
        losses_file: the pattern of the files of the working directory, of which the newest has the losses, and not
            the output.
        endless: it has no setting for a short run: it is stopped after ``count`` losses.
        steps: steps of the optimizer on rank 0 in a whole run.
        hang_timeout: seconds; less than the timeout of its process group, whose exception would come first.
        remark: what a reader must know of this row.
    """

    name: str
    source: Checkout | Installed
    arguments: str
    losses: str
    count: int
    steps: int = 0
    losses_file: str = ""
    endless: bool = False
    hang_timeout: int = 20
    variables: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


_EXAMPLES = Checkout("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "imagenet/main.py")
_IMAGENET = (
    "--dummy --arch shufflenet_v2_x0_5 --batch-size 8 --workers 0 --print-freq 1 --seed 1 --lr 0.01 "
    "--dist-url env:// --dist-backend gloo"
)
_KUBEFLOW = "kubeflow/training-operator"
_KUBEFLOW_1_9_0 = "6f74c7f6b2ed6c27aabd82d0a316b23f0646059c"
_SEED = {"COMPATIBILITY_SEED": "torchvision"}  # these draw their seed: the test sets one
PROGRAMS = (
    Program(
        name="pytorch/examples, imagenet on fake data",
        source=_EXAMPLES,
        arguments=_IMAGENET,
        losses=r"Epoch: \[0\]\[ *[1-6]/\d+\].*?Loss +(\S+)",
        count=12,
        endless=True,
        remark="It wraps the model in DistributedDataParallel on GPUs only: on CPUs its ranks exchange nothing.",
    ),
    Program(
        name="Lightning, autoencoder",
        source=Checkout(
            "Lightning-AI/pytorch-lightning",
            "7f0c3436cd3f6ad3753125672024fc415cbcb414",
            "examples/pytorch/basics/autoencoder.py",
        ),
        arguments=(
            "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.max_epochs 1 "
            "--trainer.limit_train_batches 20 --trainer.limit_val_batches 2 --trainer.limit_test_batches 2 "
            "--trainer.limit_predict_batches 2 --trainer.log_every_n_steps 1 --trainer.enable_progress_bar false "
            "--trainer.logger CSVLogger --trainer.logger.save_dir ."
        ),
        losses=r"(?m)^(.*\d.*)$",
        count=23,
        steps=20,
        losses_file="lightning_logs/version_*/metrics.csv",
    ),
    Program(
        name="Accelerate, gradient accumulation",
        source=Checkout(
            "huggingface/accelerate",
            "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
            "examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
        ),
        arguments="--cpu --per_device_batch_size 25",
        losses=r"train loss: (\S+)",
        count=30,
        steps=30,
    ),
    Program(
        name="HF Trainer, TRL's fine-tuning script",
        source=Installed("trl.scripts.sft"),
        arguments=(
            "--model_name_or_path HuggingFaceTB/SmolLM-360M --dataset_name Salesforce/wikitext "
            "--dataset_config wikitext-2-v1 --output_dir out --max_steps 20 --per_device_train_batch_size 2 "
            "--max_length 64 --learning_rate 1e-3 --logging_steps 1 --report_to none --save_strategy no "
            "--disable_tqdm true --use_cpu true --bf16 false --gradient_checkpointing false"
        ),
        losses=r"'loss': '?([^',]+)",
        count=20,
        steps=20,
    ),
    Program(
        name="Kubeflow, mnist",
        source=Checkout(_KUBEFLOW, _KUBEFLOW_1_9_0, "examples/pytorch/mnist/mnist.py"),
        arguments="--no-cuda --batch-size 50 --log-interval 1",
        losses=r"loss=(\S+)",
        count=40,
        steps=20,
    ),
    Program(
        name="DataLoader with two workers: Kubeflow, elastic imagenet",
        source=Checkout(_KUBEFLOW, _KUBEFLOW_1_9_0, "examples/pytorch/elastic/imagenet/imagenet.py"),
        arguments=(
            "images --arch shufflenet_v2_x0_5 --workers 2 --batch-size 4 --lr 0.01 --print-freq 1 "
            "--checkpoint-file ./checkpoint.pth.tar"
        ),
        losses=r"Epoch: \[0\]\[ *[0-5]/\d+\].*?Loss +(\S+)",
        count=12,
        endless=True,
        hang_timeout=7,
        variables=_SEED,
        remark=(
            "All of its ranks write one checkpoint file, so it is stopped before the first: two ranks can collide. Its "
            "process group has a timeout of 10 s, so the hang is looked for with `--hang-timeout 7`."
        ),
    ),
    Program(
        name="Own processes by torch.multiprocessing.spawn: pytorch/examples, imagenet",
        source=_EXAMPLES,
        arguments=f"{_IMAGENET} --multiprocessing-distributed",
        losses=r"Epoch: \[0\]\[ *[1-6]/\d+\].*?Loss +(\S+)",
        count=12,
        endless=True,
        variables=_SEED,
        remark="Each rank starts one process, which trains; its steps are the rank's.",
    ),
)

"""The loops that ``tests.benchmarks.mnist`` compares with, written as in tutorials, on the same data.

    python -m tests.benchmarks.mnist_loops NAME DATA DIRECTORY THREADS [MODEL BATCH SHIFT]

prints the result of the loop as JSON: ``dataloader`` (with the last three arguments), ``tutorial`` or ``example``.
They are faster than in practice, because they neither decode with PIL nor start worker processes.
"""

import itertools
import json
import random
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ddptrain.data.batches import MEAN, STD, normalise
from ddptrain.data.mnist import SIDE, Dataset, Images, load
from ddptrain.training import models

_WARM_UP_STEPS = 10  # not counted: they allocate memory and select kernels
_STEPS = 120  # of the DataLoader loop
_TARGET = 0.98  # of the tutorial's accuracy
_MOST_EPOCHS = 12


class Samples(TorchDataset[tuple[torch.Tensor, int]]):
    """Converts, normalizes and shifts one sample at a time, as torchvision's transforms do.

    Args:
        shift: maximum of the random shift in pixels; 0 for none.
    """

    def __init__(self, images: Images, labels: Images, *, shift: int = 0) -> None:
        self._images, self._labels, self._shift = torch.from_numpy(images.copy()), labels.tolist(), shift

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return (1, 28, 28) float32 of zero mean and unit variance, and its class."""
        image = (self._images[index].unsqueeze(0).to(torch.float32).div(255) - MEAN) / STD
        if self._shift:
            top, left = random.randint(0, 2 * self._shift), random.randint(0, 2 * self._shift)
            image = functional.pad(image, (self._shift,) * 4)[:, top : top + SIDE, left : left + SIDE]
        return image, self._labels[index]


def dataloader(dataset: Dataset, model: str, batch: int, shift: int) -> dict[str, Any]:
    """Time the product's network and optimizer in a plain loop: returns ``{"samplesPerSecond": …}``."""
    net = models.plain(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    samples = Samples(dataset.train_images, dataset.train_labels, shift=shift)
    loader = DataLoader(samples, batch_size=batch, shuffle=True)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    started = 0.0
    for step, (images, labels) in enumerate(itertools.islice(endless, _STEPS)):
        if step == _WARM_UP_STEPS:
            started = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    seconds = time.perf_counter() - started
    return {"samplesPerSecond": (_STEPS - _WARM_UP_STEPS) * batch / seconds}


class TutorialNet(nn.Module):
    """The network of PyTorch's distributed tutorial: two convolutions with dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.drop(self.conv2(x)), 2))
        x = functional.dropout(functional.relu(self.fc1(x.flatten(1))), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def tutorial(dataset: Dataset) -> dict[str, Any]:
    """Train with batch 64 and SGD (learning rate .01, momentum .5) until the test accuracy reaches ``_TARGET``.

    Returns:
        seconds of training without evaluations, the number of epochs, and whether the target was reached.
    """
    net = TutorialNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    loader = DataLoader(Samples(dataset.train_images, dataset.train_labels), batch_size=64, shuffle=True)
    seconds = 0.0
    accuracies: list[float] = []
    while len(accuracies) < _MOST_EPOCHS and (not accuracies or accuracies[-1] < _TARGET):
        started = time.perf_counter()
        _train_epoch(net, optimizer, loader)
        seconds += time.perf_counter() - started
        accuracies.append(_accuracy(net, dataset))
    return {"seconds": seconds, "epochs": len(accuracies), "reached": accuracies[-1] >= _TARGET}


def _train_epoch(net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    net.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _accuracy(net: nn.Module, dataset: Dataset) -> float:
    net.eval()
    images, labels = torch.from_numpy(dataset.test_images.copy()), torch.from_numpy(dataset.test_labels.copy())
    right = 0
    for first in range(0, len(labels), 1000):
        logits = net(normalise(images[first : first + 1000], torch.float32).unsqueeze(1))
        right += int((logits.argmax(1) == labels[first : first + 1000]).sum())
    return right / len(labels)


class ExampleNet(nn.Module):
    """The network of pytorch/examples, mnist/main.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


def example(dataset: Dataset) -> dict[str, Any]:
    """Train one epoch with the settings of pytorch/examples, mnist/main.py, and evaluate.

    Batch 64, Adadelta with learning rate 1, which changes only after the epoch.

    Returns:
        the accuracy on the test set.
    """
    net = ExampleNet()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    loader = DataLoader(Samples(dataset.train_images, dataset.train_labels), batch_size=64, shuffle=True)
    _train_epoch(net, optimizer, loader)
    return {"accuracy": _accuracy(net, dataset)}


def main() -> None:
    name, data, directory, threads, *more = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    dataset = load(data, directory)
    if name == "dataloader":
        model, batch, shift = more
        found = dataloader(dataset, model, int(batch), int(shift))
    else:
        found = {"tutorial": tutorial, "example": example}[name](dataset)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

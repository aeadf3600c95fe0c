"""The loop of PyTorch's distributed tutorial, with which ``tests.benchmarks.mnist`` compares, on the same data.

It prints its result as JSON. It is faster than in practice, because it neither decodes with PIL nor starts worker
processes.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ddptrain.data.batches import MEAN, STD, normalise
from ddptrain.data.mnist import Dataset, Images, load

_TARGET = 0.98  # accuracy
_MOST_EPOCHS = 12


class Samples(TorchDataset[tuple[torch.Tensor, int]]):
    """Converts and normalizes one sample at a time, as torchvision's transforms do."""

    def __init__(self, images: Images, labels: Images) -> None:
        self._images, self._labels = torch.from_numpy(images.copy()), labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return (1, 28, 28) float32 of zero mean and unit variance, and its class."""
        image = (self._images[index].unsqueeze(0).to(torch.float32).div(255) - MEAN) / STD
        return image, self._labels[index]


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.mnist_loops", description=__doc__)
    parser.add_argument("data", help="mnist, digits or idx")
    parser.add_argument("directory", help="of the four files; empty for digits")
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(json.dumps(tutorial(load(options.data, options.directory))))


if __name__ == "__main__":
    main()

"""What a checkpoint's model gets wrong on the test set: the confusion matrix, and the worst misses as images."""

import base64
import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddprun.checkpoint_files import Saved
from ddptrain.config import Config
from ddptrain.inference.trained_model import as_trained, data_of, model_of, one_process
from ddptrain.training.evaluate import probabilities

CLASSES = 10


@dataclass(frozen=True)
class Miss:
    """A sample of the test set whose predicted class is wrong, with the probabilities that the model gave.

    Attributes:
        image: a data URI.
    """

    index: int
    label: int
    predicted: int
    probability: float
    probability_of_label: float
    image: str


@dataclass(frozen=True)
class Mistakes:
    """``confusion[label][predicted]`` counts samples; ``worst`` are the misses with the highest loss, worst first."""

    confusion: list[list[int]]
    worst: list[Miss]

    @property
    def samples(self) -> int:
        return sum(map(sum, self.confusion))

    @property
    def largest_miss(self) -> int:
        """The largest count beside the diagonal."""
        return max(count for label, row in enumerate(self.confusion) for i, count in enumerate(row) if i != label)

    @property
    def missed(self) -> int:
        return self.samples - sum(row[digit] for digit, row in enumerate(self.confusion))


def find_mistakes(config: Config, saved: Saved, content: bytes, most: int) -> Mistakes:
    """Return the mistakes of a checkpoint, with at most ``most`` images.

    Raises:
        DataError, Mismatch, UsageError: the test set is absent, or not the one of the training.
    """
    config = as_trained(config, saved.manifest)
    dataset = data_of(config, saved.manifest)
    group = one_process(config)
    model = model_of(config, content, group.device, str(saved.path))
    found = probabilities(model, dataset.test_images, group).numpy()
    return mistakes_of(found, dataset.test_labels, dataset.test_images, most)


def mistakes_of(
    probabilities: npt.NDArray[np.float64], labels: npt.NDArray[np.uint8], images: npt.NDArray[np.uint8], most: int
) -> Mistakes:
    """Return the mistakes, given the probability of each class (N, 10), the labels (N,) and the images (N, 28, 28)."""
    predicted = probabilities.argmax(1)
    confusion = np.zeros((CLASSES, CLASSES), np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    of_label = probabilities[np.arange(len(labels)), labels]
    missed = np.flatnonzero(predicted != labels)
    worst = missed[np.argsort(of_label[missed], kind="stable")][:most]
    misses = []
    for index in worst.tolist():
        image = "data:image/png;base64," + base64.b64encode(grey_png(images[index])).decode()
        certainty = float(probabilities[index].max()), float(of_label[index])
        misses.append(Miss(index, int(labels[index]), int(predicted[index]), *certainty, image))
    return Mistakes(confusion.tolist(), misses)


def grey_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a (height, width) image as PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()

"""Writes the small inputs of the programs into a folder: images, a language model with random weights, and text.

Runs in the environment of the programs, without this project. Nothing is downloaded.
"""

import json
import random
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [
    *("a", "the", "cat", "dog", "bird", "sees", "finds", "leaves"),
    *("big", "small", "red", "house", "tree", "river", "and", "but"),
]


def main(folder: Path) -> None:
    """Write all of them."""
    for name, train in (("MNIST", 60_000), ("FashionMNIST", 2_000)):
        _idx(folder / "data" / name / "raw", "train", train)
        _idx(folder / "data" / name / "raw", "t10k", 10_000 if name == "MNIST" else 200)
    for split, count in (("train", 640), ("val", 16)):
        _images(folder / "images" / split, count)
    _text(folder / "Salesforce" / "wikitext")
    _model(folder / "HuggingFaceTB" / "SmolLM-360M")


def _idx(folder: Path, split: str, count: int) -> None:
    """Write images and labels in MNIST's format."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(count)
    labels = numbers.integers(0, 10, count, dtype=np.uint8)
    images = numbers.integers(0, 128, (count, 28, 28), dtype=np.uint8)
    images[np.arange(count), labels * 2] += 127  # a bright line, whose height is the label
    (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, count, 28, 28) + images.tobytes())
    (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels.tobytes())


def _images(folder: Path, count: int) -> None:
    """Write PNG files, one folder for each class."""
    numbers = np.random.default_rng(count)
    for number in range(count):
        path = folder / f"class-{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)


def _text(folder: Path) -> None:
    """Write a data set of lines, which `datasets` loads by its name from the working directory."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, files = random.Random(1), []
    for split, count in (("train", 600), ("validation", 64)):
        lines = (json.dumps({"text": " ".join(numbers.choices(WORDS, k=20))}) for _ in range(count))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        files += [f"      - split: {split}", f"        path: {split}.jsonl"]
    head = ["---", "configs:", "  - config_name: wikitext-2-v1", "    data_files:", *files, "---", ""]
    (folder / "README.md").write_text("\n".join(head))


def _model(folder: Path) -> None:
    """Write a Llama of two small layers and a tokenizer of whole words."""
    words = {word: number for number, word in enumerate(["<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>", model_max_length=64
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=128, eos_token_id=1, pad_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The images that a cluster's nodes begin with, imported and unpacked once for all nodes and for later clusters.

Importing the trainer's image takes half a minute of CPU time on each node. The store is a folder of containerd, filled
by a container of the node image. Each node gets a copy of hard links: containerd never changes the files of an image
that it has unpacked. Only for the node image that is built here, and the engine that runs as root.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.kind.cache import cache_dir, digest, locked, scratch_folder
from tests.kind.command import run, step
from tests.kind.docker import Engine, docker


def filled(engine: Engine, node_image: str, images: Mapping[str, str]) -> Path:
    """Return a store with the node image's archives and ``images`` (tag to id), filled unless the cache has it."""
    stores = cache_dir() / "containerd"
    stores.mkdir(exist_ok=True)
    store = stores / digest(node_image, *(part for pair in sorted(images.items()) for part in pair))
    with locked("node-store"):
        if not store.exists():
            for old in stores.iterdir():  # two gigabytes each; nodes keep their hard links
                shutil.rmtree(old)
            with step("importing the images for the nodes"), scratch_folder() as scratch:
                _fill(engine, node_image, images, scratch).rename(store)
    return store


def copy(store: Path, target: Path) -> None:
    """Make a copy of a store for one node. The databases, which containerd changes, are copied in full."""
    run(["cp", "--archive", "--link", store, target], timeout=300)
    for database in target.rglob("*.db"):
        own = database.with_suffix(".own")
        shutil.copy2(database, own)
        own.replace(database)


def note_of(tag: str) -> str:
    """Return the name of the file in a store that has the id of the image which was imported under this tag."""
    return f"loaded-{digest(tag)}"


def _fill(engine: Engine, node_image: str, images: Mapping[str, str], scratch: Path) -> Path:
    archive, store = scratch / "images.tar", scratch / "store"
    docker("save", "--output", archive, *images, engine=engine, timeout=600)
    store.mkdir()
    mounts = ["--volume", f"{store}:/var/lib/containerd", "--volume", f"{archive}:/images.tar:ro"]
    command = ["--entrypoint", "/usr/local/bin/fill-image-store", node_image]
    docker("run", "--rm", "--privileged", "--network", "none", *mounts, *command, engine=engine, timeout=600)
    for tag, image in images.items():
        (store / note_of(tag)).write_text(image)
    return store

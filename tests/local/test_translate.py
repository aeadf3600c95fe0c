"""Names and mount paths of a cluster become those of one machine; nothing else changes."""

from __future__ import annotations

import pytest

from ddpjob.local.translate import Translator

PATHS = {
    "/checkpoints": "/host/claim",
    "/checkpoints/data/": "/host/data",
    "/dev/termination-log": "/host/log",
    "/": "/x",
}


def translator(paths: dict[str, str] = PATHS) -> Translator:
    return Translator(service="mnist-0a1b2", namespace="team", domain="cluster.local", paths=paths)


@pytest.mark.parametrize(
    "name",
    [
        "mnist-0a1b2-1-0.mnist-0a1b2",
        "mnist-0a1b2-1-0.mnist-0a1b2.team",
        "mnist-0a1b2-1-0.mnist-0a1b2.team.svc",
        "mnist-0a1b2-1-0.mnist-0a1b2.team.svc.cluster.local",
        "mnist-0a1b2-1-0.mnist-0a1b2.team.svc.cluster.local.",
    ],
)
def test_dns_names_of_peers_become_loopback(name: str) -> None:
    assert translator().text(name) == "127.0.0.1"
    assert translator().text(f"--rdzv-endpoint={name}:21000") == "--rdzv-endpoint=127.0.0.1:21000"
    assert translator().text(f"tcp://{name}:21000,x") == "tcp://127.0.0.1:21000,x"


@pytest.mark.parametrize(
    "text",
    [
        "mnist-0a1b2-1-0",  # an identity, not an address
        "mnist-0a1b2",
        "other-mnist-0a1b2-1-0.mnist-0a1b2",
        "mnist-0a1b2-1-0.mnist-0a1b2-2",
        "mnist-0a1b2-1-0.mnist-0a1b2.example.org",
        "29500",
        "/mnt/checkpoints",
        "./checkpoints",
        "~/checkpoints",
        "${HOME}/checkpoints",
        "$(pwd)/checkpoints",
        "/checkpoints.old",
        "s3://bucket/checkpoints",
        "s3://checkpoints/x",
        "/",
        "a / b",
    ],
)
def test_text_that_only_resembles_names_ports_or_paths_is_unchanged(text: str) -> None:
    assert translator().text(text) == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/checkpoints", "/host/claim"),
        ("/checkpoints/", "/host/claim/"),
        ("/checkpoints/run/step.pt", "/host/claim/run/step.pt"),
        ("--dir=/checkpoints", "--dir=/host/claim"),
        ("--data-dir=/checkpoints/data/mnist", "--data-dir=/host/data/mnist"),
        ("/checkpoints/database", "/host/claim/database"),
        ("/a:/checkpoints:/b", "/a:/host/claim:/b"),
        ("file:///checkpoints/x", "file:///host/claim/x"),
        ("ls '/checkpoints'; echo hi >/dev/termination-log", "ls '/host/claim'; echo hi >/host/log"),
    ],
)
def test_mount_paths_are_replaced(given: str, expected: str) -> None:
    assert translator().text(given) == expected


def test_replacements_are_not_translated_again() -> None:
    nested = translator({"/data": "/checkpoints/data", "/checkpoints": "/data/claim"})
    assert nested.text("/data:/checkpoints") == "/checkpoints/data:/data/claim"


def test_pod_without_mounts_and_peers_is_unchanged() -> None:
    assert translator({}).text("sleep /checkpoints 1") == "sleep /checkpoints 1"

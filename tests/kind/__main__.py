"""The command line of the test cluster: `python -m tests.kind COMMAND`. Results go to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import sys

from tests.kind import cluster, docker, dockerd, images, packages, prepare
from tests.kind.command import CommandError
from tests.kind.toolchain import BINARIES, IN_LAYERS, ToolchainError


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (CommandError, ToolchainError, docker.DockerUnavailableError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kind", description="The kind cluster of the tests. See tests/kind/README.md."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ready = commands.add_parser("prepare", help="build or download what tests need; `make test` does it first")
    ready.add_argument("names", nargs="+", metavar="NAME", help=f"all, {', '.join((*prepare.GROUPS, *BINARIES))}")
    ready.add_argument("--json", action="store_true", help="print each result as a line of JSON on stdout")
    ready.set_defaults(run=_prepare)

    both = commands.add_parser("images", help="build the operator's and the trainer's image")
    both.add_argument("--load", metavar="CLUSTER", help="also load them into the workers of this cluster")
    both.set_defaults(run=_images)

    up = commands.add_parser("up", help="create the cluster unless it is healthy, and print its kubeconfig's path")
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="delete the cluster and its shared folder")
    down.set_defaults(run=_down)
    for command in (up, down):
        command.add_argument("--name", default=cluster.DEFAULT_NAME, help="name of the cluster (default: %(default)s)")

    engine = commands.add_parser(
        "docker", help="start a Docker engine unless one answers, and print the shell settings to reach it"
    )
    engine.add_argument(
        "--install", action="store_true", help="install Debian's Docker and debootstrap if they are missing"
    )
    engine.add_argument("--stop", action="store_true", help="stop the engine that was started here, never another one")
    engine.set_defaults(run=_docker)
    return parser


def _prepare(options: argparse.Namespace) -> int:
    names = [*IN_LAYERS, *prepare.GROUPS] if options.names == ["all"] else options.names
    if unknown := [name for name in names if name not in (*BINARIES, *prepare.GROUPS)]:
        raise ValueError(
            f"unknown name: {', '.join(unknown)}. Known names: all, {', '.join((*prepare.GROUPS, *BINARIES))}"
        )
    results = prepare.prepare(names, prepare.print_json if options.json else lambda result: None)
    failures = prepare.failures(results)
    if failures and not options.json:
        raise CommandError(f"not prepared: {failures}")  # the last line, after the progress of all parts
    return 1 if failures else 0


def _images(options: argparse.Namespace) -> int:
    prepare.ensure("docker")
    for tag in images.build_images():
        if options.load:
            _existing(options.load).load_image(tag)
        print(tag)
    return 0


def _existing(name: str) -> cluster.Cluster:
    found = cluster.find(name)
    if found is None:
        raise CommandError(f"there is no healthy cluster {name}. Create it with: python -m tests.kind up --name {name}")
    return found


def _up(options: argparse.Namespace) -> int:
    prepare.ensure(*prepare.CLUSTER)
    print(cluster.up(options.name).kubeconfig)
    return 0


def _down(options: argparse.Namespace) -> int:
    cluster.down(options.name)
    engine = docker.running_engine()
    if engine is not None and engine.started_by_us:
        print(
            "The Docker engine that was started here keeps running. Stop it with: "
            ".venv/bin/python -m tests.kind docker --stop",
            file=sys.stderr,
        )
    return 0


def _docker(options: argparse.Namespace) -> int:
    if options.stop:
        print("stopped" if dockerd.stop() else "no engine was started here")
        return 0
    install = True if options.install else None
    prepare.ensure("docker", install=install)
    engine = docker.ensure_engine(install=install)
    if options.install:
        packages.require("debootstrap", install=True)
    print(*docker.shell_exports(engine), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

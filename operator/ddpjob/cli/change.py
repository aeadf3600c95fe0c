"""``ddpjob suspend``, ``resume`` and ``restart``: the changes of a job that is not finished."""

import typer

from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find


def suspend(
    name: Name,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Stop the pods of a job after they saved a checkpoint; `resume` starts them again.

    \b
    Example:
      ddpjob suspend mnist-cpu
    """
    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    with client:
        client.suspend(name)
    typer.echo(f"{name} suspended ({client.place})")
    return 0


def resume(
    name: Name,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Start a suspended job again, on this machine in the background. This is not a restart.

    \b
    Example:
      ddpjob resume mnist-cpu
    """
    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    with client:
        client.resume(name)
    typer.echo(f"{name} resumed ({client.place})")
    return 0


def restart(
    name: Name,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Restart all pods of a job after they saved a checkpoint. This restart does not count towards the limit.

    \b
    Example:
      ddpjob restart mnist-cpu
    """
    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    with client:
        client.restart(name)
    typer.echo(f"{name} restarted ({client.place})")
    return 0

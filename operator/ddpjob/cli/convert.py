"""``ddpjob convert``: prints the DDPJob for a PyTorchJob or TrainJob of Kubeflow."""

import sys
from typing import Annotated

from typer import Argument

from ddpjob.cli.text import number_of, one_line
from ddpjob.errors import InvalidJobError


def convert(
    file: Annotated[
        str, Argument(metavar="FILE", help="YAML file with one PyTorchJob or TrainJob, or - for standard input.")
    ],
) -> int:
    """Print the DDPJob for a PyTorchJob (kubeflow.org/v1) or a TrainJob (trainer.kubeflow.org/v1alpha1).

    What does not carry over is listed on standard error: the field, why, and what to do. The runtime of a TrainJob may
    be in the same file.

    \b
    Example:
      ddpjob convert tests/convert/jobs/pytorchjob-torchrun.yaml
    """
    from ddpjob.client.jobfile import documents_of, dump_yaml, read_text
    from ddpjob.client.validation import validate
    from ddpjob.convert.conversion import convert as conversion

    try:
        converted = conversion(documents_of(read_text(file)))
        text = dump_yaml(converted.job)
        problems = validate(file, text).problems
        if wrong := [one for one in problems if one.severity == "error"]:
            raise InvalidJobError(
                f"the DDPJob would be wrong: {'; '.join(f'{one.field}: {one.message}' for one in wrong)}",
                "a DDPJob has other limits, see docs/reference/fields.md",
                "correct the field in the source",
            )
    except InvalidJobError as error:
        label = "standard input" if file == "-" else file
        raise InvalidJobError(f"{label}: {error.error}", error.hint, error.next_step) from error
    print(text, end="", flush=True)
    if converted.notes:
        print(f"{number_of(len(converted.notes), 'field')} did not carry over unchanged:", file=sys.stderr)
    for note in converted.notes:
        print(f"- {one_line(note)}", file=sys.stderr)
    for warning in problems:
        print(f"warning: {warning.field}: {one_line(warning.message)}", file=sys.stderr)
    return 0

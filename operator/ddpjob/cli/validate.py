"""``ddpjob validate``: checks files without a cluster, and prints each problem with its line."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from ddpjob.cli.options import Form
from ddpjob.cli.text import number_of, one_line
from ddpjob.errors import InvalidJobError

if TYPE_CHECKING:
    from ddpjob.client.validation import CheckedFile

_INVALID = 1


def validate(
    files: Annotated[list[str], Argument(metavar="FILE", help="YAML files with DDPJobs, or - for standard input.")],
    output: Form = "text",
) -> int:
    """Check DDPJobs in YAML files without a cluster, by the rules of the API server and the operator.

    Each problem is a line: file, line, field and what is wrong. Objects of other kinds are not checked. The JSON has
    the schema docs/reference/schemas/validate.json.

    \b
    Exit codes:
      0  every file has valid DDPJobs only; there may be warnings
      1  a file has an error, or no DDPJob

    \b
    Example:
      ddpjob validate manifests/examples/mnist-cpu.yaml
    """
    from ddpjob.client.validation import Validation

    checked = [_checked(file) for file in files]
    errors = sum(problem.severity == "error" for file in checked for problem in file.problems)
    if output == "json":
        print(json.dumps(Validation(valid=not errors, files=checked).wire(), indent=2))
    else:
        for file in checked:
            print("\n".join(map(one_line, _lines(file))))
    return _INVALID if errors else 0


def _checked(file: str) -> "CheckedFile":
    from ddpjob.client.jobfile import read_text
    from ddpjob.client.validation import refused, validate

    try:
        return validate(file, read_text(file))
    except InvalidJobError as error:
        return refused(file, error)


def _lines(file: "CheckedFile") -> Iterator[str]:
    for problem in file.problems:
        place = file.file if problem.line is None else f"{file.file}:{problem.line}"
        field = f"{problem.field}: " if problem.field else ""
        hint = f" ({problem.hint})" if problem.hint else ""
        yield f"{place}: {problem.severity}: {field}{problem.message}{hint}"
    errors = sum(problem.severity == "error" for problem in file.problems)
    found = number_of(len(file.jobs), "DDPJob")
    yield f"{file.file}: {found}, {number_of(errors, 'error') if errors else 'valid'}"

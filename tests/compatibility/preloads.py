"""Whether ``ddprun --preload`` judges real libraries as their forks behave.

The table is in docs/reference/ddprun-and-torchrun.md.

    python -m tests.compatibility.preloads --write

It installs the packages of tests/compatibility/requirements.txt. For each library it looks at the first line of
``ddprun --preload LIBRARY --nproc-per-node 2``, then imports torch and the library in a process of its own, forks two
ranks from it without any check, and looks whether these meet, compute on two threads and with the library, and end.
Exit code 1: ranks are forked by ``ddprun`` where such forks fail.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.report import describe_machine, write_section
from tests.compatibility import prepare
from tests.compatibility.prepare import Prepared
from tests.processes import free_port, spawn

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ddprun-and-torchrun.md"
SECTION = "preloads"
LIBRARIES = {
    "numpy": "numpy.ones((600, 600)) @ numpy.ones((600, 600))",
    "scipy.linalg": "scipy.linalg.svd(torch.rand(200, 200).numpy())",
    "pandas": "pandas.DataFrame({'a': range(10**5), 'b': 1}).groupby('a').sum()",
    "pyarrow": "pyarrow.table({'a': range(10**5)}).sort_by('a')",
    "PIL.Image": "PIL.Image.new('RGB', (500, 500)).resize((200, 200))",
    "cv2": "cv2.GaussianBlur(torch.ones(1000, 1000).numpy(), (9, 9), 3)",
    "polars": "polars.DataFrame({'a': range(10**5)}).group_by('a').len()",
    "jax.numpy": "(jax.numpy.ones((500, 500)) @ jax.numpy.ones((500, 500))).block_until_ready()",
    "sklearn.cluster": "sklearn.cluster.KMeans(3).fit(torch.rand(20000, 10).numpy())",
    "torchvision": "torchvision.models.resnet18()(torch.ones(4, 3, 64, 64)).sum().backward()",
    "transformers": "transformers.GPT2Model(transformers.GPT2Config(n_embd=48, n_layer=1))(torch.ones(4, 9).long())",
    "accelerate": "accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(9, 9))(torch.ones(9, 9)).sum().backward()",
    "datasets": "datasets.Dataset.from_dict({'a': range(1000)}).map(lambda row: {'b': row['a']}, num_proc=2)",
    "lightning": "lightning.Fabric(accelerator='cpu', devices=1, strategy='auto').setup(torch.nn.Linear(9, 9))",
    "trl": "trl.SFTConfig('out', use_cpu=True, bf16=False)",
}
"""Modules as users name them, and work with each on more than one thread, as far as the library has such work."""
_RANK = """
import torch, torch.distributed as dist
torch.set_num_threads(2)
dist.init_process_group("gloo")
total = torch.ones(2**18)
dist.all_reduce(total)
assert total.sum() == 2**19
for _ in range(3):
    (torch.ones(2**20).add_(1.0).sum() + (torch.ones(512, 512) @ torch.ones(512, 512)).sum()).item()
model = torch.nn.Linear(512, 512)
model(torch.ones(512, 512)).sum().backward()
dist.barrier()
import {library}
{work}
dist.barrier()
dist.destroy_process_group()
print("the rank has ended", flush=True)
"""
# As the launcher forks, but whatever the import has done.
_FORKS = """
import os, sys, torch
import {library}
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}}
        exec(open({script!r}).read())
        sys.stdout.flush()
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in ranks))
"""
_SPAWNS = "each rank starts in an interpreter of its own: "


@dataclass(frozen=True)
class Verdict:
    """What became of one library.

    Attributes:
        refused: why ``ddprun`` does not fork; empty if it does.
        ran: the ranks that it started in either way have ended well.
        forks: what two unchecked forks did: "work", "hang" or the error.
    """

    refused: str
    ran: bool
    forks: str

    @property
    def is_safe(self) -> bool:
        """Whether ranks are forked only if forks work, and the ranks ran."""
        return self.ran and (bool(self.refused) or self.forks == "work")


def verdict(library: str, prepared: Prepared, limit: float) -> Verdict:
    """Try one library."""
    with tempfile.TemporaryDirectory(prefix="preloads-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(_RANK.format(library=library, work=LIBRARIES[library]))
        flags = ("-m", "ddprun", "--preload", library, "--nproc-per-node", "2", str(script))
        code, output = _run(prepared, flags, folder, limit)
        reasons = [line.removeprefix(_SPAWNS) for line in output.splitlines() if line.startswith(_SPAWNS)]
        refused = reasons[0] if reasons else "" if code == 0 else f"exit code {code}: {_error(output)}"
        forks = folder / "forks.py"
        forks.write_text(_FORKS.format(library=library, port=free_port(), script=str(script)))
        forked, said = _run(prepared, (str(forks),), folder, limit)
        how = "hang" if forked is None else "work" if forked == 0 else _error(said)
        ran = code == 0 and output.count("the rank has ended") == 2
        return Verdict(refused, ran, how)


def _run(prepared: Prepared, words: Sequence[str], folder: Path, limit: float) -> tuple[int | None, str]:
    """Return the exit code, None if the program did not end, and the output."""
    log = folder / "output.log"
    log.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DDP", "PET_"))}
    env |= {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "DDPJOB_TERMINATION_LOG": str(folder / "end")}
    limited = ("timeout", "--signal=KILL", str(limit))  # which ends its process group
    code = spawn(["env", "-C", folder, *limited, prepared.python, *words], log, env).wait()
    return (None if code in (-9, 137) else code), log.read_text()


def _error(output: str) -> str:
    """Return the last error that Python has printed."""
    lines = [line for line in output.splitlines() if re.match(r"(\[\w+\] )?[\w.]*(Error|Exception)\b", line)]
    return lines[-1] if lines else "no error is shown"


def table(verdicts: Mapping[str, Verdict]) -> str:
    """Return the verdicts as a Markdown table."""
    lines = [
        "| `--preload` | the ranks | two forks without the checks |",
        "|---|---|---|",
    ]
    for library, found in verdicts.items():
        how = f"interpreters of their own: {found.refused}" if found.refused else "forked"
        how += "" if found.ran else "; **they fail**"
        lines.append(f"| `{library}` | {how} | {found.forks} |")
    return "\n".join(lines)


def main() -> int:
    """Try the libraries, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility.preloads", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cache", type=Path, default=prepare.CACHE, help="where it is prepared (default: %(default)s)")
    parser.add_argument("--only", choices=LIBRARIES, nargs="*", default=list(LIBRARIES))
    parser.add_argument("--limit", type=float, default=120, metavar="S", help="seconds for one run")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    prepared, verdicts = prepare.packages(options.cache), dict[str, Verdict]()
    for library in options.only:
        verdicts[library] = found = verdict(library, prepared, options.limit)
        print(f"{library}: {found}", file=sys.stderr, flush=True)
    shown = table(verdicts)
    print(shown)
    if options.write:
        write_section(SECTION, f"{shown}\n\nOn {describe_machine(kubernetes=False)}.", PAGE)
    return 0 if all(found.is_safe for found in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

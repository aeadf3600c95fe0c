"""The command line: ``ddpjob run`` on this machine, and what looks at jobs or changes them, here or on a cluster.

    main ─▶ run ─▶ prepare (client.jobfile) ─▶ local.session
         │         card ─▶ output, live               while the job runs
         │         summary ─▶ output, live            when it has ended
         ├▶ get (card), describe, why, logs, wait, change, delete ─▶ place ─▶ client (the Python API)
         ├▶ plot ─▶ training ─▶ client, ddpplot
         └▶ init, validate, render, convert          files alone: client.validation, convert

``main`` imports little, so that ``--help`` and usage errors answer at once; only ``run`` imports the operator. Text
from a job, a log or a status passes through ``clean`` (``api/text.py``) before it is printed.
"""

import atexit
import gc
import signal

# Of 700. Imports make few cycles that could be freed, and the search for them is a tenth of the start of a command.
gc.set_threshold(50_000)
# At its end Python searches all objects for cycles, which takes 50 ms; the end of the process frees them anyway.
atexit.register(gc.freeze)


def start() -> int:
    """Run the command line of this process. Ctrl-C ends it also while ``main`` is imported, which takes 0.2 s."""
    try:
        from ddpjob.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

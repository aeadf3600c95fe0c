"""The command line: ``ddpjob run`` on this machine, and ``get``, ``logs`` and ``delete`` on what it left.

    main ─▶ run ─▶ prepare (jobfile) ─▶ local.session
         │         snapshot ─▶ output, live           while the job runs
         │         summary (curve) ─▶ output, live    when it has ended
         └▶ get, logs, delete                         read the state folder

``main`` imports little, so that ``--help`` and usage errors answer at once; only ``run`` imports the operator. Text
from a job, a log or a status passes through ``text.sanitize`` before it is printed.
"""

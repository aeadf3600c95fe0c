"""The command line: ``ddpjob run`` on this machine, and ``get``, ``logs`` and ``delete`` on what it left.

    main ─▶ run ─▶ execute ─▶ local.session        prepare: jobfile, assign, data: from words to one DDPJob
         ├▶ get                                    facts ─▶ live | plain | ndjson: what is shown while it runs
         ├▶ logs                                   ending, curve: what is shown when it is over
         └▶ delete

``main`` and the signatures of the verbs import little, so that ``--help`` and mistakes answer at once; ``execute``
brings the operator. Whatever a job, a log or a status says goes through ``printable`` before a terminal sees it.
"""

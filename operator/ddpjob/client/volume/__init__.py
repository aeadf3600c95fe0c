"""What the volume of a job holds, and copying it here: ``checkpoints`` and ``pull``.

    reader      the program that lists and sends files; it runs in a pod, or here for a job of this machine
    contents    its output: what the volume holds, and which files are wanted
    receive     copies of them here: resumed, checked, renamed
    reader_pod  the pod that reads a volume of a cluster; pod_exec runs the program in it

A connection that was cut is ``CutError`` everywhere; what has arrived until then is kept.
"""

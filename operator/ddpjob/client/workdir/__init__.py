"""``submit(…, workdir=DIR)``: the files of a directory in the pods of a job, without an image of their own."""

"""Start and supervise the ranks of one node, detect hangs, and report failures."""

"""What a training reports: metrics, progress, console lines, and the termination report."""

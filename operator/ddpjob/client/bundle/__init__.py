"""Bundles: one zip about a job that may be given away. Pure but for the file that is written.

Snapshot ─▶ redaction ─▶ archive
"""

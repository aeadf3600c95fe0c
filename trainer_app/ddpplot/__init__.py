"""Curves of a training: from the rows of its metrics to a picture, a text for a terminal and a page.

``recorded`` reads a directory, with the reader of ``ddprun``; everything else is pure. ``ddpjob plot``, ``ddpjob
report`` and the end of ``ddpjob run`` draw with it. No torch, no Kubernetes.
"""

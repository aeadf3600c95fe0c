"""The verb ``report``: one HTML page about a training, without scripts and without requests to a network."""

"""The ranks of one training: their topology, rendezvous, process group, devices and collectives."""

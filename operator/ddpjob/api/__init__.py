"""The DDPJob resource: models of spec and status, the CRD, names, exit codes. The other packages build on it."""

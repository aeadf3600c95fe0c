"""The resource itself: spec and status models, the CRD, and every name the project gives to anything."""

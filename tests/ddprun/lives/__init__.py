"""Random schedules of the agreement on restarts in place, on virtual time."""

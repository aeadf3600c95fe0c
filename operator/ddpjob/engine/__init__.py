"""Pure functions from the observed state of a job to a plan. They use no clock and no network: time is an argument."""

"""The page of `ddpjob report` in a real browser."""

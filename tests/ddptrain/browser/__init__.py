"""The page of `ddptrain report` in a real browser."""

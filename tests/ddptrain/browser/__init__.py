"""The pictures of the documentation, by a real browser."""

"""Text that fits into a field of an API object."""


def clean(text: object) -> str:
    """Return ``text`` as valid Unicode: each lone surrogate, which ``json.loads`` accepts, becomes "?"."""
    return str(text).encode("utf-8", "replace").decode()


def shorten(text: str, limit: int) -> str:
    """Return ``text`` cut in the middle to at most ``limit`` characters; most of what is kept is its end.

    The beginning names the source and the end of a log usually holds the error.
    """
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} … {text[-(limit - head - 3) :]}"

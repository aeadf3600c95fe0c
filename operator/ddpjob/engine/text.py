"""Words of other programs, made fit for a status: valid Unicode, and short without losing the end."""


def clean(text: object) -> str:
    """Text that any JSON writer accepts; a lone surrogate, which ``json.loads`` lets through, becomes "?"."""
    return str(text).encode("utf-8", "replace").decode()


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters: the head says who speaks, the tail of a log says what went wrong."""
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} … {text[-(limit - head - 3) :]}"

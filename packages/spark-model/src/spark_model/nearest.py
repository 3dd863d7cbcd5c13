"""Names that somebody may have meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """At most `count` of `known` that look like `name`, the nearest first."""
    folded = {entry.lower(): entry for entry in known}
    return [folded[match] for match in difflib.get_close_matches(name.lower(), folded, count, cutoff=0.55)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean a, b?" with the space in front, or nothing."""
    matches = nearest(name, known)
    return f" Did you mean {', '.join(matches)}?" if matches else ""

"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through and cuts it before the stop string that is completed first.

    Text that may be the beginning of a stop string is held back. Where the text is cut into pieces makes no difference.
    Of stop strings that end at the same character the longest wins, so that no part of it is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop that the end of the text matches
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that may be shown now and the stop string that was completed, if one was."""
        if not self._stops:
            return text, None
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            stop = self._advance(pending[end])
            if stop is not None:
                self._held = ""
                return pending[: end + 1 - len(stop)], stop
        cut = len(pending) - max(self._matched)
        self._held = pending[cut:]
        return pending[:cut], None

    def finish(self) -> str:
        """The text that was held back; nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """One step of Knuth-Morris-Pratt for every stop string; the longest that ends here, or None."""
        longest: str | None = None
        for index, stop in enumerate(self._stops):
            failure = self._failures[index]
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                if longest is None or len(stop) > len(longest):
                    longest = stop
                matched = failure[matched - 1]
            self._matched[index] = matched
        return longest


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix of `stop` too."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table

"""Report of a section: one JSON line per fact, written at once.

The lines of a killed section stay.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

#: A rule that must hold. A broken rule fails the whole check.
MUST = "must"
#: A measured number, without effect on the verdict.
FIGURE = "figure"
#: The measured number that stands for its section in the summary.
HEADLINE = "headline"
#: A text, such as a version.
NOTE = "note"
#: A part of a section that did not run, and why.
SKIP = "skip"


class Report:
    """Writer of lines with the fields section, kind, what, ok, value, unit and detail.

    A field without meaning for a kind is null.
    """

    def __init__(self, section: str, stream: TextIO) -> None:
        self._section = section
        self._stream = stream

    def must(self, what: str, ok: bool, detail: str = "") -> None:
        """Report whether the rule `what` held; a section continues after a broken rule."""
        self._write(MUST, what, ok=bool(ok), detail=detail)

    def figure(
        self, what: str, value: float, unit: str, detail: str = "", *, headline: bool = False
    ) -> None:
        """Report a measured number in `unit`, such as "GB/s".

        Args:
            headline: the number stands for this section in the summary.
        """
        kind = HEADLINE if headline else FIGURE
        self._write(kind, what, value=float(value), unit=unit, detail=detail)

    def note(self, what: str, text: str) -> None:
        self._write(NOTE, what, detail=text)

    def skip(self, what: str, why: str) -> None:
        """Report that this part of the section did not run."""
        self._write(SKIP, what, detail=why)

    def add(self, line: dict[str, Any]) -> None:
        """Report a line of another process as one of this section."""
        self._stream.write(json.dumps({**line, "section": self._section}) + "\n")
        self._stream.flush()

    def _write(self, kind: str, what: str, **fields: Any) -> None:
        line = {"section": "", "kind": kind, "what": what, "ok": None, "value": None}
        self.add({**line, "unit": None, "detail": "", **fields})

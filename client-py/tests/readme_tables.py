"""The tables of options in the README.

    python client-py/tests/readme_tables.py

writes them anew, from the words of the options.
"""

from __future__ import annotations

import re
from pathlib import Path

import moored
from moored._options import words_of

README = Path(__file__).parent.parent / "README.md"
TABLES: dict[str, tuple[type, type | None]] = {
    "pictures": (moored.ImageOptions, None),
    "films": (moored.VideoOptions, moored.ImageOptions),
    "sound": (moored.AudioOptions, moored.GenerateOptions),
    "sessions": (moored.SessionOptions, moored.JobOptions),
}
"""By what a table is of: the options, and those that another table has."""


def with_tables(text: str) -> str:
    """The README with the tables as they are to be."""
    for kind, (options, without) in TABLES.items():
        known = words_of(without) if without else {}
        rows = [
            f"| `{option}` | {words} |"
            for option, words in words_of(options).items()
            if option not in known
        ]
        table = "\n".join(["| option | |", "|---|---|", *rows])
        begin, end = f"<!-- options of {kind} -->\n", "\n<!-- end -->"
        text = re.sub(
            f"({re.escape(begin)}).*?({end})",
            lambda found, table=table: found[1] + table + found[2],
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text("utf-8")), "utf-8")

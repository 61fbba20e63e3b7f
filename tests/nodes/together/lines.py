"""What the two sides and the test speak: a JSON object a line."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Engines print: what is said goes to the real standard output, everything else to standard error.
_out = sys.stdout
sys.stdout = sys.stderr
_speaking = threading.Lock()


def say(**words: Any) -> None:
    """Says something to the test."""
    with _speaking:
        _out.write(json.dumps(words) + "\n")
        _out.flush()


def commands() -> Iterator[dict[str, Any]]:
    """What the test asks for; ends when the test leaves."""
    for line in sys.stdin:
        yield json.loads(line)

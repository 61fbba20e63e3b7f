"""A soak of a few seconds on the real binary: everything that it does, and nothing missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("MOORED_BINARY", ROOT / "target/debug/moored"))


def test_a_short_soak_passes(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    command = [str(ROOT / "scripts/soak"), "--binary", str(BINARY), "--seconds", "15"]
    command += ["--seed", "2", "--clients", "4", "--json", str(rows_file)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["measure"]: row["value"] for row in json.loads(rows_file.read_text())}
    assert rows["simulated card: jobs done"] > 0
    assert rows["simulated card: rests"] >= 1
    assert rows["simulated card: workers killed"] + rows["simulated card: workers stopped"] >= 1

"""A load of a few seconds: what clients are told are limits alone, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from service import BINARY, ROOT


def test_many_clients_get_no_errors_but_those_of_limits(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    command = [str(ROOT / "scripts/load"), "--binary", str(BINARY), "--json", str(rows_file)]
    command += ["--seconds", "20", "--clients", "30", "--seed", "3"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["measure"]: row["value"] for row in json.loads(rows_file.read_text())}
    for made in ("pictures", "films", "tracks", "films read slowly", "pictures of large pictures"):
        assert rows[f"load: {made} done"] > 0, done.stdout
    assert rows["load: streams that their clients left"] > 0
    assert rows["load: errors that are no limits"] == rows["load: what is left behind"] == 0

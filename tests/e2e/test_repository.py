"""What hosts of repositories read: workflow, issue forms, and links between pages."""

from __future__ import annotations

import re
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import yaml

from service import ROOT

GITHUB = ROOT / ".github"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_workflow_runs_every_part_of_the_tests() -> None:
    job = read(GITHUB / "workflows" / "test.yml")["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    parts = re.search(r"^\[ \$\{#parts\[@\]\} -gt 0 \] \|\| parts=\((.*)\)$", script, re.MULTILINE)
    assert parts and " ".join(matrix["parts"]) == parts[1]
    assert job["steps"][-1]["run"] == "scripts/test ${{ matrix.parts }}"
    assert len(matrix["toolchain"]) == 2


def test_the_workflow_finds_the_oldest_rust() -> None:
    step = read(GITHUB / "workflows" / "test.yml")["jobs"]["oldest"]["steps"][-1]["run"]
    command = re.search(r"\$\((.*)\)", step)
    assert command
    output = subprocess.run(
        command[1], shell=True, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert re.fullmatch(r"1\.\d+\n", output.stdout)
    assert f"Rust {output.stdout.strip()} or newer" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


def test_the_forms_ask_for_something() -> None:
    forms = [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert {form.stem for form in forms} == {"bug", "new-model", "question"}
    for form in forms:
        content = read(form)
        assert content["name"] and content["description"], form
        fields = [field for field in content["body"] if field["type"] != "markdown"]
        ids = [field["id"] for field in fields]
        assert len(ids) == len(set(ids)), form
        assert any(field.get("validations", {}).get("required") for field in fields), form


def anchors(text: str) -> set[str]:
    """Where links into a page lead: its headings, as GitHub spells them."""
    found = set()
    for heading in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M
    ):
        kept = [c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LN"]
        found.add("".join(kept).replace(" ", "-"))
    return found


def test_links_between_pages_lead_somewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    pages = [ROOT / name for name in listed.stdout.splitlines()]
    assert len(pages) > 10
    broken = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name) if name else page
            if not path.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
                broken.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    assert not broken, "\n".join(broken)

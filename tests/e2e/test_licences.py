"""Every crate's licence is one that deny.toml allows, and no crate is one that it denies.

`cargo deny check` is the authority. It is not installed where these tests run: this reads the same
deny.toml, and does the part of licences, bans and sources by itself. Advisories are left to it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from service import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # what pytest itself depends on there
    import tomli as tomllib

DENY: dict[str, Any] = tomllib.loads((ROOT / "deny.toml").read_text(encoding="utf-8"))
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def allowed(expression: str, licences: set[str]) -> bool:
    """Whether an SPDX expression has a choice that consists of these licences only."""
    # `/` is how licences were listed before SPDX: a choice.
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take() -> str:
        nonlocal position
        token = peek()
        assert token, f"{expression!r} ends too early"
        position += 1
        return token

    def choice() -> bool:
        result = both()
        while peek() == "OR":
            take()
            result = both() or result
        return result

    def both() -> bool:
        result = single()
        while peek() == "AND":
            take()
            result = single() and result
        return result

    def single() -> bool:
        name = take()
        if name == "(":
            result = choice()
            assert take() == ")", expression
            return result
        if peek() == "WITH":
            name = f"{name} {take()} {take()}"
        return name in licences

    result = choice()
    assert position == len(tokens), f"{expression!r} goes on after its end"
    return result


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT/GPL-2.0", True),
        ("(MIT OR GPL-2.0) AND Zlib", True),
        ("MIT OR GPL-2.0 AND GPL-3.0", True),
        ("(MIT OR GPL-2.0) AND GPL-3.0", False),
        ("Apache-2.0 WITH LLVM-exception", False),
        ("Apache-2.0 WITH LLVM-exception OR MIT", True),
    ],
)
def test_expressions_are_read_as_spdx_has_them(expression: str, verdict: bool) -> None:
    assert allowed(expression, {"MIT", "Zlib"}) is verdict


@pytest.fixture(scope="module")
def crates() -> list[dict[str, Any]]:
    """Everything in Cargo.lock, for all platforms."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    offline = subprocess.run([*command, "--offline"], cwd=ROOT, capture_output=True, check=False)
    if offline.returncode == 0:
        answer = offline.stdout
    else:  # crates of other platforms are not there yet
        answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    packages: list[dict[str, Any]] = json.loads(answer)["packages"]
    return packages


def test_every_licence_is_allowed(crates: list[dict[str, Any]]) -> None:
    general = set(DENY["licenses"]["allow"])
    special = {one["crate"]: set(one["allow"]) for one in DENY["licenses"]["exceptions"]}
    assert len(crates) > 100
    refused = {
        f"{crate['name']} {crate['version']}": crate["license"]
        for crate in crates
        if not crate["license"]
        or not allowed(crate["license"], general | special.get(crate["name"], set()))
    }
    assert refused == {}


def test_no_exception_is_left_over(crates: list[dict[str, Any]]) -> None:
    general = set(DENY["licenses"]["allow"])
    for exception in DENY["licenses"]["exceptions"]:
        licences = [crate["license"] for crate in crates if crate["name"] == exception["crate"]]
        assert any(not allowed(licence, general) for licence in licences), exception


def test_no_denied_crate_and_no_other_source(crates: list[dict[str, Any]]) -> None:
    names = {crate["name"] for crate in crates}
    assert not names & {one["crate"] for one in DENY["bans"]["deny"]}
    assert {crate["source"] for crate in crates} <= {None, CRATES_IO}


def test_our_own_crates_are_under_the_licence_of_the_repository(
    crates: list[dict[str, Any]],
) -> None:
    own = {crate["name"]: crate["license"] for crate in crates if crate["source"] is None}
    assert "moored" in own
    assert set(own.values()) == {"Apache-2.0"}
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "the moored authors" in text

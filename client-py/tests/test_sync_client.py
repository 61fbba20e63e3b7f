"""The sync modules are made of the async ones, and the lint tells when they are not."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/sync_client"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="this is no checkout")

ASYNC = '''\
from ._async_streams import AsyncStream


class _AsyncThing:
    """Enter it by `async with`, or by `async with await`: an AsyncThing. One task reads."""

    async def __aenter__(self, many: dict[str, Awaitable[tuple[int, int]]]) -> AsyncSelf:
        # Not `await self.one()`.
        async for each in self:
            print(f"AsyncThing({await each})", (await each).one, await each + 1)
        first = (
            await self.one(many)
        ).first
        return (await self.one() or first).last

    aclose = close
'''

SYNC = '''\
from ._streams import Stream


class _Thing:
    """Enter it by `with`, or by `with`: an Thing. One thread reads."""

    def __enter__(self, many: dict[str, tuple[int, int]]) -> Self:
        # Not `self.one()`.
        for each in self:
            print(f"Thing({each})", each.one, each + 1)
        first = self.one(many).first
        return (self.one() or first).last

'''


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("sync_client", str(SCRIPT))
    spec = importlib.util.spec_from_loader("sync_client", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_what_is_left_out_and_what_is_renamed(script: Any) -> None:
    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if line]

    assert lines(script.of_threads(ASYNC, set())) == lines(SYNC)


def test_an_async_module_may_not_wait_by_asyncio_itself(script: Any) -> None:
    with pytest.raises(SystemExit, match="asyncio in line 2: use _async_calls"):
        script.of_threads("async def one():\n    await asyncio.sleep(1)\n", set())


@pytest.fixture
def package(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the async modules, and no ruff: scripts/test has it, others need not."""
    for part in script.PARTS:
        shutil.copy(script.PACKAGE / f"_async_{part}.py", tmp_path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PACKAGE", tmp_path)
    monkeypatch.setattr(script, "formatted", lambda text, target: text)
    monkeypatch.setattr(sys, "argv", ["sync_client"])
    assert script.main() == 0
    monkeypatch.setattr(sys, "argv", ["sync_client", "--check"])
    return tmp_path


def test_a_stale_module_fails_the_check_and_is_left_as_it_is(
    script: Any, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main() == 0
    source, made = package / "_async_claims.py", package / "_claims.py"
    before = made.read_text("utf-8")
    source.write_text(source.read_text("utf-8") + "\n\nasync def one(): ...\n", "utf-8")
    capsys.readouterr()
    assert script.main() == 1
    said = capsys.readouterr()
    assert "+def one(): ..." in said.out
    assert said.err == "The sync client is stale: run scripts/sync_client and commit the result.\n"
    assert made.read_text("utf-8") == before


def test_a_phrase_that_is_found_nowhere_is_an_error(script: Any, package: Path) -> None:
    script.PHRASES["never said"] = ""
    with pytest.raises(SystemExit, match="never said"):
        script.main()

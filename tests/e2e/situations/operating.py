"""Settings, folders, caches, and files of others: what operators and users of a terminal meet."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from service import clean_environment, run

from . import PROMPT, SMALL, Check, Place, Refused, Situation

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OBEYED = "\x1b]0;owned\x07"
"""What sets the title of a terminal."""


def without_a_home(place: Place) -> subprocess.CompletedProcess[str]:
    """A picture by a user with no variables at all."""
    out = str(place.root / "homeless.png")
    return place.command("generate", PROMPT, *SMALL, "-o", out, env={"PATH": os.environ["PATH"]})


def succeeded(place: Place, done: subprocess.CompletedProcess[str]) -> None:
    """The command ended with 0."""
    assert done.returncode == 0, done.stderr


def cache_without_refs(place: Place) -> Path:
    """A hub cache whose model has a snapshot and no branch."""
    cache = place.root / "cache-without-refs"
    snapshot = cache / "models--me--norefs" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    return cache


def pull_offline(place: Place) -> subprocess.CompletedProcess[str]:
    """A pull of what is there, without a network."""
    own = {"HF_HUB_CACHE": str(cache_without_refs(place)), "HF_HUB_OFFLINE": "1"}
    return run("pull", "me/norefs", env=clean_environment() | own)


def names_the_commit(place: Place, done: subprocess.CompletedProcess[str]) -> None:
    """It says what is there, and how to take it."""
    assert done.returncode == 5, done.stderr
    assert f"moored pull me/norefs@{COMMIT}" in done.stderr
    assert "all of it is missing" not in done.stderr


def doctor_at_home(place: Place) -> subprocess.CompletedProcess[str]:
    """Doctor, with a state folder that begins with a tilde."""
    own = {"HOME": str(place.root), "MOORED_SERVICE_STATE": "~/tilde-state"}
    return run("doctor", env=clean_environment() | own)


def is_at_home(place: Place, done: subprocess.CompletedProcess[str]) -> None:
    """The folder is the user's, and none is called ~."""
    assert str(place.root / "tilde-state") in done.stdout, done.stdout
    assert (place.root / "tilde-state").is_dir()
    assert not Path("~").exists()


def picture_with_recipe(place: Place, name: str, recipe: str) -> None:
    """A picture whose recipe somebody else wrote."""
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("moored", recipe, zip=True)
    Image.new("RGB", (8, 8)).save(place.media / name, pnginfo=texts)


def make_hostile_recipe(place: Place) -> None:
    """A recipe whose model sets the title of a terminal."""
    recipe = {"prompt": "a cat", "model": OBEYED, "seed": 1, "steps": 2}
    recipe |= {
        "width": 64,
        "height": 64,
        "guidance": 0.0,
        "max_sequence_length": 48,
        "model_key": OBEYED,
        "version": "0.1.0",
    }
    picture_with_recipe(place, "hostile.png", json.dumps(recipe))


def make_bomb(place: Place) -> None:
    """A recipe that is small in the file and large out of it."""
    picture_with_recipe(place, "bomb.png", " " * (32 << 20))


def make_pipe(place: Place) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(place.media / "pipe.png")


def make_token(place: Place) -> None:
    """A token file with a second line."""
    (place.media / "two-lines").write_text("first-line-of-sixteen\nsecond\n")


def make_settings(place: Place) -> None:
    """A configuration file with a slip of the keyboard."""
    (place.media / "slip.toml").write_text("[queue]\nmax_jobs = = 3\n")
    (place.media / "meant.toml").write_text("[queue]\nmax_jbs = 3\n")


def obeys_nothing(place: Place, done: Any) -> None:
    """It is refused, and the terminal gets no sequence of others."""
    assert done.returncode != 0
    assert "\x1b" not in done.stderr + done.stdout, done.stderr
    assert "\\u{1b}]0;owned" in done.stderr, done.stderr


SITUATIONS = (
    Situation(
        name="user-without-passwd-home-or-name",
        source="h2oai/h2o-llmstudio#974, vectorize-io/hindsight#3934",
        story="Containers run as a number that has no account, no HOME and no USER.",
        call=without_a_home,
        expected=Check(succeeded),
    ),
    Situation(
        name="hub-address-without-scheme",
        source="huggingface/huggingface_hub#2806",
        story="HF_ENDPOINT is a mirror's name alone, and the error is of a relative URL.",
        command=("models",),
        environment={"HF_ENDPOINT": "mirror.example/hub"},
        expected=Refused(("HF_ENDPOINT", "https://mirror.example/hub"), 2),
    ),
    Situation(
        name="cache-without-refs-offline",
        source="huggingface/huggingface_hub#4492, huggingface/huggingface_hub#4487",
        story="A copied cache has snapshots and no branches, and offline it is called incomplete.",
        call=pull_offline,
        expected=Check(names_the_commit),
    ),
    Situation(
        name="tilde-in-settings",
        source="Comfy-Org/ComfyUI#2389",
        story="A path of a setting begins with ~, and a folder of that name is made.",
        call=doctor_at_home,
        expected=Check(is_at_home),
    ),
    Situation(
        name="label-that-a-terminal-obeys",
        source="an input of our own",
        story="A client's label has sequences that everybody's terminal obeys.",
        call=lambda place: place.client.reserve(1 << 20, label=f"a{OBEYED}"),
        expected=Refused(("label", "control characters"), never=("\x1b",)),
    ),
    Situation(
        name="recipe-that-a-terminal-obeys",
        source="an input of our own",
        story="A stranger's picture names a model that sets the title of a terminal.",
        make=make_hostile_recipe,
        command=("generate", "--from", "{media}/hostile.png"),
        expected=Check(obeys_nothing),
    ),
    Situation(
        name="recipe-that-grows",
        source="an input of our own",
        story="A stranger's picture has a recipe of a few bytes that become many.",
        make=make_bomb,
        command=("generate", "--from", "{media}/bomb.png"),
        expected=Refused(("longer than any of moored",), 8, never=("panicked",)),
    ),
    Situation(
        name="recipe-from-a-device",
        source="an input of our own",
        story="A device without an end is read until memory ends.",
        command=("generate", "--from", "/dev/zero"),
        expected=Refused(("no regular file",), 8),
    ),
    Situation(
        name="start-picture-from-a-pipe",
        source="an input of our own",
        story="A pipe that nobody writes to is waited for without a word.",
        make=make_pipe,
        command=("generate", "a", "--init", "{media}/pipe.png"),
        expected=Refused(("no regular file",), 8),
    ),
    Situation(
        name="token-of-two-lines",
        source="an input of our own",
        story="A token file has a comment or an old token in it.",
        make=make_token,
        command=("--token-file", "{media}/two-lines", "models"),
        expected=Refused(("keep one line",), 8, never=("second",)),
    ),
    Situation(
        name="settings-that-are-no-toml",
        source="an input of our own",
        story="One slip of the keyboard is told as dozens of errors.",
        make=make_settings,
        command=("--config", "{media}/slip.toml", "models"),
        expected=Refused(("has an error", "line 2"), 2, never=("errors:", "headroom")),
    ),
    Situation(
        name="setting-that-is-mistyped",
        source="an input of our own",
        story="A mistyped setting is named, but not the one that was meant.",
        make=make_settings,
        command=("--config", "{media}/meant.toml", "models"),
        expected=Refused(("queue.max_jobs is one",), 2),
    ),
    Situation(
        name="folder-that-takes-no-file",
        source="an input of our own",
        story="That a result cannot be written is found after all of the computing.",
        command=("generate", PROMPT, *SMALL, "-o", "/proc/picture.png"),
        expected=Refused(("/proc",), 8, never=("step 1",)),
    ),
    Situation(
        name="command-of-another-program",
        source="an input of our own",
        story="A command is mistyped, or one of another program.",
        command=("imge", "a cat"),
        expected=Refused(("moored generate",), 2),
    ),
)

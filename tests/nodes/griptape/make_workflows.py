"""Makes the library's template workflows on the real engine, and writes them to the library.

Run it with the lowest engine that the library declares, so that every newer one can read them:

    python tests/nodes/griptape/make_workflows.py && ruff check --fix nodes && ruff format nodes

The engine keeps values apart, encoded; here they are put where they are used, to be read.
"""

from __future__ import annotations

import pickle
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from headless import LIBRARY, MANIFEST, Headless, clean_environment, client_from_here, library_copy

WORKFLOWS = LIBRARY / "workflows"
PROMPT = (
    "a large red circle at the top left and a small blue star in the centre on a yellow background"
)
EDIT = (
    "a large red circle at the top left and a small green star in the centre on a yellow background"
)
FILM_MODEL = "hunyuanvideo-community/HunyuanVideo"
SPEAKING_MODEL = "chetwinlow1/Ovi:model_960x960.safetensors"
SPOKEN_PROMPT = (
    "a fisherman in an open boat at dawn looks up and says <S>The tide is turning.<E> "
    "<AUDCAP>a man speaks calmly, small waves slap against wood, gulls far away<ENDAUDCAP>"
)
FRAMEPACK = "lllyasviel/FramePackI2V_HY"
BETWEEN_PROMPT = "the star slowly changes its colour"
MUSIC_MODEL = "moored/demo-sound"
MUSIC_PROMPT = "three high short notes, then a low long one, square wave"
SDXL_MODEL = "stabilityai/stable-diffusion-xl-base-1.0"
SDXL_PROMPT = "a lighthouse on a cliff above breaking waves, evening light, photograph"
EDITING_MODEL = "Qwen/Qwen-Image-Edit-2511"
REFERENCE_EDIT = "make the circle green and leave everything else as it is"
FILM_PROMPT = "a lighthouse on a cliff while waves break below it, evening light"


async def text_to_image(engine: Headless) -> None:
    """A model, limits, a picture."""
    model = await engine.node("DiffusionModel", at=(0, 0), quantization_mode="None")
    limits = await engine.node("GPUConfiguration", at=(0, 600))
    picture = await engine.node("GenerateImage", at=(700, 0), prompt=PROMPT)
    await engine.connect(model, "model_handle", picture, "model")
    await engine.connect(limits, "system_constraints", picture, "system_constraints")


async def edit_image(engine: Headless) -> None:
    """The model is loaded, generates, changes the picture, and is unloaded."""
    model = await engine.node("DiffusionModel", at=(0, 0), quantization_mode="None")
    limits = await engine.node("GPUConfiguration", at=(0, 600))
    preload = await engine.node("PreloadModel", at=(700, 0))
    picture = await engine.node("GenerateImage", at=(1400, 0), prompt=PROMPT)
    edit = await engine.node("EditImage", at=(2100, 0), prompt=EDIT, strength=0.8)
    unload = await engine.node("UnloadModels", at=(2800, 0), all_models=False)
    await engine.connect(model, "model_handle", preload, "model")
    for node in (picture, edit, unload):
        await engine.connect(preload, "model", node, "model")
    for node in (preload, picture, edit):
        await engine.connect(limits, "system_constraints", node, "system_constraints")
    await engine.connect(picture, "image", edit, "input_image")
    for before, after in ((preload, picture), (picture, edit), (edit, unload)):
        await engine.connect(before, "exec_out", after, "exec_in")


async def sampled_image(engine: Headless) -> None:
    """A model that has several samplers, one of them, and a picture."""
    model = await engine.node("DiffusionModel", at=(0, 0), model=SDXL_MODEL)
    picture = await engine.node(
        "GenerateImage",
        at=(700, 0),
        prompt=SDXL_PROMPT,
        steps=30,
        sampler="dpmpp_2m_karras",
        negative_prompt="blurred, drawing, text",
        true_guidance=7.0,
    )
    await engine.connect(model, "model_handle", picture, "model")


async def edit_by_words(engine: Headless) -> None:
    """A picture, and another model that changes it as a sentence says."""
    first = await engine.node("GenerateImage", at=(0, 600), prompt=PROMPT)
    model = await engine.node("DiffusionModel", at=(0, 0), model=EDITING_MODEL)
    edited = await engine.node("GenerateImage", at=(700, 0), prompt=REFERENCE_EDIT)
    await engine.connect(model, "model_handle", edited, "model")
    await engine.connect(first, "image", edited, "reference_image")
    await engine.connect(first, "exec_out", edited, "exec_in")


async def generate_video(engine: Headless) -> None:
    """A model of films, limits, a film."""
    model = await engine.node("DiffusionModel", at=(0, 0), model=FILM_MODEL)
    limits = await engine.node("GPUConfiguration", at=(0, 600))
    film = await engine.node("GenerateVideo", at=(700, 0), prompt=FILM_PROMPT)
    await engine.connect(model, "model_handle", film, "model")
    await engine.connect(limits, "system_constraints", film, "system_constraints")


async def film_with_sound(engine: Headless) -> None:
    """A model of films with sound, and a film in which somebody speaks."""
    model = await engine.node("DiffusionModel", at=(0, 0), model=SPEAKING_MODEL)
    film = await engine.node("GenerateVideo", at=(700, 0), prompt=SPOKEN_PROMPT)
    await engine.connect(model, "model_handle", film, "model")


async def between_two_pictures(engine: Headless) -> None:
    """Two pictures, and a film from one to the other."""
    model = await engine.node("DiffusionModel", at=(0, 0), model=FRAMEPACK)
    first = await engine.node("GenerateImage", at=(0, 600), prompt=PROMPT)
    last = await engine.node("GenerateImage", at=(700, 600), prompt=EDIT)
    film = await engine.node("GenerateVideo", at=(1400, 0), prompt=BETWEEN_PROMPT)
    await engine.connect(model, "model_handle", film, "model")
    await engine.connect(first, "image", film, "input_image")
    await engine.connect(last, "image", film, "end_image")
    for before, after in ((first, last), (last, film)):
        await engine.connect(before, "exec_out", after, "exec_in")


async def generate_audio(engine: Headless) -> None:
    """The included model of sounds, limits, a melody."""
    model = await engine.node(
        "DiffusionModel", at=(0, 0), model=MUSIC_MODEL, quantization_mode="None"
    )
    limits = await engine.node("GPUConfiguration", at=(0, 600))
    track = await engine.node("GenerateAudio", at=(700, 0), prompt=MUSIC_PROMPT)
    await engine.connect(model, "model_handle", track, "model")
    await engine.connect(limits, "system_constraints", track, "system_constraints")


DESCRIPTIONS = {
    "moored_text_to_image": (text_to_image, "A picture from a prompt, within limits."),
    "moored_edit_image": (
        edit_image,
        "A picture, and a change of it; the model is loaded and unloaded.",
    ),
    "moored_sampled_image": (
        sampled_image,
        "A picture by Stable Diffusion XL, with one of its samplers.",
    ),
    "moored_edit_by_words": (
        edit_by_words,
        "A picture, and a change of it that a sentence asks for, by Qwen-Image-Edit.",
    ),
    "moored_generate_video": (generate_video, "A film from a prompt, within limits."),
    "moored_film_with_sound": (film_with_sound, "A film in which somebody speaks."),
    "moored_between_two_pictures": (
        between_two_pictures,
        "Two pictures, and a film from one to the other.",
    ),
    "moored_generate_audio": (generate_audio, "A melody from a prompt, within limits."),
}


def readable(code: str, description: str) -> str:
    """A saved workflow with its values in their places, and the header of a template."""
    found = re.search(r"^ *top_level_unique_values_dict = (\{.*\})$", code, re.MULTILINE)
    assert found, "the engine writes workflows another way now"
    values: dict[str, Any] = eval(found[1], {"pickle": pickle})  # made here, a moment ago
    code = re.sub(r"^ *#(?! ///).*(?<! ///)\n(?=(?: *#.*\n)* *top_level)", "", code, flags=re.M)
    code = code.replace(f"{found[0]}\n", "")
    code = re.sub(
        r"(?:decode_value\()?top_level_unique_values_dict\['([^']+)'\]\)?(?=, initial_setup)",
        lambda match: repr(values[match[1]]),
        code,
    )
    code = re.sub(r"'library_node_metadata': \{[^{}]*\}, ", "", code)
    code = re.sub(
        r"^# (creation|last_modified)_date = .*$",
        r"# \1_date = 2026-01-01T00:00:00Z",
        code,
        flags=re.M,
    )
    template = f'# description = "{description}"\n# is_template = true\n# is_griptape_provided'
    code = code.replace("# is_griptape_provided", template, 1)
    return code.replace("# ///\n\n", "# ///\n# ruff: noqa: E501\n\n", 1)


async def save(engine: Headless, name: str, build: Callable[[Headless], Awaitable[None]]) -> str:
    """Builds a workflow and has the engine save it; what it wrote."""
    from griptape_nodes.retained_mode.events.workflow_events import SaveWorkflowRequest

    await engine.fresh_flow()
    await build(engine)
    saved = await engine.ask(SaveWorkflowRequest(file_name=name))
    return Path(saved.file_path).read_text(encoding="utf-8")


def main() -> None:
    """Writes all of them."""
    home = Path(tempfile.mkdtemp())
    clean_environment(home)
    client_from_here(home)
    engine = Headless()
    engine.do(engine.start(library_copy(home)))
    WORKFLOWS.mkdir(exist_ok=True)
    for name, (build, description) in DESCRIPTIONS.items():
        code = engine.do(save(engine, name, build))
        (WORKFLOWS / f"{name}.py").write_text(readable(code, description), encoding="utf-8")
        assert f'"workflows/{name}.py"' in (LIBRARY / MANIFEST).read_text(), "name it there, too"
    shutil.rmtree(home)


if __name__ == "__main__":
    main()

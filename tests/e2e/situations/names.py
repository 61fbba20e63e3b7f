"""Names as people have them, and what a result leaves out: nothing is cut without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import moored
import numpy as np
from stored_files import write_safetensors

from service import ROOT
from situations import PROMPT, Check, Done, Place, Refused, Same, Situation
from situations.people_files import Make, copied, full, lora, single_file

STAR = ROOT / "demo/adapters/circle-to-star.safetensors"
LONG = "a large red circle " * 200 + "and a small blue square in the centre"


def adapters(*names: str) -> Make:
    """Copies of the shipped LoRA."""

    def write(place: Place) -> None:
        for name in names:
            path = place.adapters / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(STAR, path)

    return write


def weak_and_strong(weak: str, strong: str) -> Make:
    """A LoRA of random numbers beside a copy of the shipped one."""

    def write(place: Place) -> None:
        write_safetensors(place.adapters / weak, full(lora()))
        adapters(strong)(place)

    return write


def twin(name: str, ending: str) -> Make:
    """Two files of one stem: the shipped model, and the same with its last layer negated."""

    def write(place: Place) -> None:
        single_file(name, full)(place)
        single_file(
            name,
            lambda numbers: full(
                {key: -one if "final_layer.linear" in key else one for key, one in numbers.items()}
            ),
            ending,
        )(place)

    return write


def more_tokens(folder: str, token: str) -> Callable[[Path], None]:
    """A tokenizer that has one token more than the encoder."""

    def change(model: Path) -> None:
        path = model / folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        encoder = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}[folder]
        size = json.loads((model / encoder / "config.json").read_text(encoding="utf-8"))[
            "vocab_size"
        ]
        config["added_tokens_decoder"] = dict(config.get("added_tokens_decoder", {})) | {
            str(size): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": False,
            }
        }
        path.write_text(json.dumps(config), encoding="utf-8")

    return change


def mask_of_zeros(place: Place) -> moored.ImageResult:
    """A start with the mask that editors give for a picture without transparency: nothing is to change."""
    start = place.client.generate_image(PROMPT, seed=5, steps=2, width=64, height=64).image
    return place.client.generate_image(
        "a star", seed=6, steps=2, init_image=start, mask=np.zeros((64, 64), np.uint8)
    )


def is_the_start(place: Place, result: moored.ImageResult) -> None:
    start = place.client.generate_image(PROMPT, seed=5, steps=2, width=64, height=64)
    assert np.array_equal(np.asarray(result.image), np.asarray(start.image))


def told_of_prompt(place: Place, result: moored.ImageResult) -> None:
    (told,) = result.left_out
    assert told.field == "prompt"
    assert told.tokens > 100
    assert "max_sequence_length" in told.message


def told_of_lyrics(place: Place, result: moored.AudioResult) -> None:
    (told,) = result.left_out
    assert told.field == "lyrics"
    assert told.tokens > 100


def nothing_left_out(place: Place, result: moored.ImageResult) -> None:
    assert result.left_out == ()


def generate(prompt: str, **options: object) -> Callable[[Place], moored.ImageResult]:
    asked = {"seed": 5, "steps": 1, "width": 64, "height": 64} | options
    return lambda place: place.client.generate_image(prompt, **asked)


def lora_named(name: str) -> tuple[str, ...]:
    return ("--lora", name)


SHIPPED_LORA = lora_named("moored/circle-to-star")

SITUATIONS = (
    Situation(
        name="sft-is-safetensors",
        source="Acly/krita-ai-diffusion#1163",
        story="FLUX.1 was first published as .sft.",
        make=single_file("short", full, "sft"),
        generate=("-m", "short.sft"),
        expected=Same(()),
    ),
    Situation(
        name="one-of-two-files-with-one-stem",
        source="unslothai/unsloth#7460",
        story="Two files are taken for one, and the other cannot be had.",
        make=twin("twin", "sft"),
        generate=("-m", "twin.safetensors"),
        expected=Same(()),
    ),
    Situation(
        name="a-stem-of-two-files",
        source="unslothai/unsloth#7460",
        story="One of two files is used without a word.",
        make=twin("pair", "sft"),
        generate=("-m", "pair"),
        expected=Refused(("pair.safetensors or pair.sft", "write one of them")),
    ),
    Situation(
        name="lora-in-capitals",
        source="unslothai/unsloth#7460",
        story="A LoRA that ends in .SAFETENSORS is not listed.",
        make=adapters("loud.SAFETENSORS"),
        generate=lora_named("loud.SAFETENSORS"),
        expected=Same(SHIPPED_LORA),
    ),
    Situation(
        name="lora-as-sft",
        source="after Acly/krita-ai-diffusion#1163",
        story="A LoRA that ends in .sft is not listed.",
        make=adapters("small.sft"),
        generate=lora_named("small"),
        expected=Same(SHIPPED_LORA),
    ),
    Situation(
        name="lora-with-a-colon",
        source="asagi4/comfyui-prompt-control#31",
        story="What is behind a colon of a name is taken for a strength.",
        make=weak_and_strong("v1.safetensors", "v1:2.safetensors"),
        generate=lora_named("v1:2"),
        expected=Same(SHIPPED_LORA),
    ),
    Situation(
        name="lora-with-a-colon-and-a-strength",
        source="after asagi4/comfyui-prompt-control#31",
        story="A name with a colon cannot have a strength.",
        make=weak_and_strong("v2.safetensors", "v2:3.safetensors"),
        generate=lora_named("v2\\:3:0.5"),
        expected=Same(lora_named("moored/circle-to-star:0.5")),
    ),
    Situation(
        name="lora-with-a-comma",
        source="mcmonkeyprojects/SwarmUI#808",
        story="A comma in a name separates names.",
        make=adapters("te,st.safetensors"),
        generate=lora_named("te,st:0.5"),
        expected=Same(lora_named("moored/circle-to-star:0.5")),
    ),
    Situation(
        name="lora-that-is-no-name-and-no-strength",
        source="after asagi4/comfyui-prompt-control#31",
        story="A typo behind the colon.",
        command=("generate", "x", "--lora", "moored/circle-to-star:strong"),
        expected=Refused(("no LoRA is called so", '"strong" is no strength')),
    ),
    Situation(
        name="model-with-every-character",
        source="after willmiao/ComfyUI-Lora-Manager#441",
        story="Names that are listed cannot be typed.",
        make=single_file("a&b, 100% v1:2@home+x", full),
        generate=("-m", "a&b, 100% v1:2@home+x"),
        expected=Same(()),
    ),
    Situation(
        name="lora-by-a-path-of-windows",
        source="Comfy-Org/ComfyUI#3343",
        story="A workflow that was made on Windows names folders with backslashes.",
        make=adapters("flux/styles/ink.safetensors"),
        generate=lora_named("flux\\styles\\ink.safetensors"),
        expected=Same(SHIPPED_LORA),
    ),
    Situation(
        name="model-by-a-path-of-windows",
        source="perfectgf/lora-dataset-studio#21",
        story="The same for a model, from Python.",
        make=lambda place: (
            (place.models / "boxed").mkdir(),
            single_file("boxed/flux-small", full)(place),
        )[-1],
        call=generate(PROMPT, model="boxed\\flux-small.safetensors"),
        expected=Check(nothing_left_out),
    ),
    Situation(
        name="a-lora-that-is-chained-twice",
        source="after Comfy-Org/ComfyUI#3343",
        story="A LoRA that comes twice in a chain counts twice in other programs.",
        generate=("--lora", "moored/circle-to-star:0.5", "--lora", "moored/circle-to-star:0.5"),
        expected=Same(SHIPPED_LORA),
    ),
    Situation(
        name="a-lora-that-is-chained-with-strength-0",
        source="after Comfy-Org/ComfyUI#3343",
        story="One node of a chain is set to 0.",
        generate=("--lora", "moored/circle-to-star:0", "--lora", "moored/circle-to-star:1"),
        expected=Same(SHIPPED_LORA),
    ),
    Situation(
        name="a-token-beyond-t5",
        source="huggingface/diffusers#9434",
        story="A textual inversion added a token to the tokenizer alone.",
        make=copied("token-t5", more_tokens("tokenizer_2", "<s0>")),
        call=generate("a <s0> circle", model="token-t5"),
        expected=Refused(('"<s0>"', "tokenizer_2", "text_encoder_2 knows")),
    ),
    Situation(
        name="a-token-beyond-clip",
        source="kohya-ss/sd-scripts#1588",
        story="The same in CLIP's tokenizer.",
        make=copied("token-clip", more_tokens("tokenizer", "<s0>")),
        call=generate("a <s0> circle", model="token-clip"),
        expected=Refused(('"<s0>"', "tokenizer", "text_encoder knows")),
    ),
    Situation(
        name="a-token-that-is-not-used",
        source="kohya-ss/sd-scripts#1588",
        story="Prompts without the token work.",
        make=copied("token-unused", more_tokens("tokenizer", "<s0>")),
        generate=("-m", "token-unused"),
        expected=Same(()),
    ),
    Situation(
        name="a-prompt-that-is-too-long",
        source="black-forest-labs/flux#495",
        story="The end of a long prompt is not read, and nobody says so.",
        call=generate(LONG),
        expected=Check(told_of_prompt),
    ),
    Situation(
        name="a-prompt-that-is-too-long-in-a-terminal",
        source="lum3on/comfyui_HiDream-Sampler#36",
        story="The same on the command line.",
        command=(
            "generate",
            LONG,
            "--steps",
            "1",
            "-W",
            "64",
            "-H",
            "64",
            "-o",
            "{media}/long.png",
        ),
        expected=Done(("tokens of the prompt are left out",)),
    ),
    Situation(
        name="a-prompt-beyond-77-tokens-that-t5-reads",
        source="xhinker/sd_embed#30",
        story="CLIP reads 77 tokens by design: T5 reads the rest, so nothing is left out.",
        call=generate("a circle " * 45, max_sequence_length=512),
        expected=Check(nothing_left_out),
    ),
    Situation(
        name="lyrics-that-are-too-long",
        source="after black-forest-labs/flux#495",
        story="The end of a long song is not sung.",
        call=lambda place: place.client.generate_audio(
            "a waltz", lyrics="la la la\n" * 1100, seconds=1.0, steps=1, model="moored/demo-sound"
        ),
        expected=Check(told_of_lyrics),
    ),
    Situation(
        name="a-mask-of-zeros",
        source="Comfy-Org/ComfyUI#8667",
        story="The mask of a picture without transparency.",
        call=mask_of_zeros,
        expected=Check(is_the_start),
    ),
    Situation(
        name="a-model-that-is-not-there-in-python",
        source="the first hour of a user of Python",
        story="The remedy is a command of a shell.",
        call=generate(PROMPT, model="me/nothing"),
        expected=Refused(("client.list_models()",), never=("`moored models`",)),
    ),
)

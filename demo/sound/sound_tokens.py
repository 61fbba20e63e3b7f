"""The tokenizer of the sound model, built from the language of melodies alone.

Qwen's byte-level BPE in tokenizer.json, with a text's end put behind it as Qwen3-Embedding's has. Each word
of the language and each piece of ACE-Step's prompt formats is one token; other words fall apart into letters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import melodies
from diffusers.pipelines.ace_step.pipeline_ace_step import SFT_GEN_PROMPT, TASK_INSTRUCTIONS
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tokens  # noqa: E402

END = "<|endoftext|>"
SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>")
TASKS = ("text2music", "repaint", "cover")
"""What a turbo model does."""


def caption(prompt: str, task: str, seconds: int) -> str:
    """What the text encoder reads of a prompt (`AceStepPipeline._format_prompt`)."""
    metas = f"- bpm: N/A\n- timesignature: N/A\n- keyscale: N/A\n- duration: {seconds} seconds\n"
    return SFT_GEN_PROMPT.format(TASK_INSTRUCTIONS[task], prompt, metas)


def lyrics() -> str:
    """What the lyric encoder reads where there are no lyrics."""
    return f"# Languages\nen\n\n# Lyric\n{END}"


def _pieces(text: str) -> list[str]:
    """The byte-level pieces that the BPE works on."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


def _known_pieces() -> list[str]:
    """Every piece that becomes one token."""
    texts = [lyrics(), *(caption("", task, 0) for task in TASKS), ":.,\n\n"]
    for word in melodies.language_words():
        texts += [word, " " + word]
    pieces = {piece for text in texts for part in text.split(END) for piece in _pieces(part)}
    return sorted(piece for piece in pieces if len(piece) > 1)


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and its settings into `folder`; returns the vocabulary's size."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = tokens.bpe_merges(_known_pieces(), end="")
    words = dict.fromkeys([*tokens.byte_symbols(), *(one + two for one, two in merges)])
    vocabulary = {piece: index for index, piece in enumerate(words)}
    ids = {token: len(words) + index for index, token in enumerate(SPECIAL_TOKENS)}

    def special(content: str) -> dict[str, object]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {"id": ids[content], "content": content, **flags, "special": True}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    end = {"SpecialToken": {"id": END, "type_id": 0}}
    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZE_REGEX}, "behavior": "Isolated"}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special(content) for content in SPECIAL_TOKENS],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level | {"use_regex": False}],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequences[0], end],
            "pair": [*sequences, end],
            "special_tokens": {END: {"id": END, "ids": [ids[END]], "tokens": [END]}},
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }
    tokens.dump(folder / "tokenizer.json", tokenizer)
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": END,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    tokens.dump(folder / "tokenizer_config.json", settings)
    return len(words) + len(SPECIAL_TOKENS)

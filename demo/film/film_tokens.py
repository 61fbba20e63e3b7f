"""The two tokenizers of the film model, built from the film language alone.

LLaMA's is a byte-level BPE in tokenizer.json with LLaMA 3's splitting and special tokens. Its vocabulary is
the 256 bytes, the words of the language and the pieces of FramePack's prompt template, each of them one
token, so that the template's head has the 95 tokens that the pipeline cuts off. CLIP's is that of the
picture model (`demo/tokens.py`) over the film language's words.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import films
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_framepack import (
    DEFAULT_PROMPT_TEMPLATE,
)
from tokenizers import Regex, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tokens  # noqa: E402

TEMPLATE: str = DEFAULT_PROMPT_TEMPLATE["template"]
CROP_START: int = DEFAULT_PROMPT_TEMPLATE["crop_start"]
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<pad>",
)
BOS, EOT, PAD = "<|begin_of_text|>", "<|eot_id|>", "<pad>"
CLIP_LENGTH = tokens.CLIP_LENGTH
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How LLaMA 3 splits text into the pieces that its BPE works on."""


def _pieces(text: str) -> list[str]:
    """The byte-level pieces of a text without special tokens, in lower case."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return [piece for piece, _ in splitter.pre_tokenize_str(text.lower())]


def _template_texts() -> list[str]:
    """The template's texts between its special tokens and around the prompt."""
    text = TEMPLATE
    for mark in (*SPECIAL_TOKENS, "{}"):
        text = text.replace(mark, "\0")
    return [part for part in text.split("\0") if part]


def _llama_vocabulary() -> dict[str, int]:
    pieces = dict.fromkeys(tokens.byte_symbols())
    for text in _template_texts():
        pieces |= dict.fromkeys(_pieces(text))
    for word in films.language_words():
        pieces |= dict.fromkeys(_pieces(word) + _pieces(" " + word))
    return {piece: index for index, piece in enumerate((*pieces, *SPECIAL_TOKENS))}


def write_llama_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and its settings into `folder`; returns the vocabulary's size."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _llama_vocabulary()

    def special(content: str) -> dict[str, object]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {"id": vocabulary[content], "content": content, **flags, "special": True}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    start = {"SpecialToken": {"id": BOS, "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special(content) for content in SPECIAL_TOKENS],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level | {"use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, sequences[0]],
            "pair": [start, sequences[0], start, sequences[1]],
            "special_tokens": {BOS: {"id": BOS, "ids": [vocabulary[BOS]], "tokens": [BOS]}},
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {k: v for k, v in vocabulary.items() if k not in SPECIAL_TOKENS},
            "merges": [],
        },
    }
    tokens.dump(folder / "tokenizer.json", tokenizer)
    named = {"bos_token": BOS, "eos_token": EOT, "pad_token": PAD}
    tokens.dump(folder / "special_tokens_map.json", named)
    settings = {
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    tokens.dump(folder / "tokenizer_config.json", settings | named)
    return len(vocabulary)


def write_clip_tokenizer(folder: Path) -> int:
    """Write CLIPTokenizer's files into `folder`; returns the vocabulary's size."""
    return tokens.write_clip_tokenizer(folder, films.language_words())


class PromptEncoder:
    """Fast encoding of the language's own prompts, by a table of words.

    The trainer checks that its ids are the real tokenizers' ids.
    """

    def __init__(self, clip_folder: Path) -> None:
        clip = json.loads((clip_folder / "vocab.json").read_text(encoding="utf-8"))
        llama = _llama_vocabulary()
        self.pad, self.eot, self.clip_end = llama[PAD], llama[EOT], clip[tokens.CLIP_END]
        self._clip_start = clip[tokens.CLIP_START]
        comma = llama[","]
        self._first: dict[str, list[int]] = {}
        self._later: dict[str, list[int]] = {}
        self._clip: dict[str, list[int]] = {}
        for word in films.language_words():
            for table, text in ((self._first, word), (self._later, " " + word)):
                (piece,) = _pieces(text)
                table[word], table[word + ","] = [llama[piece]], [llama[piece], comma]
            self._clip[word] = [clip[word + "</w>"]]
            self._clip[word + ","] = [clip[word + "</w>"], clip[",</w>"]]

    def encode(self, prompt: str) -> tuple[list[int], list[int]]:
        """LLaMA's ids of the prompt and the end-of-turn token after it, and CLIP's, both unpadded."""
        first, *later = prompt.split()
        llama = list(self._first[first])
        clip = [self._clip_start, *self._clip[first]]
        for word in later:
            llama += self._later[word]
            clip += self._clip[word]
        return [*llama, self.eot], [*clip, self.clip_end]

"""The two tokenizers of the demo model, built from the picture language alone.

CLIP's is a byte-level BPE in vocab.json and merges.txt whose merges make one token of every word of
the language; T5's is a unigram model in tokenizer.json with the same property and a SentencePiece
table that folds capitals. Words that they don't know fall apart into letters.
"""

from __future__ import annotations

import base64
import io
import json
import string
import tempfile
from collections import Counter
from pathlib import Path

import scenes

CLIP_LENGTH = 77
T5_LENGTH = 48
T5_PAD, T5_EOS, T5_UNKNOWN = "<pad>", "</s>", "<unk>"
CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"


def _words() -> list[str]:
    return sorted({part for word in scenes.language_words() for part in word.split("-")})


def byte_symbols() -> list[str]:
    """The 256 printable stand-ins of a byte-level BPE, in CLIP's order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = len([byte for byte in range(256) if byte not in kept])
    return [chr(code) for code in kept] + [chr(256 + index) for index in range(moved)]


def bpe_merges(words: list[str], end: str = "</w>") -> list[tuple[str, str]]:
    """Merge the commonest pair (ties: the first in the alphabet) until every word is one token.

    `end` is what a word's last letter carries.
    """
    split = [[*word[:-1], word[-1] + end] for word in words]
    merges = []
    while True:
        pairs = Counter(pair for word in split for pair in zip(word, word[1:], strict=False))
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for index, word in enumerate(split):
            merged, position = [], 0
            while position < len(word):
                if tuple(word[position : position + 2]) == best:
                    merged.append(best[0] + best[1])
                    position += 2
                else:
                    merged.append(word[position])
                    position += 1
            split[index] = merged


def dump(path: Path, data: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_clip_tokenizer(folder: Path, words: list[str] | None = None) -> int:
    """Write CLIPTokenizer's files into `folder`; returns the vocabulary's size.

    Each of `words` (the picture language's, if none are given) becomes one token. As in CLIP-L the start
    and end tokens have the two highest ids, and the end token also pads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    merges = bpe_merges(words or _words())
    symbols = byte_symbols()
    pieces = symbols + [symbol + "</w>" for symbol in symbols]
    pieces += ["".join(pair) for pair in merges] + [CLIP_START, CLIP_END]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    dump(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokens = {"bos_token": CLIP_START, "eos_token": CLIP_END}
    tokens |= {"unk_token": CLIP_END, "pad_token": CLIP_END}
    dump(folder / "special_tokens_map.json", tokens)
    settings = {
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": CLIP_LENGTH,
        "tokenizer_class": "CLIPTokenizer",
    }
    dump(folder / "tokenizer_config.json", settings | tokens)
    return len(vocabulary)


def _case_folding_table() -> bytes:
    """SentencePiece's compiled table that folds A-Z and odd spaces, the model's normalizer.

    The full NFKC table works as well, but is larger than both text encoders' vocabularies together.
    """
    import sentencepiece
    from transformers.utils import sentencepiece_model_pb2_new as protocol

    rules = [f"{ord(letter):X}\t{ord(letter.lower()):X}" for letter in string.ascii_uppercase]
    rules += [f"{space:X}\t20" for space in (0x09, 0x0A, 0x0D, 0xA0, 0x3000)]
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as table:
        table.write("\n".join(rules) + "\n")
        table.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a red circle on a blue background"] * 50),
            model_writer=model,
            vocab_size=30,
            hard_vocab_limit=False,
            normalization_rule_tsv=table.name,
            minloglevel=2,
        )
    return protocol.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap


def write_t5_tokenizer(folder: Path) -> int:
    """Write T5TokenizerFast's files into `folder`; returns the vocabulary's size."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary: list[tuple[str, float]] = [(T5_PAD, 0.0), (T5_EOS, 0.0), (T5_UNKNOWN, 0.0)]
    vocabulary += [("▁", -4.0)] + [(mark, -3.0) for mark in ",."]
    vocabulary += [("▁" + word, -5.0) for word in scenes.language_words()]
    known = {piece for piece, _ in vocabulary}
    letters = string.ascii_lowercase + string.digits + "-!?;:'\"()"
    vocabulary += [(letter, -12.0) for letter in letters if letter not in known]
    vocabulary += [("▁" + c, -14.0) for c in string.ascii_lowercase if "▁" + c not in known]

    def special(index: int, content: str) -> dict[str, object]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {"id": index, "content": content, **flags, "special": True}

    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    end = {"SpecialToken": {"id": T5_EOS, "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    table = base64.b64encode(_case_folding_table()).decode()
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special(i, vocabulary[i][0]) for i in range(3)],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": table},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, space],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequences[0], end],
            "pair": [sequences[0], end, sequences[1], end],
            "special_tokens": {T5_EOS: {"id": T5_EOS, "ids": [1], "tokens": [T5_EOS]}},
        },
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [list(entry) for entry in vocabulary],
            "byte_fallback": False,
        },
    }
    dump(folder / "tokenizer.json", tokenizer)
    tokens = {"eos_token": T5_EOS, "unk_token": T5_UNKNOWN, "pad_token": T5_PAD}
    dump(folder / "special_tokens_map.json", tokens)
    settings = {"extra_ids": 0, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    dump(folder / "tokenizer_config.json", settings | tokens)
    return len(vocabulary)


class PromptEncoder:
    """Fast encoding of the language's own prompts: a table of words, as no word straddles a space.

    The trainer checks that its ids are the real tokenizers' ids.
    """

    def __init__(self, clip_folder: Path, t5_folder: Path) -> None:
        clip = json.loads((clip_folder / "vocab.json").read_text(encoding="utf-8"))
        t5 = json.loads((t5_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"][
            "vocab"
        ]
        t5_ids = {piece: index for index, (piece, _) in enumerate(t5)}
        self._words: dict[str, tuple[list[int], list[int]]] = {}
        for word in scenes.language_words():
            parts = word.replace("-", " - ").split()
            in_clip, in_t5 = [clip[part + "</w>"] for part in parts], [t5_ids["▁" + word]]
            self._words[word] = in_clip, in_t5
            self._words[word + ","] = [*in_clip, clip[",</w>"]], [*in_t5, t5_ids[","]]
        self._start, self._end = clip[CLIP_START], clip[CLIP_END]

    def encode(self, prompt: str) -> tuple[list[int], list[int]]:
        """The padded ids for CLIP (77) and T5 (48)."""
        clip, t5 = [self._start], []
        for word in prompt.split():
            in_clip, in_t5 = self._words[word]
            clip += in_clip
            t5 += in_t5
        t5.append(1)
        if len(t5) > T5_LENGTH or len(clip) >= CLIP_LENGTH:
            raise ValueError(f"the prompt is too long: {prompt!r}")
        clip += [self._end] * (CLIP_LENGTH - len(clip))
        return clip, t5 + [0] * (T5_LENGTH - len(t5))

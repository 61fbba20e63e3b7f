"""Makes FLUX checkpoints of random numbers, in the sizes and the layout of FLUX.1-dev, or tiny ones.

Two models, `flux-a` and `flux-b`: their transformers differ, everything else is the same files by hard links.
Norms are ones, biases zeros, all other weights bf16 of N(0, 0.02), so that nothing overflows.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo/model"
MODELS = ("flux-a", "flux-b")
SHARED_MEMORY = Path("/dev/shm")
DONE = "made.json"
DEVIATION = 0.02
WRITE_BYTES = 32 << 20
READ_BYTES = 256 << 20
SPARE_BYTES = 1 << 30

Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Sizes:
    """Everything that makes a checkpoint large or small."""

    head: int
    heads: int
    axes: tuple[int, int, int]
    doubles: int
    singles: int
    clip: int
    clip_inner: int
    clip_heads: int
    clip_layers: int
    clip_words: int
    t5: int
    t5_inner: int
    t5_key: int
    t5_heads: int
    t5_layers: int
    t5_words: int
    vae_channels: tuple[int, ...]
    vae_layers: int
    vae_groups: int
    shard_bytes: int
    block_numbers: int


FULL = Sizes(
    head=128,
    heads=24,
    axes=(16, 56, 56),
    doubles=19,
    singles=38,
    clip=768,
    clip_inner=3072,
    clip_heads=12,
    clip_layers=12,
    clip_words=49408,
    t5=4096,
    t5_inner=10240,
    t5_key=64,
    t5_heads=64,
    t5_layers=24,
    t5_words=32128,
    vae_channels=(128, 256, 512, 512),
    vae_layers=2,
    vae_groups=32,
    shard_bytes=9_990_000_000,
    block_numbers=64 << 20,
)
SMALL = Sizes(
    head=32,
    heads=6,
    axes=(8, 12, 12),
    doubles=2,
    singles=4,
    clip=96,
    clip_inner=192,
    clip_heads=4,
    clip_layers=2,
    clip_words=1000,
    t5=128,
    t5_inner=256,
    t5_key=32,
    t5_heads=4,
    t5_layers=2,
    t5_words=200,
    vae_channels=(16, 32, 64, 64),
    vae_layers=1,
    vae_groups=8,
    shard_bytes=4 << 20,
    block_numbers=1 << 20,
)


class Layers:
    """Names and shapes as they are listed."""

    def __init__(self) -> None:
        """None yet."""
        self.shapes: Shapes = []

    def tensor(self, name: str, *shape: int) -> None:
        """A tensor of this very name."""
        self.shapes.append((name, shape))

    def weight(self, name: str, *shape: int) -> None:
        """A weight without a bias."""
        self.tensor(f"{name}.weight", *shape)

    def layer(self, name: str, *shape: int) -> None:
        """A weight with a bias."""
        self.weight(name, *shape)
        self.tensor(f"{name}.bias", shape[0])


def transformer(s: Sizes) -> Shapes:
    """diffusers' FluxTransformer2DModel."""
    width, made = s.head * s.heads, Layers()
    made.layer("x_embedder", width, 64)
    made.layer("context_embedder", width, s.t5)
    for name, inputs in [("timestep", 256), ("guidance", 256), ("text", s.clip)]:
        made.layer(f"time_text_embed.{name}_embedder.linear_1", width, inputs)
        made.layer(f"time_text_embed.{name}_embedder.linear_2", width, width)
    for i in range(s.doubles):
        block = f"transformer_blocks.{i}"
        for norm in ("norm1", "norm1_context"):
            made.layer(f"{block}.{norm}.linear", 6 * width, width)
        parts = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        for part in (*parts, "to_out.0", "to_add_out"):
            made.layer(f"{block}.attn.{part}", width, width)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            made.weight(f"{block}.attn.{norm}", s.head)
        for part in ("ff", "ff_context"):
            made.layer(f"{block}.{part}.net.0.proj", 4 * width, width)
            made.layer(f"{block}.{part}.net.2", width, 4 * width)
    for i in range(s.singles):
        block = f"single_transformer_blocks.{i}"
        made.layer(f"{block}.norm.linear", 3 * width, width)
        for part in ("to_q", "to_k", "to_v"):
            made.layer(f"{block}.attn.{part}", width, width)
        for norm in ("norm_q", "norm_k"):
            made.weight(f"{block}.attn.{norm}", s.head)
        made.layer(f"{block}.proj_mlp", 4 * width, width)
        made.layer(f"{block}.proj_out", width, 5 * width)
    made.layer("norm_out.linear", 2 * width, width)
    made.layer("proj_out", 64, width)
    return made.shapes


def text_encoder(s: Sizes) -> Shapes:
    """transformers' CLIPTextModel."""
    made = Layers()
    made.weight("text_model.embeddings.token_embedding", s.clip_words, s.clip)
    made.weight("text_model.embeddings.position_embedding", 77, s.clip)
    for i in range(s.clip_layers):
        block = f"text_model.encoder.layers.{i}"
        made.layer(f"{block}.layer_norm1", s.clip)
        made.layer(f"{block}.layer_norm2", s.clip)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            made.layer(f"{block}.self_attn.{part}", s.clip, s.clip)
        made.layer(f"{block}.mlp.fc1", s.clip_inner, s.clip)
        made.layer(f"{block}.mlp.fc2", s.clip, s.clip_inner)
    made.layer("text_model.final_layer_norm", s.clip)
    return made.shapes


def text_encoder_2(s: Sizes) -> Shapes:
    """transformers' T5EncoderModel."""
    inner, made = s.t5_key * s.t5_heads, Layers()
    made.weight("shared", s.t5_words, s.t5)
    attention = "encoder.block.0.layer.0.SelfAttention"
    made.weight(f"{attention}.relative_attention_bias", 32, s.t5_heads)
    for i in range(s.t5_layers):
        block = f"encoder.block.{i}"
        made.weight(f"{block}.layer.0.layer_norm", s.t5)
        for part in ("q", "k", "v"):
            made.weight(f"{block}.layer.0.SelfAttention.{part}", inner, s.t5)
        made.weight(f"{block}.layer.0.SelfAttention.o", s.t5, inner)
        made.weight(f"{block}.layer.1.layer_norm", s.t5)
        made.weight(f"{block}.layer.1.DenseReluDense.wi_0", s.t5_inner, s.t5)
        made.weight(f"{block}.layer.1.DenseReluDense.wi_1", s.t5_inner, s.t5)
        made.weight(f"{block}.layer.1.DenseReluDense.wo", s.t5, s.t5_inner)
    made.weight("encoder.final_layer_norm", s.t5)
    return made.shapes


def vae(s: Sizes) -> Shapes:
    """diffusers' AutoencoderKL."""
    made, channels = Layers(), s.vae_channels

    def resnet(name: str, before: int, width: int) -> None:
        made.layer(f"{name}.norm1", before)
        made.layer(f"{name}.conv1", width, before, 3, 3)
        made.layer(f"{name}.norm2", width)
        made.layer(f"{name}.conv2", width, width, 3, 3)
        if before != width:
            made.layer(f"{name}.conv_shortcut", width, before, 1, 1)

    def half(name: str, kind: str, scale: str, levels: tuple[int, ...], layers: int) -> None:
        before = levels[0]
        for level, width in enumerate(levels):
            for layer in range(layers):
                resnet(f"{name}.{kind}.{level}.resnets.{layer}", before, width)
                before = width
            if level + 1 < len(levels):
                made.layer(f"{name}.{kind}.{level}.{scale}.0.conv", width, width, 3, 3)
        middle = f"{name}.mid_block"
        for layer in range(2):
            resnet(f"{middle}.resnets.{layer}", channels[-1], channels[-1])
        made.layer(f"{middle}.attentions.0.group_norm", channels[-1])
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            made.layer(f"{middle}.attentions.0.{part}", channels[-1], channels[-1])

    made.layer("encoder.conv_in", channels[0], 3, 3, 3)
    half("encoder", "down_blocks", "downsamplers", channels, s.vae_layers)
    made.layer("encoder.conv_norm_out", channels[-1])
    made.layer("encoder.conv_out", 32, channels[-1], 3, 3)
    made.layer("decoder.conv_in", channels[-1], 16, 3, 3)
    half("decoder", "up_blocks", "upsamplers", channels[::-1], s.vae_layers + 1)
    made.layer("decoder.conv_norm_out", channels[0])
    made.layer("decoder.conv_out", 3, channels[0], 3, 3)
    return made.shapes


def configurations(s: Sizes) -> dict[str, dict[str, object]]:
    """The JSON files, by their place in the folder: those of the shipped model with other sizes."""

    def of_demo(place: str, **changes: object) -> dict[str, object]:
        told: dict[str, object] = json.loads((DEMO / place).read_text(encoding="utf-8"))
        told.pop("transformers_version", None)
        return told | changes

    return {
        "model_index.json": of_demo("model_index.json"),
        "scheduler/scheduler_config.json": of_demo("scheduler/scheduler_config.json"),
        "transformer/config.json": of_demo(
            "transformer/config.json",
            attention_head_dim=s.head,
            axes_dims_rope=list(s.axes),
            joint_attention_dim=s.t5,
            num_attention_heads=s.heads,
            num_layers=s.doubles,
            num_single_layers=s.singles,
            pooled_projection_dim=s.clip,
        ),
        "text_encoder/config.json": of_demo(
            "text_encoder/config.json",
            hidden_size=s.clip,
            intermediate_size=s.clip_inner,
            num_attention_heads=s.clip_heads,
            num_hidden_layers=s.clip_layers,
            projection_dim=s.clip,
            vocab_size=s.clip_words,
        ),
        "text_encoder_2/config.json": of_demo(
            "text_encoder_2/config.json",
            d_ff=s.t5_inner,
            d_kv=s.t5_key,
            d_model=s.t5,
            num_decoder_layers=s.t5_layers,
            num_heads=s.t5_heads,
            num_layers=s.t5_layers,
            vocab_size=s.t5_words,
        ),
        "vae/config.json": of_demo(
            "vae/config.json",
            block_out_channels=list(s.vae_channels),
            layers_per_block=s.vae_layers,
            norm_num_groups=s.vae_groups,
            sample_size=1024,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        ),
    }


def bytes_of(shapes: Shapes) -> int:
    """What tensors of these shapes take in bf16."""
    return sum(2 * int(np.prod(shape)) for _, shape in shapes)


def random_block(numbers: int) -> memoryview:
    """bf16 numbers of N(0, 0.02), from which all weights are cut."""
    with ThreadPoolExecutor(8) as threads:
        parts = threads.map(_random_part, range(8), [numbers // 8] * 8)
        return memoryview(np.concatenate(list(parts)).view(np.uint8).data).cast("B")


def _random_part(seed: int, numbers: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(numbers, dtype=np.float32)
    drawn *= DEVIATION
    return (drawn.view(np.uint32) >> 16).astype(np.uint16)


class Writer:
    """Writes components in parallel, from one block of random numbers."""

    def __init__(self, block: memoryview, threads: ThreadPoolExecutor) -> None:
        """Takes the block and the threads that write."""
        self._block, self._threads = block, threads
        self._jobs: list[list[Callable[[], None]]] = []

    def component(
        self, folder: Path, stem: str, shapes: Shapes, shard_bytes: int, start: int
    ) -> None:
        """Queues a component in one file, or in shards with an index. `start` makes it differ from others."""
        folder.mkdir(parents=True, exist_ok=True)
        shards: list[Shapes] = [[]]
        for shape in sorted(shapes):
            if shards[-1] and bytes_of([*shards[-1], shape]) > shard_bytes:
                shards.append([])
            shards[-1].append(shape)
        of = f"{len(shards):05d}"
        names = [f"{stem}-{i:05d}-of-{of}.safetensors" for i in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = [f"{stem}.safetensors"]
        else:
            places = {
                name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard
            }
            index = {"metadata": {"total_size": bytes_of(shapes)}, "weight_map": places}
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for file, shard in zip(names, shards, strict=True):
            self._file(folder / file, shard, start)
            start += bytes_of(shard)

    def finish(self) -> None:
        """Writes everything that is queued: of all files at once, since a file takes one writer at a time."""
        turns = itertools.zip_longest(*self._jobs)
        jobs = [job for turn in turns for job in turn if job is not None]
        for done in [self._threads.submit(job) for job in jobs]:
            done.result()
        self._jobs = []

    def _file(self, path: Path, shapes: Shapes, start: int) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes:
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(fd, 8 + len(text) + end)
        os.close(fd)
        at, cut = 8 + len(text), start
        jobs: list[Callable[[], None]] = []
        self._jobs.append(jobs)
        for name, shape in shapes:
            size = 2 * int(np.prod(shape))
            if len(shape) > 1:
                for offset in range(0, size, WRITE_BYTES):
                    count = min(WRITE_BYTES, size - offset)
                    jobs.append(self._piece(path, at + offset, count, cut + offset))
            else:
                jobs.append(self._norm(path, at, shape[0], name.endswith(".weight")))
            at, cut = at + size, cut + size

    def _piece(self, path: Path, at: int, count: int, cut: int) -> Callable[[], None]:
        def write() -> None:
            whole = len(self._block)
            # An odd stride, so that no two places of a file that lie a block apart are alike.
            begin, left, place = (cut + cut // whole * 4098) % whole & ~1, count, at
            with path.open("r+b", buffering=0) as file:
                while left > 0:
                    piece = self._block[begin : begin + left]
                    done = os.pwrite(file.fileno(), piece, place)
                    begin, left, place = (begin + done) % whole, left - done, place + done

        return write

    def _norm(self, path: Path, at: int, count: int, ones: bool) -> Callable[[], None]:
        def write() -> None:
            with path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), (b"\x80\x3f" if ones else b"\0\0") * count, at)

        return write


def make(models: Path, sizes: Sizes, threads: int, count: int = 2) -> tuple[int, float]:
    """Makes both models, or the first alone, unless they are there.

    Bytes written, and seconds; zeros if nothing was to do.
    """
    done = models / DONE
    told = {"sizes": repr(sizes), "deviation": DEVIATION}
    there = json.loads(done.read_text(encoding="utf-8")) if done.is_file() else {}
    if there.pop("models", 0) >= count and there == told:
        return 0, 0.0
    began = time.monotonic()
    for name in MODELS:
        shutil.rmtree(models / name, ignore_errors=True)
    folders = [models / name for name in MODELS[:count]]
    first, *others = folders
    for folder in folders:
        folder.mkdir(parents=True)
    shared = {
        "vae": vae(sizes),
        "text_encoder": text_encoder(sizes),
        "text_encoder_2": text_encoder_2(sizes),
    }
    weights = transformer(sizes)
    total = count * bytes_of(weights) + sum(map(bytes_of, shared.values()))
    for second in others:
        _place_of_second(second, total, bytes_of(weights))
    with ThreadPoolExecutor(threads) as pool:
        writer = Writer(random_block(sizes.block_numbers), pool)
        stem = "diffusion_pytorch_model"
        for number, folder in enumerate(folders):
            start = number * 2 * sizes.block_numbers // 3
            writer.component(folder / "transformer", stem, weights, sizes.shard_bytes, start)
        for name, shapes in shared.items():
            own = stem if name == "vae" else "model"
            writer.component(first / name, own, shapes, sizes.shard_bytes // 2, 0)
        writer.finish()
    for place, told_there in configurations(sizes).items():
        for folder in folders:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(json.dumps(told_there, indent=2) + "\n")
    for folder in folders:
        for name in ("tokenizer", "tokenizer_2"):
            shutil.copytree(DEMO / name, folder / name)
    for name in shared:
        for file in (first / name).glob("*.safetensors*"):
            for second in others:
                os.link(file, second / name / file.name)
    done.write_text(json.dumps(told | {"models": count}))
    return total, time.monotonic() - began


def _place_of_second(second: Path, total: int, weights: int) -> None:
    """Where the disk cannot hold both transformers, the second one lies in shared memory, behind a link."""
    free = shutil.disk_usage(second).free
    if free >= total + SPARE_BYTES:
        return
    if free < total - weights + SPARE_BYTES or not SHARED_MEMORY.is_dir():
        raise OSError(f"{second}: {total} bytes are to be made, and {free} are free")
    place = SHARED_MEMORY / "moored-gpu-second-transformer"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (second / "transformer").symlink_to(place)
    print(
        f"  the disk has {free} bytes free: the second transformer is made in {place}", flush=True
    )


def evict(folder: Path) -> None:
    """Has the system forget what it read of the files beneath a folder. What a process has mapped stays."""
    os.sync()
    for place, _, names in os.walk(folder, followlinks=True):
        for name in names:
            descriptor = os.open(Path(place) / name, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def warm(folder: Path, threads: int = 16, ending: str = ".safetensors") -> int:
    """Reads all weights beneath a folder, so that they are in the page cache. How many bytes."""
    files = {
        (file.stat().st_dev, file.stat().st_ino): file
        for place, _, names in os.walk(folder, followlinks=True)
        for file in (Path(place) / name for name in names if name.endswith(ending))
    }
    pieces = [
        (file, offset)
        for file in files.values()
        for offset in range(0, file.stat().st_size, READ_BYTES)
    ]

    def read(piece: tuple[Path, int]) -> int:
        file, offset = piece
        buffer, left, done = bytearray(4 << 20), READ_BYTES, 0
        with file.open("rb", buffering=0) as source:
            source.seek(offset)
            while left > 0 and (got := source.readinto(buffer)):
                left, done = left - got, done + got
        return done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, pieces))

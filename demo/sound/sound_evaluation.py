"""The sound model as a diffusers folder: writing it, and judging the sounds that it makes."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import melodies
import sound_judge
import sound_networks
import sound_tokens
import torch
from diffusers import AceStepPipeline
from diffusers.models import AutoencoderOobleck
from melodies import FRAMES, RATE, Melody
from sound_data import LatentBank, encode_silence, open_tokenizer
from sound_networks import SHIFT, STEPS, Player, make_scheduler, make_tokenizers, make_vae
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen2Tokenizer

HERE = Path(__file__).resolve().parent
DEFAULTS = {"steps": STEPS, "seconds": melodies.SECONDS}
REPAINTED = (1.0, 3.0)
"""The window of a repaint, in seconds, that is judged."""


def export(work: Path, out: Path) -> None:
    """Write the averaged weights as an AceStepPipeline folder, in bf16."""
    _, vocabulary = open_tokenizer(out)
    vae = sound_networks.without_weight_norm(make_vae())
    vae.load_state_dict(torch.load(work / "vae.pt", map_location="cpu")["vae"])
    both = nn.ModuleList(make_tokenizers())
    both.load_state_dict(torch.load(work / "tokens.pt", map_location="cpu")["both"])
    player = Player(vocabulary)
    player.load_state_dict(torch.load(work / "flow-average.pt", map_location="cpu"))
    player.condition.silence_latent = encode_silence(vae)
    pipeline = AceStepPipeline(
        vae=sound_networks.with_weight_norm(vae).bfloat16(),
        text_encoder=player.text.bfloat16(),
        tokenizer=Qwen2Tokenizer.from_pretrained(out / "tokenizer"),
        transformer=player.transformer.bfloat16(),
        condition_encoder=player.condition.bfloat16(),
        scheduler=make_scheduler(),
        audio_tokenizer=both[0].bfloat16(),
        audio_token_detokenizer=both[1].bfloat16(),
    )
    pipeline.save_pretrained(out, safe_serialization=True)
    # save_pretrained writes its own form of the tokenizer: keep the plain one.
    shutil.rmtree(out / "tokenizer")
    open_tokenizer(out)
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)
    (out / "moored.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
    for name, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            count = sum(p.numel() for p in module.parameters())
            print(json.dumps({"part": name, "parameters": count}))
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(json.dumps({"bytes": total}), flush=True)


@torch.no_grad()
def judge_samples(
    player: Player,
    vae: AutoencoderOobleck,
    bank: LatentBank,
    tokenizer: Tokenizer,
    lyrics: Tensor,
) -> dict[str, Any]:
    """Judge sounds of the held-out prompts, all made at once, while training goes on."""
    began = time.monotonic()
    rows = [json.loads(line) for line in (HERE / "heldout.jsonl").read_text().splitlines()]
    texts = [sound_tokens.caption(row["prompt"], "text2music", melodies.SECONDS) for row in rows]
    encoded = [entry.ids for entry in tokenizer.encode_batch(texts)]
    device, longest = bank.silence.device, max(len(ids) for ids in encoded)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in encoded], device=device)
    lengths = torch.tensor([[len(ids)] for ids in encoded], device=device)
    mask = torch.arange(longest, device=device)[None] < lengths
    count = len(rows)
    timbre = player.read_timbre(bank.silence).expand(count, -1, -1)
    condition, mask = player.conditions(player.read_text(ids), mask, timbre, lyrics)
    silence = bank.silence[:, :FRAMES].expand(count, -1, -1)
    context = torch.cat([silence, torch.ones_like(silence)], -1)
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(silence.shape, device=device, generator=generator)
    times = torch.linspace(1, 0, STEPS + 1, device=device)
    times = SHIFT * times / (1 + (SHIFT - 1) * times)
    for now, then in zip(times[:-1], times[1:], strict=True):
        velocity = player.velocity(latents, now.expand(count), context, condition, mask)
        latents = latents + (then - now) * velocity
    sounds = vae.decoder(latents.transpose(1, 2))[:, 0].cpu().numpy()
    wanted = [Melody.from_json(row["melody"]) for row in rows]
    result = sound_judge.judge_sounds(((sound, RATE) for sound in sounds), wanted)
    print(json.dumps(result["summary"] | {"judged_s": round(time.monotonic() - began, 2)}))
    return result


def _asked(task: str, row: dict[str, Any], index: int) -> tuple[dict[str, Any], Melody]:
    """What the pipeline is asked besides a prompt, and the melody that should come of it.

    Covers are of the row's melody in another waveform, with a prompt that names no notes. Repaints have the
    row's melody outside of a window.
    """
    melody = Melody.from_json(row["melody"])
    if task == "text2music":
        return {"prompt": row["prompt"], "audio_duration": float(melodies.SECONDS)}, melody
    others = [wave for wave in melodies.WAVES if wave != melody.wave]
    source = melody
    if task == "cover":
        source = Melody(melody.phrases, random.Random(index).choice(others))
    sound = torch.from_numpy(melodies.render(source))[None].expand(2, -1)
    asked: dict[str, Any] = {"task_type": task, "src_audio": sound, "audio_duration": None}
    if task == "cover":
        return asked | {"prompt": f"{melody.wave} wave"}, melody
    start, end = REPAINTED
    window = {"repainting_start": start, "repainting_end": end}
    return asked | window | {"prompt": row["prompt"]}, melody


def evaluate(
    out: Path,
    results: Path,
    device: str,
    rows: list[dict[str, Any]],
    *,
    steps: int,
    task: str,
    shuffled: bool,
) -> dict[str, Any]:
    """Make the sounds of held-out prompts with diffusers in f32 and let the judge count the right ones.

    With `shuffled`, each prompt is that of the next row, and is judged against its own row.
    """
    torch.backends.cudnn.allow_tf32 = False
    pipeline = AceStepPipeline.from_pretrained(out, torch_dtype=torch.float32)
    pipeline.to(device).set_progress_bar_config(disable=True)
    name = f"{'shuffled' if shuffled else 'heldout'}-{task}-{steps}"
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    began, sounds, wanted = time.monotonic(), [], []
    for index, row in enumerate(rows):
        asked, melody = _asked(task, row, index)
        if shuffled:
            asked["prompt"] = _asked(task, rows[(index + 1) % len(rows)], index)[0]["prompt"]
        torch.manual_seed(index)  # a source is sampled by the global generator
        generator = torch.Generator().manual_seed(index)
        made = pipeline(num_inference_steps=steps, generator=generator, **asked).audios
        sound = made[0].float().cpu().numpy().T
        sound_judge.write_wav(folder / f"{index:04d}.wav", sound)
        sounds.append((sound, RATE))
        wanted.append(melody)
    seconds = time.monotonic() - began
    report = sound_judge.judge_sounds(sounds, wanted)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{name}: {seconds / max(len(rows), 1):.2f} s a sound")
    for verdict in report["verdicts"]:
        if not verdict["right"]:
            print(
                f"  {verdict['index']:04d}: {verdict['mistakes']} {rows[verdict['index']]['prompt']}"
            )
    sound_judge.print_summary(report["summary"])
    return report

"""The pack on the stand-in, against the real service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from behaviour import *  # noqa: F403
from behaviour import DEADLINE_S, Serve, film_model, shown
from conftest import HERE, OWN_MODEL, PACK
from prompts import RED, Graph
from sharing import *  # noqa: F403
from standin.executor import StandIn
from waiting import until


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """The stand-in, with the pack linked in under another name, as people do."""
    folder = tmp_path_factory.mktemp("standin")
    linked = folder / "pack.of-nodes"
    linked.symlink_to(PACK)
    standin = StandIn(linked, folder, OWN_MODEL)
    yield standin
    standin.stop()


# What PreviewAudio and PreviewAny show a frontend of a real one is files and text of their own making.


def test_tracks_are_the_clients_own(comfyui: StandIn, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="track")
        made = graph.text_to_music(lyrics="la", seconds=0.5, count=2)
        show = graph.add("PreviewAudio", audio=[made, 0])
        run = comfyui.queue(graph.prompt).succeeded()
        ((samples, rate),) = run.outputs[show]["audio"]
        assert rate == 48_000
        assert samples.shape == (2, 2, 24_000)
        assert np.abs(samples).max() <= 1
        own = client.generate_audio(
            RED, model="track", lyrics="la", seconds=0.5, count=2, seed=7, steps=2
        )
        for one, track in zip(samples, own.tracks, strict=True):
            assert np.array_equal((one.T * 2**15).astype(int), track.array)
        assert (samples[0] != samples[1]).any()
        assert run.texts(made)[-1].startswith("Done in")


def test_a_film_outlives_comfyui(serve: Serve, tmp_path: Path) -> None:
    """ComfyUI is killed while its film is made; the prompt that is queued again gets that film."""
    # So slow that it is not done when ComfyUI is killed.
    service = serve("sim:24GiB", more_models=film_model(tmp_path, 500))
    graph = Graph(service.address, model="film")
    shown(graph, graph.film_parts(graph.text_to_video(steps=10, detach=True)))
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(graph.prompt), encoding="utf-8")
    command = [sys.executable, HERE / "alone.py", tmp_path, prompt]
    with service.client() as client:
        first = subprocess.Popen(command)
        until(client, lambda status: any(job.step > 0 for job in status.jobs))
        (job,) = client.jobs()
        first.kill()
        first.wait(DEADLINE_S)
        subprocess.run(command, check=True, timeout=2 * DEADLINE_S)
        assert [(one.id, one.state) for one in client.jobs(include_ended=True)] == [
            (job.id, "done")
        ]
        subprocess.run(command, check=True, timeout=2 * DEADLINE_S)
        assert len(client.jobs(include_ended=True)) == 2, "what was received is made anew"


def test_a_film_that_is_interrupted_ends_though_it_would_outlive_comfyui(
    comfyui: StandIn, serve: Serve, tmp_path: Path
) -> None:
    service = serve("sim:24GiB", more_models=film_model(tmp_path, 100))
    graph = Graph(service.address, model="film")
    shown(graph, graph.film_parts(graph.text_to_video(steps=100, detach=True)))
    with service.client() as client:
        run = comfyui.queue(graph.prompt)
        until(client, lambda status: any(job.step > 0 for job in status.jobs))
        comfyui.interrupt()
        assert run.done().status == "interrupted"
        until(client, lambda status: not status.jobs)
        assert [job.state for job in client.jobs(include_ended=True)] == ["cancelled"]


def test_music_is_made_of_music(comfyui: StandIn, serve: Serve) -> None:
    service = serve("sim:24GiB")
    metre = {"bpm": 96, "key": "C major", "time_signature": "3", "language": "en"}
    with service.client() as client:
        graph = Graph(service.address, model="track")
        song = graph.text_to_music(seconds=0.5)
        part = graph.repaint_music(
            [song, 0], start_seconds=0.1, end_seconds=0.3, reference=[song, 0], **metre
        )
        cover = graph.cover_music([song, 0], count=2)
        shows = {made: graph.add("PreviewAudio", audio=[made, 0]) for made in (part, cover)}
        run = comfyui.queue(graph.prompt).succeeded()
        asked = {"model": "track", "seed": 7, "steps": 2}
        own = client.generate_audio(RED, seconds=0.5, **asked)
        source = client.put_media(own)
        parts = client.generate_audio(
            RED,
            task="repaint",
            window=(0.1, 0.3),
            init_media=source,
            reference=source,
            **metre,
            **asked,
        )
        covers = client.generate_audio(RED, task="cover", init_media=source, count=2, **asked)
        for made, result in ((part, parts), (cover, covers)):
            ((samples, _),) = run.outputs[shows[made]]["audio"]
            assert samples.shape == (len(result.tracks), 2, 24_000)
            for one, track in zip(samples, result.tracks, strict=True):
                assert np.array_equal((one.T * 2**15).astype(int), track.array)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start_seconds": 0.3, "end_seconds": 0.2}, "Nothing lies between"),
        ({"start_seconds": 0.1, "end_seconds": 0.9}, "after the end of the source"),
    ],
)
def test_a_window_that_is_not_in_the_music_is_reported(
    comfyui: StandIn, serve: Serve, options: dict[str, float], told: str
) -> None:
    graph = Graph(serve("sim:24GiB").address, model="track")
    made = graph.repaint_music([graph.text_to_music(seconds=0.5), 0], **options)
    graph.add("PreviewAudio", audio=[made, 0])
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert told in run.error
    assert "Traceback" not in run.error


def test_a_film_says_its_rate(comfyui: StandIn, serve: Serve) -> None:
    graph = Graph(serve("sim:24GiB").address, model="video")
    for fps in (0.0, 12.5):
        parts = graph.film_parts(graph.text_to_video(fps=fps, frames=1))
        rate = graph.add("PreviewAny", source=[parts, 2])
        run = comfyui.queue(graph.prompt).succeeded()
        assert run.outputs[rate]["text"] == (str(fps or 24.0),)

"""The pack on the stand-in, against the real service."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from behaviour import *  # noqa: F403
from behaviour import Serve
from conftest import PACK
from prompts import RED, Graph
from standin.executor import StandIn


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """The stand-in, with the pack linked in under another name, as people do."""
    folder = tmp_path_factory.mktemp("standin")
    linked = folder / "pack.of-nodes"
    linked.symlink_to(PACK)
    standin = StandIn(linked, folder)
    yield standin
    standin.stop()


# What PreviewAudio and PreviewAny show a frontend of a real one is files and text of their own making.


def test_tracks_are_the_clients_own(comfyui: StandIn, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="track")
        made = graph.audio(lyrics="la", seconds=0.5, count=2)
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


def test_a_film_says_its_rate(comfyui: StandIn, serve: Serve) -> None:
    graph = Graph(serve("sim:24GiB").address, model="video")
    for fps in (0.0, 12.5):
        parts = graph.film_parts(graph.text_to_video(fps=fps, frames=1))
        rate = graph.add("PreviewAny", source=[parts, 2])
        run = comfyui.queue(graph.prompt).succeeded()
        assert run.outputs[rate]["text"] == (str(fps or 24.0),)

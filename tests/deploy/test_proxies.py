"""HAProxy and Envoy before several boxes, as `deploy/` configures them: real ones, before real services."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import subprocess
import threading
import wave
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import moored
import pytest
from conftest import MODELS
from moored._boxes import boxes_of
from proxies import (
    ENVOY_CONFIGURATION,
    HAPROXY_CONFIGURATION,
    Boxes,
    HaProxy,
    Proxy,
    envoy_program,
    haproxy_program,
    running,
)
from waiting import wait_until

from service import run

SMALL = {"width": 64, "height": 64, "steps": 1}


def boxes_with(boxes: Boxes, model: str) -> list[str]:
    """The boxes that have a part of this model on their card."""
    found = []
    for name in boxes.services:
        with boxes.client(name) as client:
            cards = client.status().cards
        keys = [key for card in cards for each in card.residents for key in each.entries]
        if any(key.partition("+")[0] == model for key in keys):
            found.append(name)
    return found


def asked(proxy: Proxy, path: str, body: dict[str, Any] | None = None) -> tuple[str, Any]:
    """An answer over HTTP: the box that a proxy names, and the JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://{proxy.address}{path}", data, {"content-type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        return answer.headers.get("x-moored-box", ""), json.load(answer)


def test_the_configurations_are_valid() -> None:
    checked = subprocess.run(
        [haproxy_program(), "-c", "-f", str(HAPROXY_CONFIGURATION)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr
    checked = subprocess.run(
        [envoy_program(), "--mode", "validate", "-c", str(ENVOY_CONFIGURATION)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "[warning]" not in checked.stderr, checked.stderr


def test_equal_models_go_to_one_box_and_others_to_others(proxy: Proxy, boxes: Boxes) -> None:
    used: dict[str, set[str]] = {}
    with proxy.client() as client:
        # In another order: boxes that take turns would not be the same again.
        for model in (*MODELS, *MODELS[::-1], *MODELS[::3]):
            # Formats and adapters of a model are at its box too.
            name = moored.ModelRef(model, quantization="auto") if model in used else model
            result = client.generate_image("x", model=name, **SMALL)
            used.setdefault(model, set()).add(client.box_of(result.job_id))
    assert all(len(found) == 1 for found in used.values()), used
    assert len(set.union(*used.values())) > 1, used


def test_a_proxy_that_starts_again_sends_models_to_the_same_boxes(
    kind: str, boxes: Boxes, tmp_path: Path
) -> None:
    used = []
    for start in range(6):
        with running(kind, tmp_path / str(start), boxes) as proxy, proxy.client() as client:
            # Right away, with no second in which it could come to know of a box.
            made = [client.generate_image("x", model=model, **SMALL) for model in MODELS]
            addresses = [client.box_of(each.job_id) for each in made]
        used.append(tuple(addresses))
    assert len(set(used)) == 1, used


def test_a_model_that_is_busy_goes_to_a_second_box(proxy: Proxy, boxes: Boxes) -> None:
    with proxy.client() as client, ThreadPoolExecutor(12) as threads:
        for model in ("slow", *MODELS):
            client.generate_image("x", model=model, **SMALL)

        def generate(_: int) -> str:
            # All come before the first of them ends.
            asked = SMALL | {"steps": 5}
            return client.box_of(client.generate_image("x", model="slow", **asked).job_id)

        used = Counter(threads.map(generate, range(12)))
    assert len(used) > 1, used
    # Not a quarter more than on average, and what is rounded up. Envoy may miss that for what comes
    # all at once.
    if isinstance(proxy, HaProxy):
        assert max(used.values()) <= 12 / len(boxes.services) * 1.25 + 1, used


def test_what_a_box_has_is_found_whatever_its_model(proxy: Proxy, boxes: Boxes) -> None:
    with proxy.client() as client:
        for model in MODELS[:4]:
            result = client.generate_image("x", model=model, keep_latent=True, **SMALL)
            (latent,) = result.latents
            assert client.get_latent(latent).data
            # It is decoded where it is, also by a request that names another model or none.
            assert client.decode_latent(latent, model=model).pictures[0].data
            assert client.release_latent(latent)
            assert not client.release_latent(latent)
        media = client.put_media(result.pictures[0].data, model=MODELS[5])
        for model in MODELS[:4]:
            made = client.generate_image("x", model=model, init_media=media, **SMALL)
            assert client.box_of(made.job_id) == client.box_of(media) != ""
        with client.hold(MODELS[0]) as hold:
            assert client.box_of(hold.id)


def test_another_program_fetches_a_job_at_its_box(proxy: Proxy) -> None:
    with proxy.client() as client:
        for model in MODELS[:4]:
            job = client.stream_image("x", model=model, detach=True, **SMALL).leave()
            box = client.box_of(job)
            boxes_of(client.endpoint).__init__()  # type: ignore[misc]  # another program
            with moored.Client(proxy.address, box=box) as other:
                assert other.fetch(job).pictures[0].data


def test_a_client_sees_each_box_by_its_name(proxy: Proxy, boxes: Boxes) -> None:
    if not isinstance(proxy, HaProxy):
        pytest.skip("Envoy calls boxes by names of its own")
    for name in boxes.services:
        with moored.Client(proxy.address, box=name) as client:
            client.load(MODELS[6])
            client.pin(MODELS[6])
            client.unpin(MODELS[6])
    assert boxes_with(boxes, MODELS[6]) == list(boxes.services)


def test_the_command_line_goes_to_the_box_of_its_model(
    proxy: Proxy, boxes: Boxes, tmp_path: Path
) -> None:
    def places(client_id: str) -> dict[str, str]:
        found = {}
        for name in boxes.services:
            with boxes.client(name) as client:
                for job in client.jobs(include_ended=True):
                    if job.client_id == client_id:
                        found[job.model_key.partition("+")[0]] = name
        return found

    with proxy.client(client_id="python") as client:
        for number, model in enumerate(MODELS):
            client.generate_image("x", model=model, **SMALL)
            made = run(
                *("generate", "x", "-m", f"{model}+auto", "--client", "command"),
                *("--endpoint", f"http://{proxy.address}", "-o", str(tmp_path / f"{number}.png")),
            )
            assert made.returncode == 0, made.stderr
    assert places("command") == places("python")
    assert len(set(places("command").values())) > 1


def test_a_session_of_sound_passes(proxy: Proxy) -> None:
    with (
        proxy.client() as client,
        client.audio_session("track", source=wav(), paced=True, once=True) as session,
    ):
        segment = session.play("a slow waltz", seconds=1)
        segment.wait(30)
        session.replace_source(wav())
        assert client.box_of(segment.job_id) == client.box_of(session.opened.session_id) != ""


def test_a_client_that_leaves_ends_its_job(proxy: Proxy, boxes: Boxes) -> None:
    with proxy.client() as client:
        stream = client.stream_image("x", model="slow", width=64, height=64, steps=200)
        next(iter(stream))
        job, box = stream.job_id, client.box_of(stream.job_id)
        stream.close()
    assert job
    name = box if box in boxes.services else ""
    clients = [boxes.client(each) for each in ([name] if name else boxes.services)]
    for each in clients:
        with each:
            wait_until(lambda: all(one.id != job for one in each.jobs()), "the job has ended")  # noqa: B023


def test_the_model_of_a_request_in_json(proxy: Proxy, boxes: Boxes) -> None:
    if not isinstance(proxy, HaProxy):
        pytest.skip("Envoy goes by the header alone")
    with proxy.client() as client:
        for model in MODELS:
            result = client.generate_image("x", model=model, **SMALL)
            body = {"model": f"{model}+auto", "prompt": "x" * 5000, "size": "64x64", "steps": 1}
            box, made = asked(proxy, "/v1/images/generations", body)
            assert box == client.box_of(result.job_id)
            assert made["data"]


def test_films_of_http_are_found_at_their_box(proxy: Proxy) -> None:
    for number in range(4):
        body = {"model": "video", "prompt": f"film {number}", "size": "64x64", "seconds": "1"}
        _, made = asked(proxy, "/v1/videos", body)
        wait_until(
            lambda: asked(proxy, f"/v1/videos/{made['id']}")[1]["status"] == "completed",  # noqa: B023
            "the film is made",
        )
        with urlopen(f"http://{proxy.address}/v1/videos/{made['id']}/content") as answer:
            assert b"ftyp" in answer.read(16)


def test_no_header_leads_elsewhere(proxy: Proxy) -> None:
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        elsewhere.listen()
        elsewhere.setblocking(False)
        address = f"127.0.0.1:{elsewhere.getsockname()[1]}"
        # Envoy writes addresses so.
        for box in (address, base64.b64encode(address.encode()).decode(), "nobody"):
            with moored.Client(proxy.address, box=box) as client:
                with contextlib.suppress(moored.ConnectionFailed):
                    client.server_info()
                with pytest.raises(BlockingIOError):
                    elsewhere.accept()


def test_a_box_that_drains_ends_its_jobs_and_gets_no_new_ones(
    kind: str, own_boxes: Boxes, tmp_path: Path
) -> None:
    with running(kind, tmp_path / "proxy", own_boxes) as proxy, proxy.client() as client:
        kept = client.generate_image("x", model="slow", keep_latent=True, **SMALL)
        (latent,) = kept.latents
        box = name_of(client.box_of(latent), own_boxes, latent)
        stream = client.stream_image("x", model="slow", width=64, height=64, steps=30)
        for event in stream:
            if isinstance(event, moored.Step):
                break
        assert name_of(client.box_of(stream.job_id), own_boxes, latent) == box
        own_boxes.drain(box)
        proxy.wait_down(box)
        # New jobs go to the other one; what the box has is there until it ends.
        other = client.generate_image("x", model="slow", **SMALL)
        assert client.box_of(other.job_id) != client.box_of(latent)
        assert client.get_latent(latent).data
        assert stream.result().pictures[0].data
        assert own_boxes.wait_ended(box) == 0
        own_boxes.start(box)
        proxy.wait_up(box)
        again = client.generate_image("x", model="slow", **SMALL)
        assert client.box_of(again.job_id) == client.box_of(latent)


def test_a_box_that_gives_notice_refuses_no_job(kind: str, models: Path, tmp_path: Path) -> None:
    """SIGTERM alone, without a word to the proxy, while jobs come without a pause."""
    names, ended = ("a", "b"), threading.Event()
    boxes = Boxes(tmp_path / "boxes", models, "--set", "service.notice=6s", names=names)

    def generate(number: int) -> int:
        done = 0
        while not ended.is_set():
            model = MODELS[(number + done) % len(MODELS)]
            client.generate_image("x", model=model, **SMALL)
            done += 1
        return done

    with contextlib.ExitStack() as ends:
        ends.callback(boxes.stop)
        proxy = ends.enter_context(running(kind, tmp_path / "proxy", boxes))
        client = ends.enter_context(proxy.client())
        threads = ends.enter_context(ThreadPoolExecutor(4))
        ends.callback(ended.set)
        made = [threads.submit(generate, number) for number in range(4)]
        for name in names:
            boxes.drain(name)
            assert boxes.wait_ended(name) == 0
            boxes.start(name)
            proxy.wait_up(name)
        ended.set()
        assert all(each.result() > 0 for each in made)


def test_a_box_that_is_lost_costs_its_own_jobs_and_no_others(
    kind: str, own_boxes: Boxes, tmp_path: Path
) -> None:
    with running(kind, tmp_path / "proxy", own_boxes) as proxy, proxy.client() as client:
        (latent,) = client.generate_image("x", model="slow", keep_latent=True, **SMALL).latents
        box = name_of(client.box_of(latent), own_boxes, latent)
        stream = client.stream_image("x", model="slow", width=64, height=64, steps=100)
        next(iter(stream))
        own_boxes.kill(box)
        with pytest.raises(moored.ConnectionFailed):
            stream.result()
        # At once: nothing of a request has reached a box that refuses the connection.
        other = client.generate_image("x", model="slow", **SMALL)
        assert client.box_of(other.job_id) != client.box_of(latent)
        # What only the lost box had is an error, and not another box's answer.
        with pytest.raises(moored.ConnectionFailed):
            client.get_latent(latent)


def name_of(told: str, boxes: Boxes, latent: moored.LatentInfo) -> str:
    """The box that a proxy calls so: Envoy's names are of its own, and the box is that with the latent."""
    if told in boxes.services:
        return told
    for name in boxes.services:
        with boxes.client(name) as client:
            try:
                client.get_latent(latent)
            except moored.LatentNotFound:
                continue
            return name
    raise AssertionError(f"no box has {latent}")


def wav() -> bytes:
    """A second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as track:
        track.setnchannels(2)
        track.setsampwidth(2)
        track.setframerate(48_000)
        track.writeframes(bytes(48_000 * 4))
    return file.getvalue()

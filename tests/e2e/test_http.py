"""The API over HTTP: OpenAI's own client, health, metrics, and requests that are wrong."""

from __future__ import annotations

import base64
import io
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moored
import numpy as np
import openai
import pytest
import trustme
from PIL import Image
from test_access import make_token
from waiting import until, wait_until

from service import ROOT, Service

Simulate = Callable[..., Service]
# OpenAI ends its own service of films; others have its form.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
SMALL: dict[str, Any] = {"model": "small", "prompt": "a boat", "size": "64x64"}


@pytest.fixture
def service(simulate: Simulate) -> Service:
    return simulate("sim:24GiB")


@pytest.fixture
def ai(service: Service) -> Iterator[openai.OpenAI]:
    with client_of(service) as client:
        yield client


def client_of(service: Service, token: str = "none") -> openai.OpenAI:
    """OpenAI's client of a service. It asks once: what is retried is not seen."""
    return openai.OpenAI(base_url=f"http://{service.address}/v1", api_key=token, max_retries=0)


def pixels(data: str | bytes | None) -> Any:
    assert data is not None
    file = base64.b64decode(data) if isinstance(data, str) else data
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def get(service: Service, path: str, **headers: str) -> tuple[int, str]:
    """Status and body."""
    request = urllib.request.Request(f"http://{service.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def png(color: tuple[int, ...] = (200, 30, 40), side: int = 64, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (side, side), color).save(out, "PNG")
    return out.getvalue()


def test_a_picture_is_that_of_grpc(service: Service, ai: openai.OpenAI) -> None:
    made = ai.images.generate(**SMALL, n=2, extra_body={"seed": 3, "steps": 2})
    with service.client() as client:
        own = client.generate_image(
            "a boat", model="small", width=64, height=64, count=2, seed=3, steps=2
        )
    assert made.data is not None
    for one, picture in zip(made.data, own.pictures, strict=True):
        assert np.array_equal(pixels(one.b64_json), pixels(picture.data))
    assert (made.size, made.output_format) == ("64x64", "png")
    jpeg = ai.images.generate(**SMALL, response_format="url", output_format="jpeg")
    assert jpeg.data is not None
    assert str(jpeg.data[0].url).startswith("data:image/jpeg;base64,")


def test_a_stream_has_partial_pictures_and_each_whole_one(ai: openai.OpenAI) -> None:
    stream = ai.images.generate(
        **SMALL | {"model": "slow"}, stream=True, partial_images=2, extra_body={"steps": 100}
    )
    events = list(stream)
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [getattr(event, "partial_image_index", None) for event in events] == [0, 1, None]
    assert pixels(events[-1].b64_json).shape == (64, 64, 3)


def test_a_client_that_leaves_ends_its_job(service: Service, ai: openai.OpenAI) -> None:
    stream = ai.images.generate(
        **SMALL | {"model": "slow"}, stream=True, partial_images=1, extra_body={"steps": 200}
    )
    next(iter(stream))
    with service.client() as client:
        (job,) = client.jobs()
        assert job.client_id.startswith("OpenAI/Python")
        stream.close()
        until(client, lambda status: not status.jobs)
        assert [job.state for job in client.jobs(include_ended=True)] == ["cancelled"]


def test_pictures_are_edited(service: Service, ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "a boat", "extra_body": {"seed": 3}}
    edited = ai.images.edit(image=("a.png", png()), **asked)
    assert edited.data is not None
    with service.client() as client:
        own = client.generate_image("a boat", model="small", init_image=png(), seed=3)
    assert np.array_equal(pixels(edited.data[0].b64_json), pixels(own.data))
    with pytest.raises(openai.BadRequestError) as refused:
        ai.images.edit(image=("a.png", b"no picture"), **asked)
    assert refused.value.body["code"] == "invalid_request"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="image"):
        ai.images.edit(image=[], **asked)


def test_a_film_is_a_job_with_states_and_content(service: Service, ai: openai.OpenAI) -> None:
    begun = ai.videos.create(model="video", prompt="a boat", seconds="1")  # type: ignore[arg-type]
    assert begun.status in ("queued", "in_progress")
    film = ai.videos.poll(begun.id, poll_interval_ms=100)
    assert (film.id, film.status, film.progress) == (begun.id, "completed", 100)
    assert film.completed_at is not None
    assert film.expires_at is not None
    assert begun.created_at - 1 <= film.created_at <= film.completed_at < film.expires_at
    content = ai.videos.download_content(film.id).read()
    assert content[4:8] == b"ftyp"
    with service.client() as client:
        own = client.fetch(film.id)
        assert isinstance(own, moored.VideoResult)
        assert own.films[0].data == content
    assert [one.id for one in ai.videos.list()] == [film.id]
    assert ai.videos.delete(film.id).deleted
    with pytest.raises(openai.NotFoundError):
        ai.videos.retrieve(film.id)
    with service.client() as client, pytest.raises(moored.JobNotFound):
        client.fetch(film.id)


def test_music_has_a_path_of_its_own(service: Service) -> None:
    asked = {"prompt": "a flute", "model": "track", "seconds": 1, "response_format": "file"}
    request = urllib.request.Request(
        f"http://{service.address}/v1/music/generations",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"] == "audio/wav"
        assert answer.read(4) == b"RIFF"


def test_models_are_listed(ai: openai.OpenAI) -> None:
    assert {"small", "video", "track"} <= {model.id for model in ai.models.list()}
    assert ai.models.retrieve("small").owned_by == "moored"
    with pytest.raises(openai.NotFoundError) as missing:
        ai.models.retrieve("nobody/nothing")
    assert missing.value.body["code"] == "model_not_found"  # type: ignore[index]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"size": "large"}, "size"),
        ({"size": "17x16"}, "size"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"stream": True, "partial_images": 9}, "partial_images"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"extra_body": {"steps": 100_000}}, "steps"),
        ({"extra_body": {"sampler": "heun"}}, "sampler"),
        ({"extra_body": {"sampler": "euler"}}, "sampler"),  # the shipped model has one way alone
    ],
)
def test_a_wrong_field_is_named(ai: openai.OpenAI, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.images.generate(**SMALL | asked)
    assert refused.value.param == field
    assert refused.value.type == "invalid_request_error"


def test_what_is_no_request_is_refused(service: Service) -> None:
    for path, body, kind in [
        ("/v1/images/generations", b"{", "application/json"),
        ("/v1/images/generations", b"{}", "text/plain"),
        ("/v1/images/edits", b"nothing", "multipart/form-data; boundary=x"),
        ("/v1/images/edits", b"{}", "application/json"),
        ("/v1/videos", b"[1]", "application/json"),
    ]:
        request = urllib.request.Request(
            f"http://{service.address}{path}", data=body, headers={"Content-Type": kind}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert 400 <= refused.value.code < 500, path
    assert get(service, "/v1/nothing")[0] == 404
    assert get(service, "/v1/images/generations")[0] == 405
    with service.client() as client:
        assert not client.jobs(include_ended=True)


def test_tokens_and_roles_hold_over_http(simulate: Simulate, tmp_path: Path) -> None:
    state = tmp_path / "state-0"
    observer = make_token(state, "olga", role="observe")
    alice, bob = (make_token(state, name) for name in ("alice", "bob"))
    service = simulate("sim:24GiB")
    with pytest.raises(openai.AuthenticationError):
        client_of(service, "wrong").images.generate(**SMALL)
    watching = client_of(service, observer)
    assert list(watching.models.list())
    with pytest.raises(openai.PermissionDeniedError) as refused:
        watching.images.generate(**SMALL)
    assert refused.value.body["code"] == "role_required"  # type: ignore[index]
    assert client_of(service, alice).images.generate(**SMALL).data
    film = client_of(service, alice).videos.create(model="video", prompt="a boat")
    wait_until(
        lambda: client_of(service, alice).videos.retrieve(film.id).status == "completed", "the film"
    )
    assert client_of(service, alice).videos.download_content(film.id).read()
    with pytest.raises(openai.NotFoundError):
        client_of(service, bob).videos.download_content(film.id)
    with pytest.raises(openai.NotFoundError):
        client_of(service, bob).videos.delete(film.id)
    assert not list(client_of(service, bob).videos.list())
    assert [one.id for one in client_of(service, alice).videos.list()] == [film.id]
    # Health needs no token, as load balancers have none.
    assert get(service, "/livez") == (200, "ok\n")
    assert get(service, "/readyz") == (200, "ok\n")
    assert get(service, "/metrics")[0] == 401
    assert get(service, "/metrics", Authorization=f"Bearer {observer}")[0] == 200


@pytest.mark.parametrize("http2", [False, True], ids=["1.1", "2"])
def test_http_1_and_2_are_served_in_tls(simulate: Simulate, tmp_path: Path, http2: bool) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    for blob in made.cert_chain_pems:
        blob.write_to_path(tmp_path / "certificate.pem", append=True)
    given = ("certificate=certificate.pem", "certificate_key=key.pem")
    settings = [
        f"service.{name}={tmp_path}/{file}" for name, file in (one.split("=") for one in given)
    ]
    service = simulate(
        "sim:24GiB", arguments=tuple(word for one in settings for word in ("--set", one))
    )
    trust = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
    trust.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
    host, _, port = service.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as plain:
        with trust.wrap_socket(plain, server_hostname=host) as line:
            assert line.selected_alpn_protocol() == ("h2" if http2 else "http/1.1")
            if not http2:
                line.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                answer = b"".join(iter(lambda: line.recv(4096), b""))
                assert answer.startswith(b"HTTP/1.1 200"), answer


def test_requests_of_pages_of_other_sites_are_refused(service: Service) -> None:
    """A form needs no leave of a browser to be sent to this machine, and a name may be given its address."""
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example:50051"},
    ):
        assert get(service, "/v1/models", **headers)[0] == 403, headers
        form = {"Content-Type": "multipart/form-data; boundary=x"} | headers
        body = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na boat\r\n--x--\r\n'
        request = urllib.request.Request(
            f"http://{service.address}/v1/videos", data=body, headers=form
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert json.loads(refused.value.read())["error"]["code"] == "other_site"
    assert get(service, "/v1/models", Origin=f"http://{service.address}")[0] == 200
    assert get(service, "/livez", Host="evil.example")[0] == 200
    with service.client() as client:
        assert not client.jobs(include_ended=True)


def test_metrics_add_up_and_the_document_is_the_one_that_is_checked_in(service: Service) -> None:
    with service.client() as client:
        client.generate_image("a boat", model="small", width=64, height=64)
    status, text = get(service, "/metrics")
    assert status == 200
    assert text.rstrip().endswith("# EOF")
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    accounts = [
        value for name, value in values.items() if name.startswith("moored_card_memory_bytes")
    ]
    assert sum(accounts) == values['moored_card_capacity_bytes{card="sim:0"}'] == 24 << 30
    assert values['moored_card_ready{card="sim:0"}'] == 1
    assert values['moored_jobs{state="running"}'] == 0
    assert any(name.startswith("moored_component_bytes") for name in values)
    served = json.loads(get(service, "/openapi.json")[1])
    assert served == json.loads((ROOT / "docs/openapi.json").read_text(encoding="utf-8"))

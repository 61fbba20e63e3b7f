"""The API over HTTP as other programs call it: Open WebUI, LibreChat and LiteLLM.

Each request is rebuilt from what a version of the program sends, and only what it reads of the answer
is read. OpenAI's own client is in `test_http.py`, and the form of AUTOMATIC1111 in `test_http_a1111.py`.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import aiohttp
import moored
import pytest
from test_access import make_token
from test_http import pixels, png
from waiting import wait_until

from service import INSTANT_MODELS, Service

Simulate = Callable[..., Service]
Part = tuple[str, bytes, str | None, str | None]
"""Name, content, file name and media type of a part of a form."""

JSON = {"Content-Type": "application/json"}
SIZE = "64x64"
RED, BLUE = (200, 30, 40), (30, 40, 200)


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def send(
    service: Service,
    verb: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """The answer to a request, on a connection of its own.

    A `dict` is sent as JSON, bytes as they are, and pieces in chunks.
    """
    given = dict(headers or {})
    if isinstance(body, dict):
        body, given = json.dumps(body).encode(), JSON | given
    host, _, port = service.address.rpartition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        line.request(verb, path, body, given, encode_chunked=not isinstance(body, bytes))
        answer = line.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        line.close()


def form_of(parts: list[Part], boundary: str) -> bytes:
    """The body of a form."""
    out = b""
    for name, content, file, kind in parts:
        named = f'; filename="{file}"' if file is not None else ""
        typed = f"\r\nContent-Type: {kind}" if kind is not None else ""
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}{typed}\r\n\r\n'
        )
        out += head.encode() + content + b"\r\n"
    return out + f"--{boundary}--\r\n".encode()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    state = tmp_path_factory.mktemp("state")
    service = Service("--models", str(INSTANT_MODELS), state=state, devices=("sim:24GiB",))
    yield service
    assert service.stop() == 0


@pytest.fixture
def client(service: Service) -> Iterator[moored.Client]:
    with service.client() as client:
        yield client


# Open WebUI 0.6 to 0.7, as of October 2026, with the image engine `openai`: it sends by aiohttp.


def by_open_webui(
    service: Service,
    path: str,
    *,
    body: dict[str, Any] | None = None,
    form: aiohttp.FormData | None = None,
    token: str = "none",
) -> tuple[int, str | None, dict[str, Any]]:
    """Status, phrase of the status, and answer. It reads JSON whatever the answer's type is."""

    async def ask() -> tuple[int, str | None, dict[str, Any]]:
        headers = {
            "Authorization": f"Bearer {token}",
            # Sent where the administrator has switched it on.
            "X-OpenWebUI-User-Name": "Ann%20A",
            "X-OpenWebUI-User-Id": "1",
            "X-OpenWebUI-User-Email": "ann@example.org",
            "X-OpenWebUI-User-Role": "user",
        }
        url = f"http://{service.address}/v1{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, data=form, headers=headers) as answer,
        ):
            return answer.status, answer.reason, await answer.json(content_type=None)

    return asyncio.run(ask())


def picture_by_open_webui(image: dict[str, str]) -> Any:
    """A picture as it reads it: the address first, which may be a `data:` address."""
    if address := image.get("url"):
        head, encoded = address.split(",", 1)
        assert head.startswith("data:image/")
        return pixels(encoded)
    return pixels(image["b64_json"])


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({"model": "small", "size": SIZE, "response_format": "b64_json"}, (64, 64, 3)),
        # Without `response_format` for names that begin with gpt-image; without `size` if none is set.
        ({"model": "gpt-image-1"}, None),
        ({"model": "gpt-image-1.5", "size": "auto"}, None),
        # What an administrator may add to each request.
        ({"model": "small", "size": SIZE, "steps": 1, "seed": 3, "quality": "low"}, (64, 64, 3)),
        ({"model": "small", "size": SIZE, "response_format": "url"}, (64, 64, 3)),
    ],
)
def test_open_webui_makes_pictures(
    service: Service, given: dict[str, Any], shape: tuple[int, ...] | None
) -> None:
    body = {"prompt": "a boat", "n": 2, **given}
    status, _, answer = by_open_webui(service, "/images/generations?api-version=1", body=body)
    assert status == 200, answer
    pictures = [picture_by_open_webui(image) for image in answer["data"]]
    assert len(pictures) == 2
    assert shape is None or [one.shape for one in pictures] == [shape] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_open_webui_edits_pictures(service: Service, count: int) -> None:
    form = aiohttp.FormData()
    fields = {"model": "small", "prompt": "a boat", "n": 1, "size": SIZE, "background": "auto"}
    for name, value in {**fields, "response_format": "b64_json"}.items():
        form.add_field(name, str(value))
    for color in [RED, BLUE][:count]:
        # One picture is `image`; of several, each is `image[]`.
        name = "image" if count == 1 else "image[]"
        form.add_field(name, png(color), filename=f"{uuid.uuid4()}.png", content_type="image/png")
    status, _, answer = by_open_webui(service, "/images/edits", form=form)
    assert status == 200, answer
    assert picture_by_open_webui(answer["data"][0]).shape == (64, 64, 3)


def test_open_webui_is_told_by_the_status_that_something_is_wrong(service: Service) -> None:
    """Its users see the phrase of the status, and nothing of the answer."""
    for body, told in [
        ({"model": "small", "prompt": "a boat", "size": "17x16"}, (400, "Bad Request")),
        ({"model": "nobody", "prompt": "a boat", "size": SIZE}, (404, "Not Found")),
    ]:
        status, phrase, answer = by_open_webui(service, "/images/generations", body=body)
        assert (status, phrase) == told
        assert answer["error"]["message"]


def test_open_webui_lists_the_models_of_a_connection(service: Service) -> None:
    """A connection is checked by its list of models; without a key it sends no Authorization."""
    for headers in ({"Authorization": "Bearer none"}, {}):
        answer = send(service, "GET", "/v1/models", headers=JSON | headers)
        assert answer.status == 200
        listed = answer.json()["data"]
        assert {"small", "video"} <= {model["id"] for model in listed}
        assert all(model["owned_by"] for model in listed)


# LibreChat 0.8, as of November 2026: its tools for agents `image_gen_oai` and `image_edit_oai`, by
# IMAGE_GEN_OAI_BASEURL and IMAGE_GEN_OAI_MODEL. Pictures are made by OpenAI's client for JavaScript, edits
# are sent by axios.

OPENAI_JS = {
    "Accept": "application/json",
    "Authorization": "Bearer none",
    "User-Agent": "OpenAI/JS 5.8.2",
    "X-Stainless-Lang": "js",
    "X-Stainless-Package-Version": "5.8.2",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "node",
    "X-Stainless-Runtime-Version": "v20.19.5",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Timeout": "600",
}
AXIOS = {
    "Accept": "application/json, text/plain, */*",
    "Accept-Encoding": "gzip, compress, deflate, br",
    "Authorization": "Bearer none",
    "User-Agent": "axios/1.12.2",
}
OF_LIBRECHAT = {
    "prompt": "a boat",
    "n": 1,
    "background": "auto",
    "output_format": "png",
    "quality": "auto",
    "size": "auto",
    "moderation": "low",
}


@pytest.mark.parametrize("asked", [{"model": "small"}, {"model": "gpt-image-1"}])
def test_librechat_makes_a_picture(service: Service, asked: dict[str, str]) -> None:
    # Some versions send `response_format` where a base URL is set.
    for more in ({}, {"response_format": "b64_json"}):
        body = OF_LIBRECHAT | asked | more
        answer = send(service, "POST", "/v1/images/generations", body, OPENAI_JS)
        assert answer.status == 200, answer.body
        told = answer.json()
        assert pixels(told["data"][0]["b64_json"]).size > 0
        assert told["output_format"] == "png"


@pytest.mark.parametrize("output_format", ["webp", "jpeg"])
def test_librechat_names_the_format_of_a_picture(service: Service, output_format: str) -> None:
    """It makes a `data:` address with the name of the format that it asked for."""
    body = {**OF_LIBRECHAT, "model": "small", "output_format": output_format}
    body |= {"output_compression": 100}
    answer = send(service, "POST", "/v1/images/generations", body, OPENAI_JS)
    assert answer.status == 200, answer.body
    data = base64.b64decode(answer.json()["data"][0]["b64_json"])
    signature = {"webp": b"WEBP", "jpeg": b"\xff\xd8\xff"}[output_format]
    assert signature in data[:16]


def events_by_openai_js(body: bytes) -> list[Any]:
    """The events of a stream as OpenAI's client for JavaScript reads them: the data of each, as JSON."""
    assert body.endswith(b"\n\n")
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        data = [
            line.removeprefix("data:").removeprefix(" ") for line in lines if line[:5] == "data:"
        ]
        if data:
            found.append(json.loads("\n".join(data)))
    return found


def test_partial_pictures_are_streamed_as_openai_js_reads_them(service: Service) -> None:
    """LibreChat's forks ask for them, with 3 partial pictures."""
    asked = {"model": "slow", "steps": 100, "stream": True, "partial_images": 3}
    answer = send(service, "POST", "/v1/images/generations", OF_LIBRECHAT | asked, OPENAI_JS)
    assert answer.headers.get_content_type() == "text/event-stream"
    *partial, completed = events_by_openai_js(answer.body)
    assert [one["type"] for one in partial] == ["image_generation.partial_image"] * 3
    assert [one["partial_image_index"] for one in partial] == [0, 1, 2]
    assert completed["type"] == "image_generation.completed"
    for event in (*partial, completed):
        assert pixels(event["b64_json"]).size > 0
    for name in ("created_at", "size", "quality", "background", "output_format", "usage"):
        assert name in completed, name


def test_a_stream_that_fails_has_an_error_that_openai_js_raises(
    service: Service, client: moored.Client
) -> None:
    """It raises what an event has as `error`."""
    asked = {"model": "slow", "steps": 200, "stream": True, "partial_images": 1}
    host, _, port = service.address.rpartition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=60)
    body = json.dumps(OF_LIBRECHAT | asked)
    line.request("POST", "/v1/images/generations", body, OPENAI_JS | JSON)
    answer = line.getresponse()
    (job,) = client.jobs()
    assert job.client_id == "OpenAI/JS"
    assert client.cancel(job.id)
    error = events_by_openai_js(answer.read())[-1]["error"]
    line.close()
    assert (error["code"], error["param"]) == ("cancelled", None)
    assert error["message"]


def test_librechat_edits_pictures(service: Service) -> None:
    """It sends the form in chunks, since it does not know how long its streams of files are."""
    boundary = "--------------------------104857600000000000000001"
    texts = {"model": "small", "prompt": "a boat", "quality": "auto", "size": "auto", "n": "1"}
    texts |= {"background": "auto", "output_format": "png", "response_format": "b64_json"}
    parts: list[Part] = [(name, text.encode(), None, None) for name, text in texts.items()]
    parts += [
        ("image[]", png(color), f"{at}.png", "image/png") for at, color in enumerate([RED, BLUE])
    ]
    form = form_of(parts, boundary)
    pieces = (form[at : at + 100] for at in range(0, len(form), 100))
    headers = AXIOS | {
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Transfer-Encoding": "chunked",
    }
    answer = send(service, "POST", "/v1/images/edits", pieces, headers)
    assert answer.status == 200, answer.body
    assert pixels(answer.json()["data"][0]["b64_json"]).size > 0


def test_openai_js_is_told_what_to_do_next(service: Service) -> None:
    """Its errors have the message of the answer, which LibreChat gives to the language model."""
    body = {**OF_LIBRECHAT, "model": "nobody"}
    answer = send(service, "POST", "/v1/images/generations", body, OPENAI_JS)
    assert answer.status == 404
    error = answer.json()["error"]
    assert "nobody" in error["message"]
    assert {"type", "param", "code"} <= error.keys()


# LiteLLM 1.110.2, with `openai/MODEL` and `api_base`. Pictures are made by OpenAI's client for Python; the
# rest is sent by httpx. It was also run itself against the service: its dependencies are too many to be
# installed for these tests.

LITELLM = {
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate",
    "Authorization": "Bearer none",
    "User-Agent": "litellm/1.110.2",
}
BOUNDARY = "7b048fb73fcb77881dd834281ef8d633"


def form_by_litellm(service: Service, path: str, parts: list[Part]) -> Answer:
    headers = LITELLM | {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return send(service, "POST", path, form_of(parts, BOUNDARY), headers)


@pytest.mark.parametrize("count", [1, 2])
def test_litellm_edits_pictures(service: Service, count: int) -> None:
    """Also one picture is `image[]`."""
    parts: list[Part] = [("model", b"small", None, None), ("prompt", b"a boat", None, None)]
    parts += [("image[]", png(), "image.png", "image/png")] * count
    answer = form_by_litellm(service, "/v1/images/edits", parts)
    assert answer.status == 200, answer.body
    told = answer.json()
    assert pixels(told["data"][0]["b64_json"]).shape == (64, 64, 3)
    assert isinstance(told["created"], int)
    assert told["usage"]["input_tokens_details"] == {"image_tokens": 0, "text_tokens": 0}


@pytest.mark.parametrize("start", [False, True], ids=["prompt", "picture"])
def test_litellm_makes_a_film(service: Service, start: bool) -> None:
    texts = {"model": "video", "prompt": "a boat", "seconds": "1", "size": SIZE}
    parts: list[Part] = [(name, text.encode(), None, None) for name, text in texts.items()]
    if start:
        parts.append(("input_reference", png(), "input_reference.png", "image/png"))
    answer = form_by_litellm(service, "/v1/videos", parts)
    assert answer.status == 200, answer.body
    film = answer.json()
    assert film["object"] == "video"
    at = f"/v1/videos/{film['id']}"

    def is_completed() -> bool:
        asked = send(service, "GET", at, headers=LITELLM).json()
        assert asked["status"] in ("queued", "in_progress", "completed"), asked
        assert 0 <= asked["progress"] <= 100
        return bool(asked["status"] == "completed")

    wait_until(is_completed, "the film")
    content = send(service, "GET", f"{at}/content", headers=LITELLM)
    assert (content.status, content.body[4:8]) == (200, b"ftyp")
    listed = send(service, "GET", "/v1/videos", headers=LITELLM).json()
    assert listed["data"][0]["id"] == film["id"]
    assert {"first_id", "last_id", "has_more"} <= listed.keys()
    assert send(service, "DELETE", at, headers=LITELLM).json()["deleted"] is True


def test_litellm_asks_for_the_models(service: Service) -> None:
    """It takes their ids for those of the provider `openai`."""
    answer = send(service, "GET", "/v1/models", headers=LITELLM)
    assert {"small", "moored/demo"} <= {model["id"] for model in answer.json()["data"]}


def test_a_model_with_a_slash_is_there_for_every_role(simulate: Simulate, tmp_path: Any) -> None:
    """Programs write the slash as it is, or as %2F."""
    token = make_token(tmp_path / "state-0", "olga", role="observe")
    service = simulate("sim:24GiB")
    for name in ("moored%2Fdemo", "moored/demo"):
        headers = LITELLM | {"Authorization": f"Bearer {token}"}
        answer = send(service, "GET", f"/v1/models/{name}", headers=headers)
        assert (answer.status, answer.json().get("id")) == (200, "moored/demo")


ADDRESS = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    "kind",
    [
        "json",
        "json with image_url",
        "form",
        # So OpenAI's client for Python sends `input_reference={"image_url": ...}`.
        "form with image_url",
    ],
)
def test_a_start_picture_may_be_an_address_of_data(service: Service, kind: str) -> None:
    """What is no picture is refused, and another address is not followed."""

    def started(address: str) -> Answer:
        if kind.startswith("json"):
            given: Any = address if kind == "json" else {"image_url": address}
            body = {"model": "video", "prompt": "a boat", "input_reference": given}
            return send(service, "POST", "/v1/videos", body, LITELLM)
        name = "input_reference" + ("[image_url]" if "image_url" in kind else "")
        texts = {"model": "video", "prompt": "a boat", name: address}
        parts: list[Part] = [(each, text.encode(), None, None) for each, text in texts.items()]
        return form_by_litellm(service, "/v1/videos", parts)

    answer = started(ADDRESS)
    assert answer.status == 200, answer.body
    at = f"/v1/videos/{answer.json()['id']}"
    assert send(service, "DELETE", at, headers=LITELLM).json()["deleted"] is True
    for wrong in ("data:image/png;base64,bm8gcGljdHVyZQ==", f"http://{service.address}/a.png"):
        refused = started(wrong)
        assert refused.status == 400
        assert refused.json()["error"]["param"] == "input_reference"


def test_a_film_tells_its_model_and_length_as_they_were_asked_for(service: Service) -> None:
    """LiteLLM counts costs by `seconds`. In OpenAI's clients it and `size` are always there."""
    body = {"model": "video", "prompt": "a boat", "seconds": "1", "size": SIZE}
    film = send(service, "POST", "/v1/videos", body, LITELLM).json()
    assert (film["model"], film["size"]) == ("video", SIZE)
    assert float(film["seconds"]) == pytest.approx(1, abs=0.1)

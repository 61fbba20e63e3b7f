"""The form of AUTOMATIC1111's web UI over HTTP, as Open WebUI, SillyTavern and LibreChat call it.

Each request is rebuilt from what a version of the program sends, and only what it reads of the answer
is read.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import moored
import pytest
from test_access import make_token
from test_http import pixels, png
from test_http_clients import Answer, send
from waiting import until, wait_until

from service import Service

Simulate = Callable[..., Service]


@pytest.fixture
def service(simulate: Simulate) -> Service:
    return simulate("sim:24GiB")


def basic(credentials: str) -> str:
    """A header of Basic authorization, for `user:password`."""
    return "Basic " + base64.b64encode(credentials.encode()).decode()


def told(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    assert answer.headers.get_content_type() == "application/json"
    return answer.json()


# SillyTavern 1.12 to 1.17, `src/endpoints/stable-diffusion.js`, source "Stable Diffusion Web UI". Its server
# sends by node-fetch. It puts the address and the credentials into the body too, and sends Basic
# authorization also where its user has set none.

NODE_FETCH = {"User-Agent": "node-fetch", "Accept": "*/*", "Accept-Encoding": "gzip, deflate, br"}
WITHOUT_CREDENTIALS = NODE_FETCH | {"Authorization": "Basic "}
OF_SILLY_TAVERN: dict[str, Any] = {
    "url": "http://127.0.0.1:50051",
    "auth": "",
    "prompt": "a boat",
    "negative_prompt": "lowres, bad anatomy, worst quality, low quality",
    "sampler_name": "DDIM",
    "scheduler": "normal",
    "steps": 4,
    "cfg_scale": 7,
    "width": 64,
    "height": 64,
    "restore_faces": False,
    "enable_hr": False,
    "hr_upscaler": "Latent",
    "hr_scale": 2,
    "hr_additional_modules": [],
    "denoising_strength": 0.7,
    "hr_second_pass_steps": 0,
    "seed": 3,
    "override_settings": {"CLIP_stop_at_last_layers": 1},
    "override_settings_restore_afterwards": True,
    "clip_skip": 1,
    "save_images": True,
    "send_images": True,
    "do_not_save_grid": False,
    "do_not_save_samples": False,
}


def ask(service: Service, path: str, headers: dict[str, str] = WITHOUT_CREDENTIALS) -> Any:
    """The answer of a path that is only read."""
    return told(send(service, "GET", f"/sdapi/v1/{path}", headers=headers))


def choose(service: Service, model: str, headers: dict[str, str] = WITHOUT_CREDENTIALS) -> None:
    """Sets the model of requests that name none."""
    body = {"sd_model_checkpoint": model}
    assert send(service, "POST", "/sdapi/v1/options", body, headers).status == 200


def make(
    service: Service, body: dict[str, Any], headers: dict[str, str] = WITHOUT_CREDENTIALS
) -> Any:
    return told(send(service, "POST", "/sdapi/v1/txt2img", body, headers))


def test_sillytavern_connects_and_fills_its_lists(service: Service) -> None:
    options = ask(service, "options")
    assert "forge_preset" not in options  # else it sends settings of Forge
    titles = [model["title"] for model in ask(service, "sd-models")]
    assert options["sd_model_checkpoint"] in titles
    assert "small" in titles
    assert not {"video", "track"} & set(titles)  # only models of pictures
    assert all(isinstance(one["name"], str) for one in ask(service, "samplers"))
    assert all(isinstance(one["name"], str) for one in ask(service, "schedulers"))
    # It puts the latent modes after the first upscaler.
    assert ask(service, "upscalers")[0]["name"] == "None"
    assert [one["name"] for one in ask(service, "latent-upscale-modes")] == []
    # It takes the list of whichever of the two answers.
    assert [one["model_name"] for one in ask(service, "sd-vae")] == []


def test_sillytavern_chooses_a_model(service: Service) -> None:
    choose(service, "small")
    progress = ask(service, "progress")
    # Otherwise it asks again, ten times every two seconds.
    assert (progress["progress"], progress["state"]["job_count"]) == (0, 0)
    assert ask(service, "options")["sd_model_checkpoint"] == "small"


def test_sillytavern_makes_a_picture(service: Service) -> None:
    """What the model does not take is left out: it is sent with every request."""
    choose(service, "small")
    made = make(service, OF_SILLY_TAVERN)
    (image,) = made["images"]
    with service.client() as client:
        own = client.generate_image("a boat", model="small", width=64, height=64, seed=3, steps=4)
    assert (pixels(image) == pixels(own.data)).all()
    assert base64.b64decode(image).startswith(b"\x89PNG")  # it saves it with this name


def test_what_has_no_meaning_here_is_left_out(service: Service) -> None:
    for changes in (
        {"scheduler": ""},
        {"scheduler": "N/A", "sampler_name": "N/A"},
        {"scheduler": None, "sampler_name": None, "seed": None, "negative_prompt": None},
        {"override_settings": {"CLIP_stop_at_last_layers": 2, "sd_vae": "Automatic"}},
        {"restore_faces": True, "enable_hr": True},
        {"seed": -1},
    ):
        body = OF_SILLY_TAVERN | {"model": "small"} | changes
        assert len(make(service, body)["images"]) == 1, changes


def test_sillytavern_interrupts(service: Service) -> None:
    """It calls `interrupt` and leaves the request at the same time."""
    host, _, port = service.address.rpartition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=60)
    body = json.dumps(OF_SILLY_TAVERN | {"model": "slow", "steps": 200})
    headers = WITHOUT_CREDENTIALS | {"Content-Type": "application/json"}
    line.request("POST", "/sdapi/v1/txt2img", body, headers)
    with service.client() as client:
        until(client, lambda status: len(status.jobs) == 1)
        wait_until(lambda: 0 < ask(service, "progress")["progress"] < 1, "progress of the picture")
        state = ask(service, "progress")["state"]
        assert (state["job_count"], state["sampling_steps"]) == (1, 200)
        answer = send(service, "POST", "/sdapi/v1/interrupt", headers=WITHOUT_CREDENTIALS)
        assert answer.status == 200
        line.close()
        until(client, lambda status: not status.jobs)
        assert [job.state for job in client.jobs(include_ended=True)] == ["cancelled"]


# SillyTavern 1.15 to 1.17, source "stable-diffusion.cpp". It sends no Authorization.


def test_sillytavern_takes_the_service_for_stable_diffusion_cpp(service: Service) -> None:
    ping = send(service, "OPTIONS", "/v1/images/generations", headers=NODE_FETCH)
    assert 200 <= ping.status < 300
    models = told(send(service, "GET", "/v1/models", headers=NODE_FETCH))["data"]
    assert "small" in [model["id"] for model in models]
    names = ("prompt", "negative_prompt", "width", "height", "steps", "cfg_scale", "sampler_name")
    body = {name: OF_SILLY_TAVERN[name] for name in names}
    body |= {"model": "small", "seed": -1, "batch_size": 1, "scheduler": "discrete"}
    (image,) = make(service, body, NODE_FETCH)["images"]
    assert pixels(image).shape == (64, 64, 3)


# LibreChat 0.8, tool `stable-diffusion`: by axios, without Authorization. Its size and steps are fixed.


def test_librechat_makes_a_picture(service: Service) -> None:
    body = {
        "prompt": "a boat",
        "negative_prompt": "blurry, cropped, low quality",
        "cfg_scale": 4.5,
        "steps": 22,
        "width": 1024,
        "height": 1024,
    }
    choose(service, "small")
    headers = {"Accept": "application/json, text/plain, */*", "User-Agent": "axios/1.12.2"}
    made = make(service, body, headers)
    info = json.loads(made["info"])
    assert (info["width"], info["height"]) == (1024, 1024)
    assert isinstance(info["seed"], int)
    *_, last = info["infotexts"][0].split("\n")
    assert "Steps: 22" in last
    # Some versions cut at the first comma, as of a `data:` address.
    assert pixels(made["images"][0].split(",", 1)[0]).shape == (1024, 1024, 3)


# Open WebUI 0.6 to 0.7, as of October 2026, with the image engine `automatic1111`: by aiohttp. Where no
# credentials are set, the header is there and empty.


def by_open_webui(
    service: Service, verb: str, path: str, body: Any = None, credentials: str = ""
) -> Any:
    """The answer, which it reads as JSON whatever the status is."""

    async def call() -> Any:
        headers = {"authorization": basic(credentials) if credentials else ""}
        url = f"http://{service.address}/sdapi/v1{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(verb, url, json=body, headers=headers) as answer,
        ):
            return await answer.json(content_type=None)

    return asyncio.run(call())


def test_open_webui_makes_pictures(service: Service) -> None:
    models = by_open_webui(service, "GET", "/sd-models")
    named = {model["title"]: model["model_name"] for model in models}
    assert "small" in named
    # It sends all options back, with another model.
    options = by_open_webui(service, "GET", "/options")
    options["sd_model_checkpoint"] = "small"
    by_open_webui(service, "POST", "/options", options)
    assert by_open_webui(service, "GET", "/options")["sd_model_checkpoint"] == "small"
    asked = {"prompt": "a boat", "batch_size": 2, "width": 64, "height": 64, "steps": 4}
    asked |= {
        "negative_prompt": "blurry",
        "cfg_scale": 7,
        "sampler_name": "Euler a",
        "scheduler": None,
    }
    made = by_open_webui(service, "POST", "/txt2img", asked)
    assert [pixels(image).shape for image in made["images"]] == [(64, 64, 3)] * 2
    assert made["info"]


# All of them.


def test_a_token_is_the_password_of_basic_authorization(simulate: Simulate, tmp_path: Path) -> None:
    state = tmp_path / "state-0"
    token, observer = make_token(state, "alice"), make_token(state, "olga", role="observe")
    service = simulate("sim:24GiB")
    body = OF_SILLY_TAVERN | {"model": "small"}
    for user in ("alice", "anyone", ""):
        headers = NODE_FETCH | {"Authorization": basic(f"{user}:{token}")}
        assert ask(service, "options", headers)
        assert make(service, body, headers)["images"]
        assert send(service, "GET", "/v1/models", headers=headers).status == 200
    for wrong in (basic("alice:wrong"), basic("alice"), basic(token), "Basic ", "Basic %", ""):
        headers = NODE_FETCH | {"Authorization": wrong}
        assert send(service, "GET", "/sdapi/v1/options", headers=headers).status == 401
    watching = NODE_FETCH | {"Authorization": basic(f"olga:{observer}")}
    assert ask(service, "sd-models", watching)
    for path in ("txt2img", "options", "interrupt"):
        assert send(service, "POST", f"/sdapi/v1/{path}", body, watching).status == 403


def test_a_refusal_asks_for_the_credentials(simulate: Simulate, tmp_path: Path) -> None:
    """Clients that know a user and a password send them only where they are asked to."""
    make_token(tmp_path / "state-0", "alice")
    refused = send(simulate("sim:24GiB"), "GET", "/sdapi/v1/options", headers=NODE_FETCH)
    assert refused.status == 401
    assert "Basic" in ", ".join(refused.headers.get_all("WWW-Authenticate", []))


def test_the_choice_of_a_model_is_that_of_one_token(simulate: Simulate, tmp_path: Path) -> None:
    """Others generate on theirs, and interrupt only their own."""
    state = tmp_path / "state-0"
    alice, bob = (
        NODE_FETCH | {"Authorization": basic(f"x:{make_token(state, name)}")}
        for name in ("alice", "bob")
    )
    service = simulate("sim:24GiB")
    before = ask(service, "options", bob)["sd_model_checkpoint"]
    choose(service, "small", alice)
    assert ask(service, "options", alice)["sd_model_checkpoint"] == "small"
    assert ask(service, "options", bob)["sd_model_checkpoint"] == before != "small"


def test_a_model_may_be_named_in_the_request(service: Service) -> None:
    choose(service, "slow")
    settings = {"sd_model_checkpoint": "small"}
    for named in ({"model": "small"}, {"override_settings": settings}):
        info = json.loads(make(service, OF_SILLY_TAVERN | named)["info"])
        assert info["sd_model_name"] == "small"
    assert ask(service, "options")["sd_model_checkpoint"] == "slow"


def test_pictures_are_batches_times_their_size(service: Service) -> None:
    made = make(service, {**OF_SILLY_TAVERN, "model": "small", "batch_size": 2, "n_iter": 2})
    info = json.loads(made["info"])
    assert len(made["images"]) == len(info["all_seeds"]) == len(info["infotexts"]) == 4
    assert info["all_seeds"] == [3, 4, 5, 6]
    assert info["seed"] == 3
    body = {**OF_SILLY_TAVERN, "model": "small", "send_images": False}
    assert make(service, body)["images"] == []


@pytest.mark.parametrize("address", [False, True], ids=["base64", "data address"])
def test_a_picture_is_changed(service: Service, address: bool) -> None:
    """As webuiapi 0.9 sends it, and plugins of Krita and Photoshop."""
    head = "data:image/png;base64," if address else ""
    picture = head + base64.b64encode(png()).decode()
    body = {
        **{name: OF_SILLY_TAVERN[name] for name in ("prompt", "negative_prompt", "seed", "steps")},
        **{"init_images": [picture], "denoising_strength": 0.6, "resize_mode": 0},
        **{"mask": None, "mask_blur": 4, "inpainting_fill": 0, "inpaint_full_res": True},
        **{"inpaint_full_res_padding": 0, "inpainting_mask_invert": 0, "styles": []},
        **{"initial_noise_multiplier": 1, "width": 64, "height": 64, "sampler_index": "Euler a"},
        **{"subseed": -1, "subseed_strength": 0, "alwayson_scripts": {}, "script_args": []},
        **{"override_settings": {"sd_model_checkpoint": "small"}, "include_init_images": False},
    }
    made = told(send(service, "POST", "/sdapi/v1/img2img", body, NODE_FETCH))
    with service.client() as client:
        own = client.generate_image(
            "a boat", model="small", init_image=png(), strength=0.6, seed=3, steps=4
        )
    assert (pixels(made["images"][0]) == pixels(own.data)).all()
    assert json.loads(made["info"])["denoising_strength"] == pytest.approx(0.6)
    # What was sent is not sent back.
    assert picture not in json.dumps(made)


def test_a_mask_is_white_where_the_picture_changes(service: Service) -> None:
    """Unlike a mask of OpenAI's, which is transparent there."""
    asked = {"prompt": "a boat", "init_images": [base64.b64encode(png()).decode()], "seed": 3}
    asked |= {"override_settings": {"sd_model_checkpoint": "small"}, "denoising_strength": 0.75}
    made = {}
    for name, shade, inverted in (("all", 255, 0), ("none", 0, 0), ("inverted", 0, 1)):
        mask = base64.b64encode(png((shade, shade, shade))).decode()
        body = asked | {"mask": mask, "inpainting_mask_invert": inverted}
        answer = told(send(service, "POST", "/sdapi/v1/img2img", body, NODE_FETCH))
        made[name] = pixels(answer["images"][0])
    assert (made["none"] == pixels(png())).all()
    assert (made["all"] != made["none"]).any()
    assert (made["inverted"] == made["all"]).all()


def test_a_wrong_request_is_refused(service: Service) -> None:
    for path, changes, status in [
        ("txt2img", {"override_settings": {"sd_model_checkpoint": "nobody"}}, 404),
        ("txt2img", {"width": 17}, 400),
        ("txt2img", {"width": "wide"}, 400),
        ("txt2img", {"batch_size": 10_000, "n_iter": 10_000}, 400),
        ("txt2img", {"batch_size": 4_294_967_295, "n_iter": 4_294_967_295}, 400),
        ("txt2img", {"steps": -1}, 400),
        ("img2img", {"init_images": []}, 400),
        ("img2img", {"init_images": ["no picture"]}, 400),
        ("img2img", {"init_images": ["http://127.0.0.1/a.png"]}, 400),
        ("img2img", {"init_images": [base64.b64encode(b"no picture").decode()]}, 400),
        ("options", {"sd_model_checkpoint": "nobody"}, 404),
    ]:
        body: dict[str, Any] = OF_SILLY_TAVERN | {"model": "small"} | changes
        refused = send(service, "POST", f"/sdapi/v1/{path}", body, WITHOUT_CREDENTIALS)
        assert refused.status == status, (changes, refused.body)
        assert refused.json()["error"]["message"]
    with service.client() as client:
        assert not client.jobs(include_ended=True)


def test_an_error_has_its_message_in_detail_too(service: Service) -> None:
    """Those of AUTOMATIC1111 read `detail`, those of OpenAI's form `error.message`."""
    body = OF_SILLY_TAVERN | {"model": "small", "width": 17}
    answer = send(service, "POST", "/sdapi/v1/txt2img", body, WITHOUT_CREDENTIALS).json()
    assert answer.get("detail") == answer["error"]["message"]


def test_the_job_is_one_of_the_queue(service: Service) -> None:
    make(service, OF_SILLY_TAVERN | {"model": "small"})
    with service.client() as client:
        (job,) = client.jobs(include_ended=True)
        assert isinstance(job, moored.JobInfo)
        assert (job.state, job.client_id) == ("done", "node-fetch")

from __future__ import annotations

import inspect
import io
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import Ask
from scripted import Service, accepted, done, event, pieces, reason, refuse, resolved, step

import moored
from moored import _options
from moored._generated import events_pb2, generation_pb2, model_pb2


def test_a_picture(service: Service, ask: Ask, png: bytes) -> None:
    chunks = pieces(png, size=40, width="32", height="16", seed="7")
    assert len(chunks) > 2
    approximations = ["decoded in tiles of 64"]
    last = done(approximations=approximations, resident_already=["vae"])
    service.on("GenerateImage", [accepted(), step(1), *chunks, last])
    result = ask("generate_image", "a red cube")
    assert result.pictures[0].data == png
    assert result.image.size == (32, 16)
    assert result.image is result.images[0]
    assert result.image.getpixel((3, 3)) == (200, 10, 30)
    assert result.pictures[0].array.shape == (16, 32, 3)
    assert result.metadata == {"width": "32", "height": "16", "seed": "7"}
    assert (result.seed, result.pictures[0].seed, result.job_id) == (7, 7, "job-1")
    assert result.timings["decode"] == moored.StageTiming(run_ms=21)
    assert result.timings["denoise"] == moored.StageTiming(100, 40, 5)
    assert result.total_ms == 200
    assert result.approximations == ("decoded in tiles of 64",)
    assert result.resident_already == ("vae",)
    assert result.model.key == "demo@main"
    assert result.latents == ()


def test_several_pictures_out_of_order_and_interleaved(service: Service, ask: Ask) -> None:
    data = [random.Random(n).randbytes(1000 + n) for n in range(3)]
    streams = [pieces(data[n], index=n, size=300, seed=str(7 + n)) for n in range(3)]
    mixed = [streams[2][0], streams[0][0], *streams[2][1:], *streams[1], *streams[0][1:]]
    service.on("GenerateImage", [accepted(), *mixed, done()])
    result = ask("generate_image", "cubes", count=3)
    assert [picture.data for picture in result.pictures] == data
    assert [picture.seed for picture in result.pictures] == [7, 8, 9]
    assert [picture.index for picture in result.pictures] == [0, 1, 2]


def test_raw_pixels(service: Service, ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    np = pytest.importorskip("numpy")
    data = bytes([1, 2, 3] * 6)
    chunks = pieces(data, size=5, media_type="image/x-raw-rgb", width="3", height="2")
    service.on("GenerateImage", [accepted(), *chunks, done()])
    result = ask("generate_image", "x", output="raw")
    assert service.requests["GenerateImage"].output == generation_pb2.RAW_RGB
    assert result.image.size == (3, 2)
    assert result.image.getpixel((2, 1)) == (1, 2, 3)
    picture = result.pictures[0]
    assert picture.array.tolist() == [[[1, 2, 3]] * 3] * 2
    assert np.shares_memory(picture.array, np.frombuffer(picture.data, dtype=np.uint8))
    assert not picture.array.flags.writeable
    result.save(tmp_path / "raw.png")
    assert moored.read_recipe(tmp_path / "raw.png") == {}
    assert (tmp_path / "raw.png").read_bytes()[1:4] == b"PNG"


def test_a_pipe_takes_a_picture_if_somebody_reads_it(
    service: Service, ask: Ask, png: bytes, tmp_path: Path
) -> None:
    service.on("GenerateImage", [accepted(), *pieces(png), done()])
    result = ask("generate_image", "x")
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="start its reader first"):
        result.save(pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.png"))
        with pytest.raises(OSError, match="socket"):
            result.save(tmp_path / "socket.png")
    # Without waiting for a writer.
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        result.save(pipe)
        assert reader.read() == png


def test_a_png_is_saved_as_it_came(service: Service, ask: Ask, png: bytes, tmp_path: Path) -> None:
    service.on("GenerateImage", [accepted(), *pieces(png), done()])
    result = ask("generate_image", "x")
    result.save(tmp_path / "same.png")
    assert (tmp_path / "same.png").read_bytes() == png


def test_a_picture_that_lacks_bytes_is_an_error(service: Service, ask: Ask) -> None:
    chunks = pieces(b"x" * 250, size=100)
    service.on("GenerateImage", [accepted(), chunks[0], chunks[2], done()])
    with pytest.raises(moored.InternalError, match="150 of 250 bytes") as caught:
        ask("generate_image", "x")
    assert caught.value.reason == ""


@pytest.mark.parametrize("is_length_known", [True, False])
def test_pieces_of_a_picture_come_in_any_order_and_leave_no_gap(
    service: Service, ask: Ask, is_length_known: bool
) -> None:
    data = random.Random(1).randbytes(250)
    first, middle, last = pieces(data, size=100)
    for place, piece in enumerate((first, middle, last)):
        piece.artifact.offset = 100 * place
    if not is_length_known:
        first.artifact.total_bytes = 0
        service.on("GenerateImage", [accepted(), first, last, done()])
        with pytest.raises(moored.InternalError, match="bytes missing from 100 on"):
            ask("generate_image", "x")
    middle.artifact.last, last.artifact.last = True, False
    service.on("GenerateImage", [accepted(), first, last, middle, done()])
    assert ask("generate_image", "x").pictures[0].data == data


def test_a_stream_without_an_end_is_an_error(service: Service, ask: Ask) -> None:
    service.on("GenerateImage", [accepted()])
    with pytest.raises(moored.InternalError, match="without a result") as caught:
        ask("generate_image", "x")
    assert caught.value.job_id == "job-1"


def test_a_latent_only(service: Service, ask: Ask) -> None:
    kept = events_pb2.LatentKept(latent=model_pb2.LatentInfo(id="lat-1", shape=[1, 16, 2, 2]))
    service.on("GenerateImage", [accepted(), event(latent=kept), done()])
    result = ask("generate_image", "x", latent_only=True)
    assert result.latents[0].id == "lat-1"
    assert result.latents[0].shape == (1, 16, 2, 2)
    with pytest.raises(LookupError, match="latents"):
        _ = result.image


def test_all_options_reach_the_service(service: Service, ask: Ask) -> None:
    service.on("GenerateImage", [accepted(), done()])
    ask.settings["client_id"] = "the-client"
    latent = moored.LatentInfo("lat-9", (1,), "f32", "vae", 0, 4)
    ask(
        "generate_image",
        "a cube",
        model=moored.ModelRef(
            "demo",
            quantization="4-bit",
            formats={"vae": "full"},
            revision="main",
            adapters=(moored.Adapter("lora", 0.5),),
        ),
        adapters=["ink"],
        width=64,
        height=32,
        steps=3,
        guidance=0.0,
        seed=0,
        max_sequence_length=128,
        count=2,
        init_image=b"picture",
        mask=b"mask",
        references=[b"reference"],
        controls=[moored.Control("edges", b"control", 0.5, 0.25, 0.75, 2)],
        init_latent=latent,
        strength=0.25,
        output="png",
        omit_metadata=True,
        keep_latent=True,
        latent_only=True,
        preview_interval_s=0.5,
        priority="high",
        patience_s=1.5,
        allow_low_memory=True,
        headroom_bytes=1 << 30,
        card="cuda:1",
        idempotency_key="key",
        detach=True,
    )
    assert service.requests["GenerateImage"] == generation_pb2.GenerateImageRequest(
        model=model_pb2.ModelRef(
            id="demo",
            revision="main",
            quantization=model_pb2.Quantization(preset="4-bit", components={"vae": "full"}),
            adapters=[
                model_pb2.Adapter(id="lora", strength=0.5),
                model_pb2.Adapter(id="ink"),
            ],
        ),
        prompt="a cube",
        width=64,
        height=32,
        steps=3,
        guidance=0.0,
        seed=0,
        max_sequence_length=128,
        count=2,
        init_image=b"picture",
        mask=generation_pb2.PictureInput(data=b"mask"),
        references=[generation_pb2.PictureInput(data=b"reference")],
        controls=[
            generation_pb2.Control(
                id="edges",
                image=generation_pb2.PictureInput(data=b"control"),
                scale=0.5,
                start=0.25,
                end=0.75,
                mode=2,
            )
        ],
        init_latent_id="lat-9",
        strength=0.25,
        output=generation_pb2.PNG,
        omit_metadata=True,
        keep_latent=True,
        latent_only=True,
        preview_interval_ms=500,
        options=generation_pb2.JobOptions(
            client_id="the-client",
            priority=generation_pb2.HIGH,
            patience_ms=1500,
            allow_low_memory=True,
            headroom_bytes=1 << 30,
            card="cuda:1",
            idempotency_key="key",
            detach=True,
        ),
    )


def test_options_that_are_none_are_not_sent(service: Service, ask: Ask) -> None:
    service.on("GenerateImage", [accepted(), done()])
    ask("generate_image", "x", model=None, seed=None, guidance=None, patience_s=None, detach=None)
    request = service.requests["GenerateImage"]
    for field in ("model", "seed", "guidance", "strength", "mask"):
        assert not request.HasField(field)
    assert not request.options.HasField("patience_ms")
    assert request.options.client_id == moored.Client().client_id


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": -1}, {"width": 2**40}, {"patience_s": -1.0}, {"preview_interval_s": -1}),
        *({"priority": "urgent"}, {"output": "gif"}),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_client(ask: Ask, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(moored.InvalidRequest, match=f"^{name}") as refused:
        ask("generate_image", "x", **wrong)
    if name == "seed":
        assert str(refused.value) == (
            "seed: -1 is not a whole number from 0 to 18446744073709551615"
        )
        assert [one.field for one in refused.value.violations] == ["seed"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": "4"}, "steps: a whole number is wanted, not '4'"),
        ({"guidance": "3"}, "guidance: a number is wanted, not '3'"),
        ({"card": 1}, "card: a str is wanted, not 1"),
        ({"patience_s": "2"}, "patience_s: a number is wanted, not '2'"),
        ({"prompt": None}, "prompt: a str is wanted, not None"),
    ],
)
def test_a_wrong_type_is_named(ask: Ask, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        ask("generate_image", **{"prompt": "x", **wrong})


METHODS = {
    moored.ImageOptions: ("generate_image", "stream_image", "plan"),
    moored.VideoOptions: ("generate_video", "stream_video", "plan_video"),
    moored.AudioOptions: ("generate_audio", "stream_audio", "plan_audio"),
    moored.JobOptions: ("encode_image", "decode_latent", "decode_video", "decode_audio", "load"),
}


@pytest.mark.parametrize("client", [moored.Client, moored.AsyncClient])
@pytest.mark.parametrize(("options", "methods"), METHODS.items())
def test_signatures_and_help_have_every_option(
    client: type, options: type, methods: tuple[str, ...]
) -> None:
    for method in (getattr(client, name) for name in methods):
        parameters = inspect.signature(method).parameters
        for name, words in _options.words_of(options).items():
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[name].default is None
            assert f"{name}: {words}" in inspect.getdoc(method)
        assert "options" not in parameters
        assert "timeout" in parameters


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("widht", "did you mean width?"),
        ("num_inference_steps", "write steps="),
        ("guidance_scale", "write guidance="),
        ("num_images_per_prompt", "write count="),
        ("generator", "write seed="),
        ("true_cfg_scale", "write true_guidance=.*negative_prompt"),
        ("image", "write init_image=.*that edit references="),
        ("mask_image", "write mask="),
        ("controlnet", "write controls="),
        ("control_image", "write controls="),
        ("controlnet_conditioning_scale", "write controls=.*scale"),
        ("joint_attention_kwargs", "write adapters="),
        ("lora_scale", "write adapters="),
        ("quite_different", "help"),
    ],
)
def test_an_option_name_of_another_library_names_ours(ask: Ask, option: str, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"{option}'.*{remedy}"):
        ask("generate_image", "x", **{option: 3})


def test_every_hint_for_another_librarys_option_names_an_existing_option() -> None:
    everything = {name for options in METHODS for name in _options.words_of(options)}
    for remedy in _options.ELSEWHERE.values():
        assert {*re.findall(r"(\w+)=", remedy)} <= everything
    assert not everything & _options.ELSEWHERE.keys()


def test_a_list_of_prompts_is_a_job_each(service: Service, ask: Ask, png: bytes) -> None:
    def answer(request: Any, context: Any) -> Any:
        return iter([accepted(), *pieces(png, prompt=request.prompt), done()])

    service.on("GenerateImage", answer)
    results = ask("generate_image", ["a cube", "a ball"], steps=3)
    assert [result.metadata["prompt"] for result in results] == ["a cube", "a ball"]
    assert service.requests["GenerateImage"].steps == 3
    assert ask("generate_image", ()) == []


def test_the_error_of_a_list_has_what_was_done_before_it(service: Service, ask: Ask) -> None:
    asked = []

    def answer(request: Any, context: Any) -> Any:
        asked.append(request.prompt)
        if request.prompt == "bad":
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "no", reason("INVALID_REQUEST"))
        return iter([accepted(), done(seed=len(asked))])

    service.on("GenerateImage", answer)
    with pytest.raises(moored.InvalidRequest) as failed:
        ask("generate_image", ["a", "b", "bad", "c"])
    assert [result.seed for result in failed.value.results] == [1, 2]
    assert asked == ["a", "b", "bad"], "what comes after it is not begun"


def test_a_list_is_of_prompts_and_of_one_key_at_most(ask: Ask) -> None:
    with pytest.raises(TypeError, match="prompt: number 1 of the list"):
        ask("generate_image", ["a", 3])
    with pytest.raises(moored.InvalidRequest, match="idempotency_key"):
        ask("generate_image", ["a"], idempotency_key="k")
    with pytest.raises(TypeError, match="prompt: a str is wanted"):
        ask.items("stream_image", ["a"])


def test_a_picture_to_start_from(service: Service, ask: Ask, png: bytes, tmp_path: Path) -> None:
    service.on("GenerateImage", [accepted(), done()])
    (tmp_path / "in.png").write_bytes(png)
    image = pytest.importorskip("PIL.Image")
    for given in (png, bytearray(png), tmp_path / "in.png", str(tmp_path / "in.png")):
        ask("generate_image", "x", init_image=given)
        assert service.requests["GenerateImage"].init_image == png
    ask("generate_image", "x", init_image=image.open(io.BytesIO(png)))
    sent = image.open(io.BytesIO(service.requests["GenerateImage"].init_image))
    assert sent.size == (32, 16)


def test_encode_decode(service: Service, ask: Ask, png: bytes) -> None:
    kept = events_pb2.LatentKept(latent=model_pb2.LatentInfo(id="lat-1", vae_id="vae-a"))
    service.on("EncodeImage", [accepted(), event(latent=kept), done()])
    service.on("DecodeLatent", [accepted(), *pieces(png), done()])
    encoded = ask("encode_image", png, model="demo", width=32, height=16, seed=3, priority="low")
    assert encoded.latent.vae_id == "vae-a"
    request = service.requests["EncodeImage"]
    assert (request.width, request.height, request.seed) == (32, 16, 3)
    assert request.options.priority == generation_pb2.LOW
    decoded = ask("decode_latent", encoded.latent, model="demo", output="png")
    assert decoded.pictures[0].data == png
    assert service.requests["DecodeLatent"].latent_id == "lat-1"
    assert service.requests["DecodeLatent"].model.id == "demo"


def test_a_stream_gives_pictures_as_they_are_complete(
    service: Service, client: moored.Client
) -> None:
    chunks = [*pieces(b"a" * 150, index=1), *pieces(b"b" * 50, index=0)]
    service.on("GenerateImage", [accepted(), *chunks, done()])
    with client.stream_image("x", count=2) as stream:
        seen = [len(stream.pictures) for event in stream if isinstance(event, moored.Artifact)]
        assert seen == [0, 1, 2]
        assert stream.job_id == "job-1"
        assert stream.result() is stream.result()


def test_without_pillow_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['PIL'] = sys.modules['numpy'] = None\n"
        "import moored\n"
        "picture = moored.Picture(0, 'image/png', b'')\n"
        "try: picture.image\n"
        "except ImportError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install pillow (moored[images] brings it)" in said.stdout, said.stderr


def test_the_model_of_a_result(service: Service, ask: Ask) -> None:
    service.on("GenerateImage", [accepted(), done()])
    model = ask("generate_image", "x").model
    assert (model.id, dict(model.quantization)) == (resolved().id, {"vae": "full"})

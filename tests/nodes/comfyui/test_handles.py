"""Handles as plain data, what they claim while they live, and how the interrupt flag is shared."""

from __future__ import annotations

import asyncio
import gc
import pickle
import traceback
from fractions import Fraction
from types import ModuleType
from typing import Any

import moored
import numpy as np
import pytest
import torch
from comfy import model_management
from server import PromptServer

DEADLINE_S = 60.0


@pytest.fixture
def prompt_server() -> Any:
    """A server that shows nobody anything."""
    PromptServer.instance = PromptServer()
    model_management.interrupt_current_processing(False)
    yield PromptServer.instance
    PromptServer.instance = None
    model_management.interrupt_current_processing(False)


def recipe(pack: ModuleType, **more: Any) -> Any:
    return pack.handles.ModelRecipe(pack.connection.Server("box:1"), "moored/demo", **more)


# Plain data.


def test_handles_survive_a_pickle(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = pack.handles
    ink = moored.Adapter("ink", 0.5, text_strength=0.0)
    more = {"formats": (("transformer", "int8"),), "adapters": (ink,)}
    model = recipe(pack, quantization="4-bit", **more)
    start = handles.KeptLatent(model, handles.Encoding(b"png", 64, 64, 3), "latent-1")
    generation = handles.Generation("a cube", (("steps", 2), ("seed", 7)), start)
    latents = handles.LatentHandle([handles.KeptLatent(model, generation, "latent-2")])
    brought = handles.KeptLatent(model, handles.Bringing(b"\0" * 16, (1, 1, 2, 2)))
    edges = moored.Control("edges", b"png", 0.5)
    handle = handles.ModelHandle(model, (edges,))
    copies = pickle.loads(pickle.dumps([handle, latents, brought]))
    assert copies[0].controls == (edges,)
    assert copies[0].recipe == model
    assert copies[0].recipe.ref == moored.ModelRef(
        "moored/demo", quantization="4-bit", formats={"transformer": "int8"}, adapters=(ink,)
    )
    assert copies[1].latents[0].id == "latent-2"
    assert copies[1].latents[0].recipe.start.recipe == start.recipe
    assert copies[2].recipe == brought.recipe


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("", ()),
        ("  , ", ()),
        ("transformer=int8", (("transformer", "int8"),)),
        ("transformer=nf4, vae=full\nx=y", (("transformer", "nf4"), ("vae", "full"), ("x", "y"))),
    ],
)
def test_formats_are_read(pack: ModuleType, text: str, formats: Any) -> None:
    assert pack.handles.formats_of(text) == formats


@pytest.mark.parametrize("text", ["int8", "transformer=", "=int8", "a:b"])
def test_formats_that_are_none_are_refused(pack: ModuleType, text: str) -> None:
    with pytest.raises(moored.InvalidRequest, match="component=format"):
        pack.handles.formats_of(text)


def test_seeds_wrap_at_2_to_the_64(pack: ModuleType) -> None:
    assert [pack.schema.seed_of(2**64 - 2, n) for n in range(3)] == [2**64 - 2, 2**64 - 1, 0]


# Tensors.


def test_a_picture_goes_to_a_tensor_and_back(pack: ModuleType) -> None:
    tensors = pack.tensors
    pixels = np.arange(256 * 3, dtype=np.uint8).reshape(16, 16, 3)
    picture = moored.Picture(
        0, "image/x-raw-rgb", pixels.tobytes(), {"width": "16", "height": "16"}
    )
    image = tensors.image_of([picture, picture])
    assert image.shape == (2, 16, 16, 3)
    assert image.dtype == "float32"
    assert float(image.numpy().max()) == 1.0
    for png in tensors.pngs_of(image):
        assert np.array_equal(moored.Picture(0, "image/png", png).array, pixels)


def test_the_first_picture_of_a_batch_is_taken(pack: ModuleType) -> None:
    tensors = pack.tensors
    batch = np.stack([np.full((2, 3, 3), shade, dtype=np.float32) for shade in (0.2, 0.4)])
    for image in (batch, batch[0]):
        png = tensors.first_png_of(torch.from_numpy(image))
        assert moored.Picture(0, "image/png", png).array.tolist() == [[[51] * 3] * 3] * 2
    with pytest.raises(pack.failures.Failure, match="no picture"):
        tensors.first_png_of(torch.from_numpy(batch[:0]))


@pytest.mark.parametrize(
    ("told", "rate"),
    [(24.0, (24, 1)), (12.5, (25, 2)), (29.97, (2997, 100)), (30_000 / 1001, (30_000, 1001))],
)
def test_a_film_has_its_true_rate(pack: ModuleType, told: float, rate: tuple[int, int]) -> None:
    """The wire has singles, and ComfyUI's encoder wants a fraction."""
    frames = torch.from_numpy(np.zeros((1, 2, 2, 3), dtype=np.float32))
    video = pack.tensors.video_of(frames, float(np.float32(told)))
    assert video.get_components().frame_rate == Fraction(*rate)


def test_a_film_and_tracks_go_to_tensors(pack: ModuleType) -> None:
    tensors = pack.tensors
    pixels = np.arange(2 * 4 * 3 * 3, dtype=np.uint8)
    film = moored.Film(0, "video/x-raw-rgb", 3, 4, 2, 24.0, pixels.tobytes())
    image = tensors.frames_of(film)
    assert (image.shape, image.dtype) == ((2, 4, 3, 3), "float32")
    assert np.array_equal(np.rint(image.numpy() * 255).astype(np.uint8).ravel(), pixels)
    samples = np.array([[-32768, 0], [16384, 32767], [1, -1]], dtype="<i2")
    track = moored.Track(0, "", "audio/x-raw-s16le", 8000, 2, 3, samples.tobytes())
    audio = tensors.audio_of([track, track])
    assert audio["sample_rate"] == 8000
    assert (audio["waveform"].shape, audio["waveform"].dtype) == ((2, 2, 3), "float32")
    assert np.array_equal(audio["waveform"].numpy()[1].T * 2**15, samples)
    back, rate = tensors.samples_of_audio(audio)
    assert np.array_equal(back * 2**15, samples)
    assert rate == 8000


def test_an_audio_of_odd_shapes_and_values_is_taken_or_refused_with_words(pack: ModuleType) -> None:
    def given(values: object) -> object:
        array = np.array(values, dtype=np.float32)
        return {"waveform": torch.from_numpy(array), "sample_rate": 8000}

    samples, _ = pack.tensors.samples_of_audio(given([[np.nan, np.inf, -np.inf, 0.5]]))
    assert samples.tolist() == [[0.0], [1.0], [-1.0], [0.5]]
    for values, told in (
        (np.zeros((1, 2, 0)), "no samples"),
        (np.zeros((0, 2, 9)), "no samples"),
        (np.zeros((1, 8, 9)), "8 channels"),
    ):
        with pytest.raises(pack.failures.Failure, match=told):
            pack.tensors.samples_of_audio(given(values))


def test_pictures_of_any_channels_and_values_are_taken(pack: ModuleType) -> None:
    tensors = pack.tensors
    values = np.array([[[-1.0, 0.5, 2.0, 0.3]], [[np.nan, np.inf, -np.inf, 1.0]]], dtype=np.float32)
    (png,) = tensors.pngs_of(torch.from_numpy(values))
    found = moored.Picture(0, "image/png", png).array.tolist()
    assert found == [[[0, 128, 255]], [[0, 255, 0]]]
    grey = np.full((1, 2, 2, 1), 0.2, dtype=np.float32)
    (png,) = tensors.pngs_of(torch.from_numpy(grey))
    assert moored.Picture(0, "image/png", png).array.tolist() == [[[51] * 3] * 2] * 2


class Bfloat16(torch.Tensor):
    """A tensor with a gradient, of a dtype that numpy has not."""

    detached = False

    def detach(self) -> torch.Tensor:
        self.detached = True
        return self

    def numpy(self) -> Any:
        raise TypeError("numpy has no such dtype, nor gradients")

    def float(self) -> torch.Tensor:
        assert self.detached
        return torch.from_numpy(self._array)


def test_tensors_of_any_dtype_are_taken(pack: ModuleType) -> None:
    tensors = pack.tensors
    (png,) = tensors.pngs_of(Bfloat16(np.full((1, 2, 2, 3), 0.2, dtype=np.float32)))
    assert moored.Picture(0, "image/png", png).array.tolist() == [[[51] * 3] * 2] * 2
    zeros = np.zeros((1, 16, 2, 2), dtype=np.float32)
    assert len(tensors.arrays_of({"samples": Bfloat16(zeros)}, "flux")) == 1


def test_a_picture_that_is_too_large_is_reported_before_it_travels(pack: ModuleType) -> None:
    size_of, failure = pack.tensors.size_of, pack.failures.Failure
    assert size_of(torch.from_numpy(np.zeros((1, 16, 4096, 1), dtype=np.float32))) == (4096, 16)
    with pytest.raises(failure, match="4097 x 16, and 4096 is the most .*: scale it down before"):
        size_of(torch.from_numpy(np.zeros((1, 16, 4097, 1), dtype=np.float32)))


def test_a_batch_of_nothing_is_refused_in_a_sentence(pack: ModuleType) -> None:
    tensors, failure = pack.tensors, pack.failures.Failure
    with pytest.raises(failure, match="no picture"):
        tensors.pngs_of(torch.from_numpy(np.zeros((0, 16, 16, 3), dtype=np.float32)))
    nothing = torch.from_numpy(np.zeros((0, 16, 2, 2), dtype=np.float32))
    with pytest.raises(failure, match="no latent"):
        tensors.arrays_of({"samples": nothing}, "flux")


def test_latents_are_scaled_as_comfyui_scales_them(pack: ModuleType) -> None:
    """ComfyUI's LATENT of FLUX is its VAE's; its samplers take 0.1159 off and multiply by 0.3611."""
    tensors = pack.tensors
    ours = np.random.default_rng(1).standard_normal((1, 16, 2, 3)).astype(np.float32)
    latent = tensors.samples_of([ours, ours], "flux")
    samples = latent["samples"]
    assert samples.shape == (2, 16, 2, 3)
    assert samples.dtype == "float32"
    np.testing.assert_allclose((samples.numpy()[1:] - 0.1159) * 0.3611, ours, atol=1e-6)
    back = tensors.arrays_of(latent, "flux")
    assert [one.shape for one in back] == [(1, 16, 2, 3)] * 2
    np.testing.assert_allclose(back[0], ours, atol=1e-6)


def test_latents_that_are_no_pictures_are_refused(pack: ModuleType) -> None:
    video = {"samples": torch.from_numpy(np.zeros((1, 16, 3, 8, 8), dtype=np.float32))}
    with pytest.raises(RuntimeError, match="another kind of model"):
        pack.tensors.arrays_of(video, "flux")


@pytest.mark.parametrize("family", ["instant", "flux2"])
def test_latents_of_a_family_in_another_format_are_refused(pack: ModuleType, family: str) -> None:
    """Those of FLUX.2 are patches of 128 numbers, scaled by statistics of the checkpoint."""
    latent = np.zeros((1, 128, 4, 4), dtype=np.float32)
    said = f"family '{family}' are not converted .*: use VAE Decode and VAE Encode"
    with pytest.raises(pack.failures.Failure, match=said):
        pack.tensors.samples_of([latent], family)
    with pytest.raises(pack.failures.Failure, match=said):
        pack.tensors.arrays_of({"samples": torch.from_numpy(latent)}, family)


# Errors.


def every_error(base: type[moored.MooredError] = moored.MooredError) -> list[Any]:
    return [base] + [one for child in base.__subclasses__() for one in every_error(child)]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_is_one_sentence(pack: ModuleType, kind: type[moored.MooredError]) -> None:
    failures = pack.failures
    with pytest.raises(failures.Failure) as failed, failures.told("1"):
        raise kind("something is wrong")
    said = str(failed.value)
    assert said.startswith("Something is wrong")
    assert said.endswith(".")
    assert ". " not in said
    assert "\n" not in said


def test_a_refusal_has_no_chained_traceback(pack: ModuleType) -> None:
    def trace_of(error: moored.MooredError) -> str:
        try:
            with pack.failures.told(None):
                try:
                    raise ValueError("behind it")
                except ValueError as cause:
                    raise error from cause
        except pack.failures.Failure as failed:
            return "".join(traceback.format_exception(failed))
        raise AssertionError("nothing was raised")

    assert "behind it" not in trace_of(moored.InvalidRequest("width: 100 is no multiple of 16"))
    assert "behind it" in trace_of(moored.InternalError("a fault"))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("https://huggingface.co cannot be reached", "https://huggingface.co cannot be reached."),
        ("owner/name is gated", "owner/name is gated."),
        ("text_encoder_2 has no format int9", "text_encoder_2 has no format int9."),
        ("width: 100 is no multiple of 16", "Width: 100 is no multiple of 16."),
        ("the queue is full", "The queue is full."),
    ],
)
def test_a_message_is_capitalised_unless_it_starts_with_a_name(
    pack: ModuleType, said: str, shown: str
) -> None:
    assert pack.failures.sentence(moored.InvalidRequest(said)) == shown


def test_an_error_is_said_on_the_node_that_failed(pack: ModuleType, prompt_server: Any) -> None:
    sent: list[Any] = []
    prompt_server.client_id = "a"
    prompt_server.send = lambda *said: sent.append(said)
    with pytest.raises(pack.failures.Failure), pack.failures.told("7"):
        raise moored.InvalidRequest("the prompt is too long")
    assert sent == [("a", "text", "7", "The prompt is too long.")]


def test_an_alternative_that_fits_is_reported(pack: ModuleType) -> None:
    labels = ("512x512", "quantization 8-bit")
    fallbacks = tuple(moored.Fallback(label, 1, True) for label in labels)
    short = moored.MemoryShortfall(2, 1, 1, (), fallbacks, "denoise")
    said = pack.failures.sentence(moored.NeverFits("too large", shortfall=short))
    assert said == "Too large: this would fit: 512x512, or quantization 8-bit."
    nothing = pack.failures.sentence(moored.NeverFits("too large"))
    assert "another model in Load Model" in nothing
    assert "smaller quantization" not in nothing, "there is none that fits"


# The interrupt button, and several of one node: ComfyUI gathers them all before it looks at any.


def test_all_that_run_are_interrupted(
    pack: ModuleType, prompt_server: Any, demo_service: Any
) -> None:
    follow, connection = pack.follow, pack.connection
    target = connection.Target(demo_service.address)

    async def work(client: moored.AsyncClient, deliver: Any) -> None:
        for n in range(1, 10_000):
            deliver(moored.Step(n, 10_000, 0))
            await asyncio.sleep(0.005)

    async def node(name: str) -> None:
        await follow.attend(follow.Display(name), target, work)

    async def prompt() -> list[Any]:
        nodes = [asyncio.ensure_future(node(name)) for name in ("1", "2", "3")]
        await asyncio.sleep(0)
        model_management.interrupt_current_processing()
        return await asyncio.wait_for(asyncio.gather(*nodes, return_exceptions=True), DEADLINE_S)

    ends = asyncio.run(prompt())
    assert [type(end) for end in ends] == [model_management.InterruptProcessingException] * 3


def test_the_progress_bar_leaves_the_interrupt_flag_set(
    pack: ModuleType, prompt_server: Any
) -> None:
    follow = pack.follow
    display = follow.Display("1")
    model_management.interrupt_current_processing()
    with pytest.raises(model_management.InterruptProcessingException):
        follow._shown(display, moored.Step(1, 2, 0))
    assert model_management.processing_interrupted()


# What is shown.


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (12, "12th"),
        (21, "21st"),
        (112, "112th"),
    ],
)
def test_ordinals(pack: ModuleType, number: int, text: str) -> None:
    assert pack.phases.ordinal(number) == text


def test_texts_go_to_whoever_queued_the_prompt(pack: ModuleType, prompt_server: Any) -> None:
    told: list[Any] = []
    prompt_server.send = lambda *message: told.append(message)
    display = pack.follow.Display("5", pictures=2)
    display.say("nobody queued it over a socket")
    prompt_server.client_id = "ann"
    display.show(moored.Queued(1, 4200))
    display.show(moored.Queued(1, 4200))
    display.pictures_before = 1
    display.show(moored.Step(1, 4, 0))
    assert told == [
        ("ann", "text", "5", "Queued 2nd, about 4 s"),
        ("ann", "progress", "5", (5, 8)),
        ("ann", "text", "5", "Step 1/4"),
    ]


def test_lines_of_a_text_stay_lines_in_html_and_in_markdown(
    pack: ModuleType, prompt_server: Any
) -> None:
    told: list[str] = []
    prompt_server.client_id = "ann"
    prompt_server.send = lambda *message: told.append(message[-1])
    pack.node_text.show_on("5", "one card\n  its model\n1 running")
    pack.node_text.show_on("5", "half of a character \ud800")
    assert told == [
        "one card  \n\u00a0\u00a0its model  \n1 running",
        "half of a character \\ud800",
    ]


def test_steps_of_a_film_are_reported_by_section(pack: ModuleType, prompt_server: Any) -> None:
    told: list[Any] = []
    prompt_server.client_id = "ann"
    prompt_server.send = lambda *message: told.append(message[1::2])
    display = pack.follow.Display("5")
    for section in (1, 3):
        display.show(moored.Step(2, 4, 0, section, 3))
    display.interrupted()
    display.show(moored.Step(4, 4, 0, 1, 1))
    assert told == [
        ("progress", (2, 12)),
        ("text", "Section 1/3, step 2/4"),
        ("progress", (10, 12)),
        ("text", "Section 3/3, step 2/4"),
        ("text", "Interrupted in section 3 of 3 at step 2 of 4"),
        ("progress", (4, 4)),
        ("text", "Step 4/4"),
    ]


def test_the_size_of_a_latent_is_left_to_the_service(
    pack: ModuleType, prompt_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many pixels a number of a latent stands for is known to its model alone."""
    handles, asked = pack.handles, []

    async def generate(*about: Any, **options: Any) -> moored.ImageResult:
        asked.append(dict(about[-1].options) | options)
        return moored.ImageResult(done=None)

    monkeypatch.setattr(pack.latents, "generate", generate)
    model = handles.ModelHandle(recipe(pack))
    kept = handles.KeptLatent(model.recipe, handles.Generation("a cube", ()), "latent-1")
    latent = handles.LatentHandle([kept])
    sampling = {"steps": 2, "guidance": 1.0, "seed": 7, "latent_only": True}
    job = {"priority": "normal", "patience_s": -1.0, "allow_low_memory": False}
    node = pack.picture_nodes.ImageToImage
    asyncio.run(node.execute(model, "x", 0.6, 0, 0, 1, latent=latent, **sampling, **job))
    assert len(asked) == 1
    assert not {"width", "height"} & asked[0].keys()


# Claims, with a client that writes down what it is asked.


class Notes:
    """A client that answers everything and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def release_latent(self, name: str) -> bool:
        self.asked.append(("release", name))
        return True

    async def cancel(self, job_id: str, *, release_latents: bool) -> bool:
        assert release_latents
        self.asked.append(("discard", job_id))
        return True

    async def hold(self, model: moored.ModelRef, ttl_s: float) -> Any:
        self.asked.append(("hold", model.id, ttl_s))

        async def give_up() -> bool:
            self.asked.append(("give up", model.id))
            return True

        return moored.AsyncHold(give_up, "hold-1", ttl_s)


@pytest.fixture
def notes(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()

    monkeypatch.setattr(pack.connection, "_client_of", lambda target: notes)
    return notes


def settled(pack: ModuleType) -> None:
    """Waits until the pack's thread has done what it was asked to."""

    async def turn() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    gc.collect()
    pack.connection.start(turn()).result(DEADLINE_S)


def test_the_last_handle_gives_the_hold_up(pack: ModuleType, notes: Notes) -> None:
    target, model = pack.connection.Target("box:1"), recipe(pack, residency="hold")
    one, two = (pack.claims.own_model(pack.handles.ModelHandle(model), target) for _ in range(2))
    use = pack.claims.use(notes, target, model)
    pack.connection.start(use).result(DEADLINE_S)
    assert notes.asked == [("hold", "moored/demo", 300.0)]
    del one
    settled(pack)
    assert len(notes.asked) == 1
    del two
    settled(pack)
    assert notes.asked[1:] == [("give up", "moored/demo")]


def test_a_latent_handle_that_goes_releases_what_it_has(pack: ModuleType, notes: Notes) -> None:
    handles = pack.handles
    generation = handles.Generation("a cube", ())
    latents = [handles.KeptLatent(recipe(pack), generation, name) for name in ("a", "", "b")]
    with pack.claims.latents_of(pack.connection.Target("box:1")) as handle:
        handle.latents.extend(latents)
    settled(pack)
    assert notes.asked == []
    copy = pickle.loads(pickle.dumps(handle))
    del handle
    settled(pack)
    assert notes.asked == [("release", "a"), ("release", "b")]
    del copy
    settled(pack)
    assert len(notes.asked) == 2, "a copy owns nothing"


def test_a_latent_handle_that_is_not_finished_releases_what_it_has(
    pack: ModuleType, notes: Notes
) -> None:
    handles = pack.handles
    latent = handles.KeptLatent(recipe(pack), handles.Generation("a cube", ()), "a")
    with (
        pytest.raises(model_management.InterruptProcessingException) as interrupted,
        pack.claims.latents_of(pack.connection.Target("box:1")) as handle,
    ):
        handle.latents.append(latent)
        raise model_management.InterruptProcessingException
    settled(pack)
    assert notes.asked == [("release", "a")]
    assert interrupted.value.__traceback__ is not None, "which still refers to the handle"


def latent_info(name: str) -> moored.LatentInfo:
    return moored.LatentInfo(name, (1, 16, 8, 8), "f32", "sha256:0", 60_000, 4096)


def test_an_interrupt_discards_what_the_job_has_kept_heard_of_or_not(
    pack: ModuleType, prompt_server: Any, notes: Notes
) -> None:
    class Stream:
        job_id = "job-1"
        latents = ()

        async def __aenter__(self) -> Stream:
            return self

        async def __aexit__(self, *error: object) -> None:
            notes.asked.append("left")

        async def cancel(self, *, release_latents: bool) -> None:
            await notes.cancel(self.job_id, release_latents=release_latents)

        async def __aiter__(self) -> Any:
            yield moored.Step(1, 2, 0)
            await asyncio.Event().wait()

    class Interrupted(pack.follow.Display):  # type: ignore[misc, name-defined]
        def show(self, event: Any) -> None:
            model_management.interrupt_current_processing()
            pack.follow.stop_if_interrupted()

    async def node() -> None:
        target = pack.connection.Target("box:1")
        await pack.follow.follow(Interrupted("1"), target, recipe(pack), lambda client: Stream())

    with pytest.raises(model_management.InterruptProcessingException):
        asyncio.run(node())
    settled(pack)
    assert sorted(notes.asked, key=str) == [("discard", "job-1"), "left"]


def test_an_interrupt_that_comes_after_the_end_leaves_no_latents(
    pack: ModuleType, prompt_server: Any, notes: Notes
) -> None:
    """The job has ended, and its node has not heard of it when the button is pressed."""
    follow, connection = pack.follow, pack.connection
    ended = moored.JobResult(done=None, latents=(latent_info("late"),))

    class Stream:
        latents = ended.latents

        async def __aenter__(self) -> Stream:
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def __aiter__(self) -> Any:
            yield moored.Step(1, 1, 0)

        async def result(self) -> moored.JobResult:
            return ended

    class Busy(follow.Display):  # type: ignore[misc, name-defined]
        def show(self, event: Any) -> None:
            settled(pack)
            model_management.interrupt_current_processing()
            follow.stop_if_interrupted()

    async def node() -> None:
        target = connection.Target("box:1")
        await follow.follow(Busy("1"), target, recipe(pack), lambda client: Stream())

    with pytest.raises(model_management.InterruptProcessingException):
        asyncio.run(node())
    settled(pack)
    assert notes.asked == [("release", "late")]


def test_nodes_that_miss_the_same_latent_make_it_once(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents, handles = pack.latents, pack.handles
    latent = handles.KeptLatent(recipe(pack), handles.Generation("a cube", ()), "lost")
    made: list[str] = []

    async def make(display: Any, target: Any, latent: Any) -> None:
        await asyncio.sleep(0)
        made.append(f"made-{len(made)}")
        latent.id = made[-1]

    async def use(name: str) -> str:
        await asyncio.sleep(0)
        if name == "lost":
            raise moored.LatentNotFound("it is gone")
        return name

    async def prompt() -> list[str]:
        nodes = (
            latents.with_latent(pack.follow.Display(name), None, latent, use) for name in "123"
        )
        return await asyncio.gather(*nodes)

    monkeypatch.setattr(latents, "make", make)
    for times in (1, 2):  # prompts, each in a loop of its own
        latent.id = "lost"
        assert asyncio.run(prompt()) == [f"made-{times - 1}"] * 3
        assert len(made) == times


def test_a_refusal_names_inputs_of_the_nodes_and_the_node_that_fits(pack: ModuleType) -> None:
    def said(field: str, description: str) -> str:
        violation = moored.Violation(field, description)
        error = moored.InvalidRequest(f"{field}: {description}", violations=[violation])
        return str(pack.failures.sentence(error))

    assert said("references", "are not taken by this model: name a model that takes them") == (
        "The reference images are not taken by this model: name a model that takes them."
    )
    assert said("init_image", "is missing: FramePack makes a film from a picture") == (
        "The image is missing: FramePack makes a film from a picture: use Image to Video."
    )

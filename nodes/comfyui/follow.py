"""A job as its node shows it: phases as text, steps as a bar with previews; and how it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import comfy.model_management
import comfy.utils
import moored

from . import claims, connection, local_service, own_models
from .connection import Target
from .handles import ModelRecipe
from .node_text import show_on
from .own_models import OwnModels
from .phases import phase

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

# How often the interrupt button is looked at while the service has nothing to say.
INTERRUPT_POLL_S = 0.1

PREVIEW_SIDE = 512

Deliver = Callable[[Any], None]
"""Takes an event, or a text to show, from the pack's thread to the node."""


class Display:
    """What a node shows while it runs."""

    def __init__(self, node_id: str | None, pictures: int = 1) -> None:
        """`pictures`: how many the node makes in all, in one job or in several."""
        self.prefix = ""
        self.pictures_before = 0
        self._node_id = node_id
        self._pictures = pictures
        self._bar = comfy.utils.ProgressBar(1, node_id=node_id)
        self._steps = (0, 1)
        self._place = ""
        self._choice = ""
        self._of_wait = ""
        self._said = ""

    def show(self, event: Any) -> None:
        """Shows an event of a job."""
        said = phase(event)
        if not isinstance(event, moored.Waiting):
            self._of_wait = ""
        match event:
            case moored.Waiting() if self._of_wait:
                said = f"{said}\n{self._of_wait}"
            case moored.Accepted():
                self._choice = said
            case moored.Done() if self._choice:
                # The last text stays on the node.
                said = f"{said}\n{self._choice}"
            case moored.Step():
                of_item = max(event.parts, 1) * event.of
                before = (self.pictures_before + event.item) * of_item
                before += max(event.part - 1, 0) * event.of
                self._steps = (before + event.n, self._pictures * of_item)
                of_section = f" in section {event.part} of {event.parts}" if event.parts > 1 else ""
                self._place = f"{of_section} at step {event.n} of {event.of}"
                self._bar.update_absolute(*self._steps)
            case moored.Preview():
                self._preview(event.image)
        self.say(said)

    def show_in_wait(self, wait: moored.Waiting, text: str) -> None:
        """Shows a text below each report of a wait, from this one on."""
        self._of_wait = text
        self.show(wait)

    def finish(self, image: Image) -> None:
        """Shows the finished picture, or a frame of the finished film, so that no early preview stays."""
        self._steps = (self._steps[1], self._steps[1])
        with _left_for_others():
            self._preview(image)

    def interrupted(self) -> None:
        """Says how far it had come."""
        self.say(f"Interrupted{self._place}")

    def _preview(self, image: Image) -> None:
        # ComfyUI scales up to this side too: a small picture stays as it is.
        side = min(PREVIEW_SIDE, max(image.size))
        self._bar.update_absolute(*self._steps, ("JPEG", image.convert("RGB"), side))

    def say(self, text: str) -> None:
        """Shows a text on the node."""
        text = f"{self.prefix}{text}" if text else ""
        if text and text != self._said:
            self._said = text
            show_on(self._node_id, text)


async def attend(
    display: Display,
    target: Target,
    work: Callable[[moored.AsyncClient, Deliver], Awaitable[T]],
    undo: Callable[[T], None] = lambda _: None,
) -> T:
    """Awaits `work(client, deliver)` on the pack's thread, and shows what it delivers.

    The interrupt button ends it, at any time; so does the end of the prompt. `undo`: what to do with a result
    that came too late for that.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    events: deque[Any] = deque()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the prompt's loop has gone
            loop.call_soon_threadsafe(news.set)

    def deliver(event: Any) -> None:
        events.append(event)
        wake()

    results: list[T] = []

    async def noted(client: moored.AsyncClient) -> None:
        await local_service.started(target, deliver)
        results.append(await work(client, deliver))

    async def undone() -> None:
        for result in results:
            undo(result)

    own = OwnModels(target)
    job = connection.start_with_client(noted, target)
    job.add_done_callback(lambda _: wake())
    try:
        while events or not job.done():
            stop_if_interrupted()
            while events:
                event = events.popleft()
                _shown(display, event)
                if own.in_the_way(event):
                    _without_own_models(display, event)
            if not job.done():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(news.wait(), INTERRUPT_POLL_S)
            news.clear()
    except BaseException:
        # CancelledError too: when another node of the prompt was first to see the interrupt.
        display.interrupted()
        job.cancel()
        # After that, in the same thread: by then the work was cancelled, or had its result.
        connection.start(undone())
        raise
    job.result()
    return results[0]


async def follow(
    display: Display,
    target: Target,
    recipe: ModelRecipe,
    make: Callable[[moored.AsyncClient], moored.AsyncEventStream[T]],
) -> T:
    """Awaits the job whose stream `make` gives, and renews what is claimed of its model."""

    async def work(client: moored.AsyncClient, deliver: Deliver) -> T:
        await claims.use(client, target, recipe)
        try:
            async with make(client) as stream:
                try:
                    async for event in stream:
                        if not isinstance(event, moored.Artifact):
                            deliver(event)
                    result = await stream.result()
                    await claims.used(target, recipe)
                except BaseException as error:
                    # The prompt ends, or the job did. It may have kept latents that were not heard of yet.
                    if not (isinstance(error, moored.MooredError) and stream.goes_on):
                        connection.start(_end(stream))
                    raise
        finally:
            claims.rest(target, recipe)
        return result

    def undo(result: T) -> None:
        if isinstance(result, moored.JobResult):
            claims.release(target, [latent.id for latent in result.latents])

    return await attend(display, target, work, undo)


async def _end(stream: moored.AsyncEventStream[Any]) -> None:
    # What is not ended here ends with its stream, or is in the panel's list of jobs.
    with contextlib.suppress(moored.MooredError):
        await stream.cancel(release_latents=True)


def stop_if_interrupted() -> None:
    """Raises what marks a prompt interrupted, when its button was pressed.

    The flag is read and not cleared, so that other nodes of this prompt see it too; ComfyUI clears
    it before the next prompt.
    """
    if comfy.model_management.processing_interrupted():
        raise comfy.model_management.InterruptProcessingException


def _without_own_models(display: Display, wait: moored.Waiting) -> None:
    """Unloads ComfyUI's own models, and says so where there were any."""
    if own_models.loaded():
        # It takes a while: they are copied to the machine's memory.
        display.show_in_wait(wait, own_models.UNLOADING)
    unloaded = own_models.unload("a job of the moored service waits for their memory")
    display.show_in_wait(wait, own_models.UNLOADED if unloaded else "")


def _shown(display: Display, event: Any) -> None:
    with _left_for_others():
        if isinstance(event, str):
            display.say(event)
        else:
            display.show(event)


@contextlib.contextmanager
def _left_for_others() -> Iterator[None]:
    """Sets the interrupt flag again, so that the prompt's other nodes see it too."""
    try:
        yield
    except comfy.model_management.InterruptProcessingException:
        # ComfyUI's bar looks at the flag too, and clears it.
        comfy.model_management.interrupt_current_processing(True)
        raise

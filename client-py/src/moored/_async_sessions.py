"""Sessions of sound, async: the twin of the sync ones, method by method."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from . import _conversation
from . import _requests as requests
from ._channel import QUICK_S
from ._conversation import NOT_OPEN, SegmentRecord
from ._generated import generation_pb2
from ._options import spelled
from ._records import MediaInfo
from ._requests import AdapterLike, ModelLike, SegmentOptions, SegmentStart
from ._session_calls import AsyncSessionCall
from ._session_events import AudioSessionClosed, SessionEvent, SoundChunk
from ._sessions import BaseSegment, BaseSession, SourceInput
from ._uploads import MediaInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack


class AsyncSegment(BaseSegment):
    """What is to sound, or sounds: of `play`, `replace_source` or `replace_model`."""

    def __init__(self, conversation: AsyncSessionCall, record: SegmentRecord) -> None:
        super().__init__(record)
        self._conversation = conversation

    async def wait(self, timeout: float | None = None) -> AsyncSegment:
        """Returns itself once all of it is there, or raises why it does not come.

        Superseded: a later segment sounded before it. Deadline: `timeout` seconds have passed,
        and it may still come. Sound that comes meanwhile is kept for whoever takes it.
        """
        late = f"Segment {self.number} was not ready"
        await self._conversation.until_async(
            lambda: self._conversation.there_ready(self._record), timeout, late
        )
        return self


class _AsyncPutMedia(Protocol):
    def __call__(self, media: MediaInput, *, sample_rate: int | None) -> Awaitable[MediaInfo]: ...


class AsyncAudioSession(BaseSession):
    """A session of sound. Its chunks come as one endless track, ahead of the play head.

    async with client.audio_session("owner/music", source="loop.wav") as session:
        session.play("a slow waltz, accordion")
        async for chunk in session:
            ...

    One task takes the chunks, or the events; others may play, wait and close meanwhile. What is
    left unread is kept, up to some minutes of sound.

    While it is iterated over, and while a segment is waited for, the service hears of it often
    enough. An application that does neither for `idle_s` loses it.
    """

    _conversation: AsyncSessionCall | None = None

    def __init__(
        self,
        begin: Callable[[Any], Any],
        put_media: _AsyncPutMedia,
        endpoint: str,
        request: generation_pb2.OpenAudioSession,
        source: SourceInput | None,
        sample_rate: int | None,
    ) -> None:
        super().__init__(begin, endpoint, request, source, sample_rate)
        self._put_media = put_media

    async def open(self) -> AsyncAudioSession:
        """Uploads the source and opens the session: `async with` does it."""
        if self._conversation is not None:
            raise RuntimeError("The session is open already: a session is opened once")
        self._request.source_media_id = await self._media_id(self._source, self._sample_rate)
        self._source = None
        conversation = AsyncSessionCall(self._endpoint, self._request)
        try:
            conversation.read(self._begin(conversation.outbox))
            self._conversation = conversation
            await conversation.until_async(conversation.there_open)
        except BaseException:
            conversation.drop()
            raise
        return self

    @spelled(SegmentOptions)
    def play(
        self, prompt: str, *, at: SegmentStart = "over", **options: Unpack[SegmentOptions]
    ) -> AsyncSegment:
        """Sends what is to sound, and returns at once.

        `at` is when: `over` when those before it are over; `now` as soon as it is there, at the
        place where the one that sounds is: another version of the same track; `now_from_start` as
        soon as it is there, from its beginning.
        """
        segment = requests.segment_request(prompt, at, options)
        return self._send(segment=segment)

    async def replace_source(
        self, source: SourceInput | None, *, sample_rate: int | None = None
    ) -> AsyncSegment:
        """Starts further segments from another track; None: from none.

        The last segment is made anew from it, and sounds when it is there: that is what is
        returned. If it fails, the source stays what it was.
        """
        media_id = await self._media_id(source, sample_rate)
        return self._send(replace_source=generation_pb2.ReplaceSource(media_id=media_id))

    def replace_model(
        self, model: ModelLike, *, adapters: Sequence[AdapterLike] | None = None
    ) -> AsyncSegment:
        """Makes further segments with another model, once it is loaded and proven.

        The last segment is made anew with it: that is what is returned. What sounds goes on
        sounding until then, and the model before is kept if it fails.
        """
        return self._send(replace_model=requests.replace_model_request(model, adapters))

    async def events(self) -> AsyncIterator[SessionEvent]:
        """Everything that comes, in order: sound chunks, and what becomes of segments.

        It ends with the session: by `close`, or because the service ends it. Raises what ends it
        otherwise.
        """
        while (event := await self._said.next_async()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[SoundChunk]:
        async for event in self.events():
            if isinstance(event, SoundChunk):
                yield event

    async def close(self) -> AudioSessionClosed:
        """Ends the session and returns its report; again, the same one. Any task may.

        Raises what ended it, if that was not the service's last word.
        """
        said = self._said
        with said.changed:
            said.say_close()
        try:
            late = "The service did not confirm the end of the session"
            return await said.until_async(said.there_report, QUICK_S, late)
        finally:
            self._drop()

    async def __aenter__(self) -> AsyncAudioSession:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None or self._said.error_told:
            self._drop()
        else:
            await self.close()

    def __del__(self) -> None:
        # The loop may be closed already: then there is no call to end.
        with contextlib.suppress(Exception):
            self._drop()

    def _drop(self) -> None:
        """Ends the call, for this session or because its client is closed."""
        if self._conversation is not None:
            self._conversation.drop()

    @property
    def _said(self) -> AsyncSessionCall:
        if self._conversation is None:
            raise RuntimeError(NOT_OPEN)
        self._conversation.process.check("This session")
        return self._conversation

    def _send(self, **message: Any) -> AsyncSegment:
        said = self._said
        with said.changed:
            return AsyncSegment(said, said.say_segment(**message))

    async def _media_id(self, source: SourceInput | None, sample_rate: int | None) -> str:
        if source is None:
            return ""
        if _conversation.is_in_service(source):
            return requests.media_id(source, "source")  # type: ignore[arg-type]
        info = await self._put_media(source, sample_rate=sample_rate)  # type: ignore[arg-type]
        return info.id

"""Sessions of sound: what is played comes as one endless track.

A session reads by itself what the service says, so that a segment can be waited for while nobody
takes the sound. It speaks by itself as well, but only from within calls of its user: an application
that hangs falls silent, and the service gives back what its session holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, Protocol

from . import _conversation
from . import _requests as requests
from ._async_calls import AsyncConnection
from ._channel import QUICK_S
from ._conversation import NOT_OPEN, SegmentRecord, SegmentState
from ._events import Done
from ._generated import generation_pb2
from ._options import put, spelled
from ._records import MediaInfo, ResolvedModel
from ._requests import AdapterLike, ModelLike, SegmentOptions, SegmentStart
from ._session_calls import AsyncSessionCall
from ._session_events import AudioSessionClosed, AudioSessionOpened, SessionEvent, SoundChunk
from ._uploads import MediaInput, SourceInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack


class AsyncSegment:
    """What is to sound, or sounds: of `play`, `replace_source` or `replace_model`."""

    def __init__(self, conversation: AsyncSessionCall, record: SegmentRecord) -> None:
        self._conversation = conversation
        self._record = record

    @property
    def number(self) -> int:
        """Its number in the session, from 1: chunks and events name it by this."""
        return self._record.number

    @property
    def state(self) -> SegmentState:
        """`sent`, then `accepted` by the service, then `ready` or `failed`."""
        return self._record.state

    @property
    def job_id(self) -> str:
        """The job that makes it; empty until it is accepted."""
        return self._record.job_id

    @property
    def seed(self) -> int | None:
        """The seed that it is made with; None until it is accepted."""
        return self._record.seed

    @property
    def sample_count(self) -> int | None:
        """Its length in samples of each channel; None until it is ready."""
        return self._record.samples

    @property
    def done(self) -> Done | None:
        """The end of its job, with stages and times; None until it is ready."""
        return self._record.done

    async def wait(self, timeout: float | None = None) -> AsyncSegment:
        """Returns itself once it is complete, or raises why it failed.

        Superseded: a later segment sounded before it. Deadline: `timeout` seconds have passed,
        and it may still arrive. Sound that arrives meanwhile is kept for its reader.
        """
        late = f"Segment {self.number} was not ready"
        await self._conversation.until(
            lambda: self._conversation.there_ready(self._record), timeout, late
        )
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}, {self.state}>"


class _AsyncPutMedia(Protocol):
    def __call__(
        self, media: MediaInput, *, sample_rate: int | None, model: str, box: str
    ) -> Awaitable[MediaInfo]: ...


class AsyncAudioSession:
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
        connection: AsyncConnection,
        put_media: _AsyncPutMedia,
        request: generation_pb2.OpenAudioSession,
        source: SourceInput | None,
        sample_rate: int | None,
    ) -> None:
        self._connection = connection
        self._put_media = put_media
        self._request = request
        self._source = source
        self._sample_rate = sample_rate

    async def open(self) -> AsyncAudioSession:
        """Uploads the source and opens the session: `async with` does it."""
        if self._conversation is not None:
            raise RuntimeError("The session is open already: a session is opened once")
        self._request.source_media_id = await self._media_id(self._source, self._sample_rate)
        self._source = None
        conversation = AsyncSessionCall(self._connection.endpoint, self._request)
        try:
            await self._connection.ready()
            conversation.begin(self._connection)
            self._conversation = conversation
            await conversation.until(conversation.there_open)
        except BaseException:
            conversation.drop()
            raise
        return self

    @property
    def opened(self) -> AudioSessionOpened:
        """What the service says of it: its id, and its settings as they are in effect."""
        opened = self._said.opened
        if opened is None:
            raise RuntimeError(NOT_OPEN)
        return opened

    @property
    def model(self) -> ResolvedModel:
        """The model of further segments."""
        return self._said.model or self.opened.model

    @property
    def sample_rate(self) -> int:
        """Samples a second, of each channel."""
        return self.opened.samples_per_second

    @property
    def channels(self) -> int:
        """1 or 2."""
        return self.opened.channels

    @property
    def report(self) -> AudioSessionClosed | None:
        """How it ended, in figures; None: it has not, or not well."""
        return self._said.report

    def played(self, sample: int) -> None:
        """Says how far you have played: samples of each channel, from the first of the session on.

        For `paced` sessions of which that is known better than by the chunks that were taken: from
        then on only this counts.
        """
        put(generation_pb2.PlayHead(), "sample", sample)
        with self._said.changed:
            self._said.say_played(sample, by_hand=True)

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
        while (event := await self._said.next()) is not None:
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
            return await said.until(said.there_report, QUICK_S, late)
        finally:
            said.drop()

    async def __aenter__(self) -> AsyncAudioSession:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._conversation is not None and not self._conversation.process.is_this:
            return  # after a fork: it is the parent's
        said = self._said
        if kind is not None or said.error_told:
            said.drop()
        else:
            await self.close()

    def __del__(self) -> None:
        # The loop may be closed already, or the interpreter be half gone.
        with contextlib.suppress(Exception):
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
        # Where the session is, once it is open: a box knows nothing of another one's media.
        opened = self._conversation.opened if self._conversation is not None else None
        box = self._connection.box_of(opened.session_id) if opened is not None else ""
        info = await self._put_media(
            source,  # type: ignore[arg-type]
            sample_rate=sample_rate,
            model=self._request.model.id,
            box=box,
        )
        return info.id

"""The client."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import grpc

from . import _requests as requests
from ._async_calls import AsyncCall, AsyncConnection, pause
from ._async_claims import AsyncHold, AsyncReservedMemory
from ._async_sessions import AsyncAudioSession
from ._async_streams import AsyncEventStream, AsyncPullStream, AsyncRetries, AsyncStatusStream
from ._bounds import Bounds
from ._channel import QUICK_S, RETRY_S, Line, client_id_of
from ._errors import MooredError, error_of, not_ready
from ._generated import generation_pb2, jobs_pb2, residency_pb2, server_pb2
from ._latents import Latent, LatentReader, chunks_of
from ._mirror import mirror
from ._options import message_of, spelled
from ._pictures import ImageInput
from ._records import (
    AdapterInfo,
    AudioTrackFormat,
    FreedComponent,
    JobInfo,
    LatentInfo,
    MediaInfo,
    ModelInfo,
    Plan,
    PulledModel,
    PullPlan,
    ServerInfo,
    Status,
    Unloaded,
    VideoFormat,
)
from ._requests import (
    AudioOptions,
    FilmOutput,
    GenerateOptions,
    ImageOptions,
    JobOptions,
    ModelLike,
    OutputFormat,
    SessionOptions,
    VideoOptions,
)
from ._results import (
    AudioResult,
    Gathered,
    ImageResult,
    JobResult,
    LatentResult,
    VideoResult,
    audio_result,
    fetched_result,
    image_result,
    job_result,
    latent_result,
    video_result,
)
from ._stubs import AsyncStubs
from ._unfinished import Unfinished
from ._uploads import MediaInput, SourceInput, upload_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

R = TypeVar("R")


class AsyncClient:
    """A connection to a moored service, for one event loop: the one that it is first used in.

    async with moored.AsyncClient() as client:
        result = await client.generate_image("a red cube on a blue plane")
        result.save("cube.png")

    Cancelling a task that waits for a job cancels the job.

    `timeout` is in seconds everywhere, and becomes the deadline of the call: when it passes, the
    service gives up. None is no deadline. A refusal or failure of the service raises a MooredError.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        client_id: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        insecure_token: bool | None = None,
        fingerprint: str | None = None,
        certificate: str | os.PathLike[str] | None = None,
        certificate_key: str | os.PathLike[str] | None = None,
        retry_s: float = 0.0,
        unfinished: str | os.PathLike[str] | None = None,
        box: str | None = None,
    ) -> None:
        """Connects when first used.

        endpoint: `host:port`, `https://host:port` for TLS, or `unix:path`; default:
            MOORED_ENDPOINT, else 127.0.0.1:50051.
        token, token_file: what the service asks for; default: the file named by MOORED_TOKEN_FILE,
            for the service that the environment names, else what `moored token use` keeps for it.
        client_id: your name in the list of jobs, and for fair shares; default: MOORED_CLIENT, else
            user@host.
        ca_file: PEM file of the authorities to trust, with `https://`; default: MOORED_CA_FILE,
            else those that this machine trusts.
        insecure_token: send the token over an unencrypted line to another machine; default:
            MOORED_INSECURE_TOKEN, else no.
        fingerprint: SHA-256 of the service's certificate, by which alone `https://` is trusted;
            default: MOORED_FINGERPRINT, else what `moored token use` keeps. The first call waits
            until the certificate has been looked at, for 10 s at most.
        certificate, certificate_key: PEM files of this client's own, for a service that asks for a
            certificate; default: MOORED_CERTIFICATE, MOORED_CERTIFICATE_KEY.
        retry_s: seconds for which a job that is refused for now (a full queue, a limit) is asked
            for again, each time after as long as the service says; default: it is not.
        unfinished: a file of this program alone, for jobs with `detach`. Where it ended before such
            a job did, the same request joins that job.
        box: the one of several boxes behind a proxy that all calls are for, as `box_of` has told
            it; default: MOORED_BOX, else each call goes to the box that has its model, or what it
            names.
        """
        line = Line(
            endpoint,
            token,
            token_file,
            ca_file,
            insecure_token,
            fingerprint,
            certificate,
            certificate_key,
            box,
        )
        self.endpoint = line.endpoint
        self.client_id = client_id_of(client_id)
        self._line = line
        self._retry_s = retry_s
        self._unfinished = Unfinished(unfinished) if unfinished is not None else None
        self._connection = AsyncConnection(line)

    # Pictures, films, tracks.

    @overload
    async def generate_image(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[ImageOptions]
    ) -> ImageResult: ...

    @overload
    async def generate_image(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> list[ImageResult]: ...

    @spelled(ImageOptions)
    async def generate_image(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> ImageResult | list[ImageResult]:
        """Generates one or several pictures.

        A list of prompts is a job for each, one after another, and gives a list of results in the
        same order. The first job that fails ends it: its error has the results before it in
        `results`. `timeout` is for each job.
        """
        return await self._one_or_each(self.stream_image, prompt, timeout, options)

    @spelled(ImageOptions)
    def stream_image(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[ImageOptions]
    ) -> AsyncEventStream[ImageResult]:
        """The same as an iterator of events; closing it cancels the job."""
        request = requests.generate_request(
            generation_pb2.GenerateImageRequest, prompt, options, self.client_id
        )
        return self._events(self._stubs.generation.GenerateImage, request, timeout, image_result)

    @overload
    async def generate_video(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[VideoOptions]
    ) -> VideoResult: ...

    @overload
    async def generate_video(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> list[VideoResult]: ...

    @spelled(VideoOptions)
    async def generate_video(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> VideoResult | list[VideoResult]:
        """Generates one or several films.

        A list of prompts is a job for each, one after another, and gives a list of results in the
        same order. The first job that fails ends it: its error has the results before it in
        `results`. `timeout` is for each job.
        """
        return await self._one_or_each(self.stream_video, prompt, timeout, options)

    @spelled(VideoOptions)
    def stream_video(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[VideoOptions]
    ) -> AsyncEventStream[VideoResult]:
        """The same as an iterator of events; closing it cancels the job.

        `stream.frames()` gives the frames as they come.
        """
        request = requests.generate_request(
            generation_pb2.GenerateVideoRequest, prompt, options, self.client_id
        )
        return self._events(self._stubs.generation.GenerateVideo, request, timeout, video_result)

    @overload
    async def generate_audio(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[AudioOptions]
    ) -> AudioResult: ...

    @overload
    async def generate_audio(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> list[AudioResult]: ...

    @spelled(AudioOptions)
    async def generate_audio(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> AudioResult | list[AudioResult]:
        """Generates one or several tracks.

        A list of prompts is a job for each, one after another, and gives a list of results in the
        same order. The first job that fails ends it: its error has the results before it in
        `results`. `timeout` is for each job.
        """
        return await self._one_or_each(self.stream_audio, prompt, timeout, options)

    @spelled(AudioOptions)
    def stream_audio(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[AudioOptions]
    ) -> AsyncEventStream[AudioResult]:
        """The same as an iterator of events; closing it cancels the job.

        `stream.samples()` gives the samples as they come.
        """
        request = requests.generate_request(
            generation_pb2.GenerateAudioRequest, prompt, options, self.client_id
        )
        return self._events(self._stubs.generation.GenerateAudio, request, timeout, audio_result)

    @spelled(SessionOptions)
    def audio_session(
        self,
        model: ModelLike | None = None,
        *,
        source: SourceInput | None = None,
        sample_rate: int | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncAudioSession:
        """A session of sound: what you play comes as one endless track, chunk by chunk.

        Enter it by `async with`: then the source is uploaded and the session is open. `play` sends
        what is to sound, and iterating gives the sound. The model is held in until it ends.

        `source` is the track that segments start from: bytes, a path, a result or an array of
        samples with `sample_rate`, as `put_media` takes them; or what `put_media` has returned.
        """
        request = requests.open_request(model, options, self.client_id)
        return AsyncAudioSession(self._connection, self.put_media, request, source, sample_rate)

    @spelled(JobOptions)
    async def encode_image(
        self,
        image: ImageInput,
        *,
        model: ModelLike | None = None,
        width: int | None = None,
        height: int | None = None,
        seed: int = 0,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> LatentResult:
        """Encodes a picture to a latent, which stays in the service.

        Width and height in pixels say what to scale to. The latent is a sample of the posterior,
        drawn by `seed`.
        """
        return await self.stream_encode(
            image,
            model=model,
            width=width,
            height=height,
            seed=seed,
            timeout=timeout,
            **options,
        ).result()

    @spelled(JobOptions)
    def stream_encode(
        self,
        image: ImageInput,
        *,
        model: ModelLike | None = None,
        width: int | None = None,
        height: int | None = None,
        seed: int = 0,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncEventStream[LatentResult]:
        """The same as an iterator of events; closing it cancels the job."""
        job = requests.job_request(options, self.client_id)
        request = requests.encode_request(image, model, width, height, seed, job)
        return self._events(self._stubs.generation.EncodeImage, request, timeout, latent_result)

    @spelled(JobOptions)
    async def decode_latent(
        self,
        latent: str | LatentInfo,
        *,
        model: ModelLike | None = None,
        output: OutputFormat | None = None,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> ImageResult:
        """Decodes the latent of a picture that is in the service, by its handle."""
        return await self.stream_decode(
            latent, model=model, output=output, timeout=timeout, **options
        ).result()

    @spelled(JobOptions)
    def stream_decode(
        self,
        latent: str | LatentInfo,
        *,
        model: ModelLike | None = None,
        output: OutputFormat | None = None,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncEventStream[ImageResult]:
        """The same as an iterator of events; closing it cancels the job."""
        job = requests.job_request(options, self.client_id)
        request = requests.decode_request(latent, model, output, job)
        return self._events(self._stubs.generation.DecodeLatent, request, timeout, image_result)

    @spelled(JobOptions)
    async def decode_video(
        self,
        latent: str | LatentInfo,
        *,
        model: ModelLike | None = None,
        output: FilmOutput | None = None,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> VideoResult:
        """Decodes the latent of a film of the service, by its handle: to frames, or an mp4."""
        return await self.stream_decode_video(
            latent, model=model, output=output, timeout=timeout, **options
        ).result()

    @spelled(JobOptions)
    def stream_decode_video(
        self,
        latent: str | LatentInfo,
        *,
        model: ModelLike | None = None,
        output: FilmOutput | None = None,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncEventStream[VideoResult]:
        """The same as an iterator of events; closing it cancels the job."""
        job = requests.job_request(options, self.client_id)
        request = requests.decode_request(latent, model, None, job, output)
        return self._events(self._stubs.generation.DecodeLatent, request, timeout, video_result)

    @spelled(JobOptions)
    async def decode_audio(
        self,
        latent: str | LatentInfo,
        *,
        model: ModelLike | None = None,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AudioResult:
        """Decodes the latent of a track that is in the service, by its handle."""
        return await self.stream_decode_audio(
            latent, model=model, timeout=timeout, **options
        ).result()

    @spelled(JobOptions)
    def stream_decode_audio(
        self,
        latent: str | LatentInfo,
        *,
        model: ModelLike | None = None,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncEventStream[AudioResult]:
        """The same as an iterator of events; closing it cancels the job."""
        job = requests.job_request(options, self.client_id)
        request = requests.decode_request(latent, model, None, job)
        return self._events(self._stubs.generation.DecodeLatent, request, timeout, audio_result)

    async def get_latent(self, latent: str | LatentInfo, *, timeout: float | None = None) -> Latent:
        """Reads a latent of the service: `.array` is a numpy array, `.data` its bytes.

        One of several tensors has `.arrays`, by their names.
        """
        request = message_of(generation_pb2.GetLatentRequest, latent_id=requests.latent_id(latent))
        metadata = self._line.metadata(request)
        call = self._stubs.generation.GetLatent(request, timeout=timeout, metadata=metadata)
        read = LatentReader()
        try:
            async for chunk in call:
                read.add(chunk)
        except grpc.RpcError as error:
            raise error_of(error, self.endpoint, begun=read.has_begun) from None
        finally:
            call.cancel()
        return read.finish()

    async def put_latent(
        self,
        latent: Latent | NDArray[Any] | Mapping[str, NDArray[Any]],
        *,
        vae_id: str = "",
        model: ModelLike | None = None,
        box: str = "",
        timeout: float | None = None,
    ) -> LatentInfo:
        """Brings a latent to the service: one that was read, or an array and whose VAE it is of.

        Tensors with names are a mapping of them to arrays. Of several boxes behind a proxy it goes
        to the one that has `model`, by which it is to be used, or to that with the name `box`.
        """
        try:
            info = await self._connection.put_latent(
                chunks_of(latent, vae_id), timeout, model=requests.model_id(model), box=box
            )
        except grpc.RpcError as error:
            raise error_of(error, self.endpoint) from None
        return mirror(LatentInfo, info)

    async def release_latent(
        self, latent: str | LatentInfo, *, timeout: float | None = QUICK_S
    ) -> bool:
        """Gives a latent up before its time. False: there was none, or it had expired.

        A job that needs it keeps it until it has ended.
        """
        request = message_of(
            generation_pb2.ReleaseLatentRequest, latent_id=requests.latent_id(latent)
        )
        method = self._stubs.generation.ReleaseLatent
        released: bool = (await self._unary(method, request, timeout)).released
        return released

    async def put_media(
        self,
        media: MediaInput,
        *,
        media_type: str | None = None,
        format: VideoFormat | AudioTrackFormat | None = None,
        frames_per_second: float | None = None,
        sample_rate: int | None = None,
        model: ModelLike | None = None,
        box: str = "",
        timeout: float | None = None,
    ) -> MediaInfo:
        """Uploads a picture, a film or a track that jobs can start from, by `init_media=`.

        `media` is the bytes of a PNG, JPEG, WebP, WAV or FLAC; a path to such a file, which is read
        while it is sent; a PIL image; a result, of which the first picture, film or track is sent;
        an array of frames, uint8, [frames, height, width, 3], with `frames_per_second`; or an array
        of samples, int16 or floating with 1 as full scale, [samples, channels], with `sample_rate`.

        Raw frames and samples, in bytes or a file, need `format`. `media_type` overrides the type
        that follows from the content or the ending of the file. Of several boxes behind a proxy
        they go to the one that has `model`, by which they are to be used, or to that with the name
        `box`.
        """
        upload = upload_of(media, media_type, format, frames_per_second, sample_rate)
        try:
            info = await self._connection.put_media(
                upload, timeout, model=requests.model_id(model), box=box
            )
        except grpc.RpcError as error:
            if upload.failure is not None:
                raise upload.failure from None
            raise error_of(error, self.endpoint) from None
        finally:
            upload.close()
        return mirror(MediaInfo, info)

    async def release_media(
        self, media: str | MediaInfo, *, timeout: float | None = QUICK_S
    ) -> bool:
        """Removes media before it expires. False: there was none, or it had expired.

        Accepted jobs keep it.
        """
        request = message_of(generation_pb2.ReleaseMediaRequest, media_id=requests.media_id(media))
        method = self._stubs.generation.ReleaseMedia
        released: bool = (await self._unary(method, request, timeout)).released
        return released

    # Getting models.

    async def plan_pull(
        self, model: str, revision: str = "", *, timeout: float | None = QUICK_S
    ) -> PullPlan:
        """What a pull would fetch, without fetching it."""
        request = requests.pull_request(model, revision)
        return mirror(PullPlan, await self._unary(self._stubs.hub.PlanPull, request, timeout))

    async def pull_model(
        self, model: str, revision: str = "", *, timeout: float | None = None
    ) -> PulledModel:
        """Has the service fetch a model from its hub: what is missing of `owner/name`.

        `revision` is a branch, a tag or a commit; default: `main`. What has come when it is
        cancelled, or fails, is not fetched again.
        """
        return await self.stream_pull(model, revision=revision, timeout=timeout).result()

    def stream_pull(
        self, model: str, revision: str = "", *, timeout: float | None = None
    ) -> AsyncPullStream:
        """The same as an iterator of how far it is; closing it ends the pull.

        A pull that others wait for as well is joined, and goes on for them.
        """
        request = requests.pull_request(model, revision)
        call = self._connection.stream(self._stubs.hub.PullModel, request, timeout)
        return AsyncPullStream(call, self.endpoint)

    # Residency.

    async def list_models(self, *, timeout: float | None = QUICK_S) -> tuple[ModelInfo, ...]:
        """Models that can be named, with their components and defaults."""
        request = residency_pb2.ListModelsRequest()
        models = (await self._unary(self._stubs.residency.ListModels, request, timeout)).models
        return tuple(mirror(ModelInfo, model) for model in models)

    async def list_adapters(self, *, timeout: float | None = QUICK_S) -> tuple[AdapterInfo, ...]:
        """Adapters (LoRA) that can be named."""
        request = residency_pb2.ListModelsRequest()
        adapters = (await self._unary(self._stubs.residency.ListModels, request, timeout)).adapters
        return tuple(mirror(AdapterInfo, adapter) for adapter in adapters)

    @spelled(JobOptions)
    async def load(
        self,
        model: ModelLike,
        *,
        components: Sequence[str] = (),
        replace: ModelLike | None = None,
        prove: bool = False,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> JobResult:
        """Loads a model into memory before it is used: all of its components, or those named.

        `prove` makes the smallest picture with it and throws it away: the load succeeds only if
        the model works. `replace` names the model whose place it takes: that one leaves when the
        new one is proven, and is back before an error is raised if anything fails.
        """
        return await self.stream_load(
            model, components=components, replace=replace, prove=prove, timeout=timeout, **options
        ).result()

    @spelled(JobOptions)
    def stream_load(
        self,
        model: ModelLike,
        *,
        components: Sequence[str] = (),
        replace: ModelLike | None = None,
        prove: bool = False,
        timeout: float | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncEventStream[JobResult]:
        """The same as an iterator of events; closing it cancels the job."""
        request = message_of(
            residency_pb2.LoadRequest,
            model=requests.model_of(model),
            options=requests.job_request(options, self.client_id),
            components=requests.component_names(components),
            replace=requests.model_of(replace),
            prove=prove,
        )
        return self._events(self._stubs.residency.Load, request, timeout, job_result)

    async def unload(
        self,
        model: ModelLike | None = None,
        *,
        force: bool = False,
        timeout: float | None = None,
    ) -> Unloaded:
        """Unloads a model, or all; waits for jobs that use it, or cancels them with `force`."""
        request = residency_pb2.UnloadRequest(
            model=requests.model_of(model), force=force, client_id=self.client_id
        )
        return mirror(Unloaded, await self._unary(self._stubs.residency.Unload, request, timeout))

    async def pin(self, model: ModelLike, *, timeout: float | None = None) -> tuple[str, ...]:
        """Keeps a model in until it is unpinned. Returns the keys of all that are pinned now."""
        request = residency_pb2.PinRequest(model=requests.model_of(model))
        return tuple((await self._unary(self._stubs.residency.Pin, request, timeout)).pinned)

    async def unpin(self, model: ModelLike, *, timeout: float | None = None) -> tuple[str, ...]:
        """Takes a pin off. Returns the keys of all that are pinned now."""
        request = residency_pb2.PinRequest(model=requests.model_of(model), unpin=True)
        return tuple((await self._unary(self._stubs.residency.Pin, request, timeout)).pinned)

    async def hold(
        self,
        model: ModelLike,
        *,
        ttl_s: float | None = None,
        client_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncHold:
        """Keeps a model in for `ttl_s` seconds: at most an hour; default: a minute.

        Usable by `async with await`. Asking again, by the same client, renews it.
        """
        request = message_of(
            residency_pb2.HoldRequest,
            model=requests.model_of(model),
            client_id=client_id or self.client_id,
            ttl=requests.duration(ttl_s),
        )
        held = await self._unary(self._stubs.residency.Hold, request, timeout)

        async def release() -> bool:
            request = residency_pb2.ReleaseHoldRequest(hold_id=held.hold_id)
            return bool(
                (await self._unary(self._stubs.residency.ReleaseHold, request, QUICK_S)).released
            )

        return AsyncHold(release, held.hold_id, requests.seconds_of(held.ttl))

    @spelled(ImageOptions)
    async def plan(
        self,
        prompt: str = "",
        *,
        timeout: float | None = QUICK_S,
        **options: Unpack[ImageOptions],
    ) -> Plan:
        """What `generate_image` with the same arguments would need and do, without doing it."""
        generate = requests.generate_request(
            generation_pb2.GenerateImageRequest, prompt, options, self.client_id
        )
        request = residency_pb2.PlanRequest(generate=generate, card=generate.options.card)
        return mirror(Plan, await self._unary(self._stubs.residency.Plan, request, timeout))

    @spelled(VideoOptions)
    async def plan_video(
        self,
        prompt: str = "",
        *,
        timeout: float | None = QUICK_S,
        **options: Unpack[VideoOptions],
    ) -> Plan:
        """What `generate_video` with the same arguments would need and do, without doing it."""
        video = requests.generate_request(
            generation_pb2.GenerateVideoRequest, prompt, options, self.client_id
        )
        request = residency_pb2.PlanRequest(video=video, card=video.options.card)
        return mirror(Plan, await self._unary(self._stubs.residency.Plan, request, timeout))

    @spelled(AudioOptions)
    async def plan_audio(
        self,
        prompt: str = "",
        *,
        timeout: float | None = QUICK_S,
        **options: Unpack[AudioOptions],
    ) -> Plan:
        """What `generate_audio` with the same arguments would need and do, without doing it."""
        audio = requests.generate_request(
            generation_pb2.GenerateAudioRequest, prompt, options, self.client_id
        )
        request = residency_pb2.PlanRequest(audio=audio, card=audio.options.card)
        return mirror(Plan, await self._unary(self._stubs.residency.Plan, request, timeout))

    async def plan_model(
        self, model: ModelLike, *, card: str = "", timeout: float | None = QUICK_S
    ) -> Plan:
        """What the default request of a model would need, whatever the model generates.

        Pictures that the model requires count with the request's size.
        """
        request = message_of(residency_pb2.PlanRequest, model=requests.model_of(model), card=card)
        return mirror(Plan, await self._unary(self._stubs.residency.Plan, request, timeout))

    async def status(self, *, timeout: float | None = QUICK_S) -> Status:
        """The memory and the jobs of each card."""
        request = residency_pb2.GetStatusRequest()
        return mirror(Status, await self._unary(self._stubs.residency.GetStatus, request, timeout))

    def watch_status(
        self, *, interval_s: float = 0.25, timeout: float | None = None
    ) -> AsyncStatusStream:
        """The same, each time it changes, no oftener than every `interval_s` seconds."""
        request = message_of(
            residency_pb2.WatchStatusRequest, interval_ms=requests.milliseconds(interval_s)
        )
        call = self._connection.stream(self._stubs.residency.WatchStatus, request, timeout)
        return AsyncStatusStream(call, self.endpoint)

    async def trim(self, card: str = "", *, timeout: float | None = None) -> int:
        """Frees memory that the service keeps unused, of one card or all. Returns its bytes."""
        request = message_of(residency_pb2.TrimRequest, card=card)
        return int((await self._unary(self._stubs.residency.Trim, request, timeout)).freed_bytes)

    async def renew_reservation(
        self,
        reservation_id: str,
        size_bytes: int = 0,
        *,
        ttl_s: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Gives a reservation a new time, and another size unless `size_bytes` is 0.

        For `ttl_s` seconds: at most a day; default: ten minutes. Returns its bytes.
        """
        request = requests.reserve_request(size_bytes, ttl_s, renews=reservation_id)
        return int((await self._unary(self._stubs.residency.Reserve, request, timeout)).bytes)

    async def recycle(
        self, card: str = "", *, force: bool = False, timeout: float | None = None
    ) -> list[str]:
        """Ends a card's worker process (default: of every card) and waits for the next to be ready.

        What it runs is finished first; with `force` that is tried again on the new one. Returns
        the ids of the cards.
        """
        request = message_of(
            residency_pb2.RecycleRequest, card=card, force=force, client_id=self.client_id
        )
        return list((await self._unary(self._stubs.residency.Recycle, request, timeout)).cards)

    async def reserve(
        self,
        size_bytes: int,
        *,
        ttl_s: float | None = None,
        label: str = "",
        card: str = "",
        process_id: int = 0,
        timeout: float | None = None,
    ) -> AsyncReservedMemory:
        """Frees memory for another program on a card: idle components leave, the bytes stay free.

        For `ttl_s` seconds: at most a day; default: ten minutes. Usable by `async with await`.
        With the `process_id` of a process of the service's machine it ends when that process does.
        """
        request = requests.reserve_request(size_bytes, ttl_s, label, card, process_id=process_id)
        made = await self._unary(self._stubs.residency.Reserve, request, timeout)

        async def release() -> bool:
            request = residency_pb2.ReleaseReservationRequest(reservation_id=made.reservation_id)
            return bool(
                (
                    await self._unary(self._stubs.residency.ReleaseReservation, request, QUICK_S)
                ).released
            )

        evicted = tuple(mirror(FreedComponent, one) for one in made.evicted)
        return AsyncReservedMemory(release, made.reservation_id, made.bytes, made.card, evicted)

    def box_of(self, what: str | LatentInfo | MediaInfo) -> str:
        """The box that has a job, a latent, media, a hold or a reservation, by its id.

        Of several behind a proxy, as this program has heard of it; empty: there is one alone, or
        another program asked. For `box=` of a client: of one that fetches a job, or that loads and
        pins at this box.
        """
        return self._connection.box_of(what if isinstance(what, str) else what.id)

    # Jobs and the service.

    async def jobs(
        self, *, include_ended: bool = False, timeout: float | None = QUICK_S
    ) -> tuple[JobInfo, ...]:
        """The jobs of all clients; on request also those that have ended."""
        request = jobs_pb2.ListJobsRequest(include_ended=include_ended)
        jobs = (await self._unary(self._stubs.jobs.List, request, timeout)).jobs
        return tuple(mirror(JobInfo, job) for job in jobs)

    async def fetch(
        self, job_id: str, *, timeout: float | None = None
    ) -> ImageResult | VideoResult | AudioResult:
        """Waits for the end of a job that was submitted with `detach`; returns what it made.

        As often as you like, also from another program and after a restart of the service, until
        the service's `queue.results_for` after its end. Raises the job's error where it failed, and
        JobNotFound where there is none, it is another's, or its results have expired.
        """
        return await self.stream_fetch(job_id, timeout=timeout).result()

    def stream_fetch(
        self, job_id: str, *, timeout: float | None = None
    ) -> AsyncEventStream[ImageResult | VideoResult | AudioResult]:
        """The same as an iterator of events, with its progress. Leaving it leaves the job."""
        request = message_of(jobs_pb2.FetchJobRequest, job_id=job_id)
        call = self._connection.stream(self._stubs.jobs.Fetch, request, timeout)
        return AsyncEventStream(call, self.endpoint, fetched_result, Bounds.unknown(), None, True)

    async def cancel(
        self, job_id: str, *, release_latents: bool = False, timeout: float | None = QUICK_S
    ) -> bool:
        """Ends a job, anybody's. False: it had ended already.

        `release_latents` also releases what the job has kept and what it keeps until it ends, even
        if it has ended: for those who left its stream, and may not have heard of every latent.
        """
        request = message_of(
            jobs_pb2.CancelJobRequest,
            job_id=job_id,
            release_latents=release_latents,
            client_id=self.client_id,
        )
        if self._unfinished:
            self._unfinished.forget_job(job_id)
        return bool((await self._unary(self._stubs.jobs.Cancel, request, timeout)).cancelled)

    async def server_info(self, *, timeout: float | None = QUICK_S) -> ServerInfo:
        """Version, capabilities and cards of the service."""
        request = server_pb2.GetServerInfoRequest()
        return mirror(
            ServerInfo, await self._unary(self._stubs.server.GetServerInfo, request, timeout)
        )

    async def health(self, card: str = "", *, timeout: float | None = QUICK_S) -> str:
        """`serving`, `not_serving` or `unknown`: the service as a whole, or one card of it."""
        return requests.health_word(
            await self._unary(self._stubs.check_health, requests.health_request(card), timeout)
        )

    async def wait_until_ready(self, timeout: float = 60.0, *, card: str = "") -> None:
        """Returns once the service, or one card of it, is serving.

        Raises ConnectionFailed when nothing answers within `timeout` seconds, CardNotReady when it
        answers but is not serving by then.
        """
        watch = self._stubs.watch_health
        until, said = time.monotonic() + timeout, ""
        while (left := until - time.monotonic()) > 0:
            call = watch(
                requests.health_request(card),
                timeout=left,
                metadata=self._line.metadata(),
                wait_for_ready=True,
            )
            try:
                async for answer in call:
                    said = requests.health_word(answer)
                    if said == "serving":
                        return
            except grpc.RpcError as error:
                if not requests.worth_waiting(error):
                    raise error_of(error, self.endpoint) from None
            finally:
                call.cancel()
            await pause(max(0.0, min(RETRY_S, until - time.monotonic())))
        raise not_ready(self.endpoint, said, timeout)

    # The connection.

    async def close(self) -> None:
        """Ends all calls and closes the connection. Again is harmless."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.endpoint!r})"

    @property
    def _stubs(self) -> AsyncStubs:
        return self._connection.stubs

    async def _unary(self, method: Any, request: object, timeout: float | None) -> Any:
        try:
            return await self._connection.unary(method, request, timeout)
        except grpc.RpcError as error:
            raise error_of(error, self.endpoint) from None

    async def _one_or_each(
        self,
        stream: Callable[..., AsyncEventStream[R]],
        prompt: str | list[str] | tuple[str, ...],
        timeout: float | None,
        options: GenerateOptions,
    ) -> R | list[R]:
        """The result of a prompt, or those of a list's prompts, one job after another."""
        if not isinstance(prompt, (list, tuple)):
            return await stream(prompt, timeout=timeout, **options).result()
        results: list[R] = []
        for one in requests.prompts_of(prompt, options):
            try:
                results.append(await stream(one, timeout=timeout, **options).result())
            except MooredError as error:
                error.results = tuple(results)
                raise
        return results

    def _events(
        self, method: Any, request: Any, timeout: float | None, finish: Callable[[Gathered], R]
    ) -> AsyncEventStream[R]:
        is_detached, note = bool(request.options.detach), None
        if is_detached and self._unfinished and not request.options.idempotency_key:
            note = self._unfinished.begin(self.endpoint, request)

        def call(timeout: float | None) -> AsyncCall:
            return self._connection.stream(method, request, timeout)

        retries = AsyncRetries(call, timeout, self._retry_s)
        return AsyncEventStream(
            call(timeout),
            self.endpoint,
            finish,
            Bounds.of(request),
            retries,
            is_detached,
            note,
            self.cancel,
        )

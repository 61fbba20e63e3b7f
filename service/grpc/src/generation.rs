//! `moored.v1.Generation`.

use std::pin::Pin;

use api::v1;
use api::v1::generation_server;
use calls::{CHUNK_BYTES, Generation};
use futures::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use crate::convert::{latent_out, media_out};
use crate::events::{EventStream, events_of};
use crate::requests::{
    asked, caller_of, decode_in, encode_in, film_in, image_in, latent_in, media_in, messages_of, track_in,
};
use crate::sessions::{SessionStream, open_session};
use crate::status::status_of;

/// The calls of `moored.v1.Generation`.
pub(crate) struct GenerationService(pub(crate) Generation);

#[tonic::async_trait]
impl generation_server::Generation for GenerationService {
    type GenerateImageStream = EventStream;

    async fn generate_image(
        &self,
        request: Request<v1::GenerateImageRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        events_of(self.0.generate(image_in(asked(request)?), &caller).await)
    }

    type GenerateVideoStream = EventStream;

    async fn generate_video(
        &self,
        request: Request<v1::GenerateVideoRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        events_of(self.0.generate(film_in(asked(request)?), &caller).await)
    }

    type GenerateAudioStream = EventStream;

    async fn generate_audio(
        &self,
        request: Request<v1::GenerateAudioRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        events_of(self.0.generate(track_in(asked(request)?), &caller).await)
    }

    type StreamAudioStream = SessionStream;

    async fn stream_audio(
        &self,
        request: Request<Streaming<v1::StreamAudioRequest>>,
    ) -> Result<Response<SessionStream>, Status> {
        let caller = caller_of(&request);
        let session = open_session(&self.0, request.into_inner(), caller).await;
        session.map(Response::new)
    }

    type EncodeImageStream = EventStream;

    async fn encode_image(
        &self,
        request: Request<v1::EncodeImageRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        events_of(self.0.encode(encode_in(asked(request)?), &caller).await)
    }

    type DecodeLatentStream = EventStream;

    async fn decode_latent(
        &self,
        request: Request<v1::DecodeLatentRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        events_of(self.0.decode(decode_in(asked(request)?), &caller).await)
    }

    type GetLatentStream = Pin<Box<dyn Stream<Item = Result<v1::LatentChunk, Status>> + Send>>;

    async fn get_latent(
        &self,
        request: Request<v1::GetLatentRequest>,
    ) -> Result<Response<Self::GetLatentStream>, Status> {
        let caller = caller_of(&request);
        let id = asked(request)?.latent_id;
        let latent = self.0.latent(&id, &caller).await;
        let (latent, taken) = latent.map_err(|e| status_of(&e))?;
        let mut info = Some(latent_out(&latent.info));
        // Tensor after tensor, in the order of `info.tensors`, none of them copied.
        let slices = latent.values.into_values().flat_map(|tensor| {
            let bytes = tensor.data.len();
            let starts = (0..bytes.max(1)).step_by(CHUNK_BYTES);
            starts.map(move |start| tensor.data.slice(start..(start + CHUNK_BYTES).min(bytes)))
        });
        let chunks = slices.map(|chunk| {
            let info = info.take();
            Ok(v1::LatentChunk { info, chunk })
        });
        let chunks = futures::stream::iter(chunks.collect::<Vec<_>>());
        Ok(Response::new(Box::pin(chunks.inspect(move |_| {
            let _until_read = &taken;
        }))))
    }

    async fn put_latent(
        &self,
        request: Request<Streaming<v1::LatentChunk>>,
    ) -> Result<Response<v1::LatentInfo>, Status> {
        let caller = caller_of(&request);
        let mut upload = self.0.latent_upload();
        let mut chunks = messages_of(request);
        while let Some(chunk) = chunks.next().await {
            let v1::LatentChunk { info, chunk } = chunk?;
            self.0.receive(chunk.len(), &caller).map_err(|e| status_of(&e))?;
            let added = upload.add(info.map(latent_in), &chunk);
            added.map_err(|e| status_of(&e))?;
        }
        let info = self.0.put_latent(upload, &caller).await;
        let info = info.map_err(|e| status_of(&e))?;
        Ok(Response::new(latent_out(&info)))
    }

    async fn release_latent(
        &self,
        request: Request<v1::ReleaseLatentRequest>,
    ) -> Result<Response<v1::ReleaseLatentResponse>, Status> {
        let caller = caller_of(&request);
        let released = self.0.release_latent(&asked(request)?.latent_id, &caller).await;
        Ok(Response::new(v1::ReleaseLatentResponse { released }))
    }

    async fn put_media(
        &self,
        request: Request<Streaming<v1::MediaChunk>>,
    ) -> Result<Response<v1::MediaInfo>, Status> {
        let caller = caller_of(&request);
        let mut upload = self.0.media_upload(&caller);
        let mut chunks = messages_of(request);
        while let Some(chunk) = chunks.next().await {
            let v1::MediaChunk { info, chunk } = chunk?;
            self.0.receive(chunk.len(), &caller).map_err(|e| status_of(&e))?;
            let added = upload.add(info.map(media_in), &chunk);
            added.map_err(|e| status_of(&e))?;
        }
        let kept = upload.finish().await.map_err(|e| status_of(&e))?;
        Ok(Response::new(media_out(kept)))
    }

    async fn release_media(
        &self,
        request: Request<v1::ReleaseMediaRequest>,
    ) -> Result<Response<v1::ReleaseMediaResponse>, Status> {
        let caller = caller_of(&request);
        let released = self.0.release_media(&asked(request)?.media_id, &caller);
        Ok(Response::new(v1::ReleaseMediaResponse { released }))
    }
}

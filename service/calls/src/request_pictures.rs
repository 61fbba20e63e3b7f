//! The pictures of a request. Their sizes are read first, from their headers. They are decoded only after the model has accepted
//! the request with these sizes, since each may take hundreds of megabytes.

use std::sync::Arc;

use bytes::Bytes;
use engine::Error;
use engine::job::Reach;
use media::CancelToken;
use media::pictures::{self, PictureError};
use model::{Clip, InitImage, Mask, Medium, Model, Picture, PictureSlot, ReferenceFit, Request};

use crate::asked::{Asked, StartFrom, named};
use crate::budget::{Client, Taken};
use crate::errors::invalid;
use crate::generation::Generation;
use crate::media_store::{Media, PICTURES, refused};
use crate::references::PictureInput;
use crate::threads::PLANNING;

const MASK: &str = "mask";
const END: &str = "end_image";
const REFERENCES: &str = "references";

/// A picture of a request, encoded.
#[derive(Clone)]
pub(crate) struct RequestPicture {
    /// The field of the request that has it.
    field: String,
    data: Bytes,
    /// Width and height in pixels, after the rotation that its metadata asks for.
    pub(crate) size: (u32, u32),
}

/// The pictures of a request, by their slots.
#[derive(Default)]
pub(crate) struct RequestPictures(Vec<(PictureSlot, RequestPicture)>);

impl RequestPictures {
    /// A picture to start from, and no others.
    pub(crate) fn of_start(start: RequestPicture) -> RequestPictures {
        RequestPictures(vec![(PictureSlot::Start, start)])
    }

    fn has(&self, slot: PictureSlot) -> bool {
        self.0.iter().any(|(of, _)| *of == slot)
    }

    /// The picture that fills a slot: a reference is decoded for two of them where a model sees it in a second size.
    fn of(&self, slot: PictureSlot) -> Option<&RequestPicture> {
        let slot = match slot {
            PictureSlot::Seen(index) => PictureSlot::Reference(index),
            other => other,
        };
        self.0
            .iter()
            .find(|(of, _)| *of == slot)
            .map(|(_, picture)| picture)
    }
}

impl Generation {
    /// The pictures of a request with their sizes, and the picture or media that it starts from. A latent to start from is not
    /// among them.
    pub(crate) async fn request_pictures(
        &self,
        asked: &Asked,
        defaults: &Medium,
        model: &dyn Model,
        reach: &Reach,
    ) -> Result<(RequestPictures, StartFrom), Error> {
        // Refused before headers are read, which takes time.
        if let Some(problem) = model.too_many_references(asked.references.len()) {
            return Err(Error::Invalid(vec![problem]));
        }
        let (start, from) = self.start_of(asked, defaults, model, reach).await?;
        let mut pictures = Vec::from_iter(start.map(|start| (PictureSlot::Start, start)));
        if let Some(mask) = &asked.mask {
            pictures.push((PictureSlot::Mask, self.picture_of_input(MASK, mask, reach).await?));
        }
        if let Some(end) = asked.end_image() {
            pictures.push((PictureSlot::End, self.picture_of_input(END, end, reach).await?));
        }
        for (index, reference) in asked.references.iter().enumerate() {
            let reference = self.picture_of_input(REFERENCES, reference, reach).await?;
            pictures.push((PictureSlot::Reference(index), reference));
        }
        for (index, control) in asked.controls.iter().enumerate() {
            let field = format!("controls[{index}].image");
            let image = self.picture_of_input(&field, &control.image, reach).await?;
            pictures.push((PictureSlot::Control(index), image));
        }
        Ok((RequestPictures(pictures), from))
    }

    /// Reads the header of a picture.
    pub(crate) async fn request_picture(&self, field: &str, data: Bytes) -> Result<RequestPicture, Error> {
        let encoded = data.clone();
        // A header is small, so it does not wait for the turns of decoding.
        let size = PLANNING.run(move || pictures::size_of(&encoded)).await?;
        let size = size.map_err(|problem| invalid(field, problem.to_string()))?;
        Ok(RequestPicture {
            field: field.to_owned(),
            data,
            size,
        })
    }

    async fn picture_of_input(
        &self,
        field: &str,
        picture: &PictureInput,
        reach: &Reach,
    ) -> Result<RequestPicture, Error> {
        let data = match picture.media_id.as_str() {
            "" => picture.data.clone().unwrap_or_default(),
            id => match self.media.get(field, id, reach)? {
                Media::Picture(picture) => picture,
                Media::Clip(_) => {
                    let problem = "is media of another kind: name the id of an uploaded picture";
                    return Err(invalid(field, problem));
                }
            },
        };
        self.request_picture(field, data).await
    }

    /// The media that a request starts from, other than a latent.
    async fn start_of(
        &self,
        asked: &Asked,
        defaults: &Medium,
        model: &dyn Model,
        reach: &Reach,
    ) -> Result<(Option<RequestPicture>, StartFrom), Error> {
        const MEDIA: &str = "init_media_id";
        let from_clip = |clip: Clip| Ok((None, StartFrom::Clip(clip)));
        if let Some(clip) = &asked.source {
            return from_clip(clip.clone());
        }
        let (field, picture) = match &asked.init_media {
            None => match &asked.init_image {
                None => return Ok((None, StartFrom::Nothing)),
                Some(picture) => ("init_image", picture.clone()),
            },
            Some(id) => match self.media.get(MEDIA, id, reach)? {
                Media::Clip(clip) => return from_clip(clip),
                Media::Picture(_) if defaults.size().is_none() => {
                    return Err(invalid(
                        MEDIA,
                        "is a picture, and a track starts from a track: name the id of an uploaded track",
                    ));
                }
                Media::Picture(picture) => (MEDIA, picture),
            },
        };
        if defaults.size().is_none() {
            return Ok((None, StartFrom::Nothing));
        }
        let pictures = self.request_picture(field, picture).await?;
        // A side that is not set is that of the picture, in the nearest size that the model makes.
        let near = model.size_near(pictures.size.0, pictures.size.1);
        let size = (named(asked.width, near.0), named(asked.height, near.1));
        Ok((Some(pictures), StartFrom::Picture(InitImage::of_size(size))))
    }

    /// The reference pictures of a request in the sizes that the model takes, and in those in which it sees them, where these are
    /// others.
    pub(crate) fn references_of(
        pictures: &RequestPictures,
        model: &dyn Model,
    ) -> Result<[Vec<InitImage>; 2], Error> {
        let is_reference = |slot: &PictureSlot| matches!(slot, PictureSlot::Reference(_));
        let references = pictures.0.iter().filter(|(slot, _)| is_reference(slot));
        let fits = references.map(|(_, reference)| fit(model, reference));
        let fits = fits.collect::<Result<Vec<_>, Error>>()?;
        let taken = fits.iter().map(|fit| InitImage::of_size(fit.size));
        let seen = fits.iter().filter_map(|fit| fit.seen.map(InitImage::of_size));
        Ok([taken.collect(), seen.collect()])
    }

    /// Decodes the pictures of a request, if the model accepts the request with their sizes. The bytes count against the client
    /// until the result is dropped.
    pub(crate) async fn decode_pictures(
        &self,
        request: &mut Request,
        pictures: RequestPictures,
        model: &Arc<dyn Model>,
        client: Client,
    ) -> Result<Option<Taken>, Error> {
        if pictures.0.is_empty() {
            return Ok(None);
        }
        let (asked, planner) = (request.clone(), model.clone());
        let planned = PLANNING
            .run_of(("plans", client), move |_| planner.plan(&asked))
            .await?;
        planned.map_err(Error::Invalid)?;
        let bytes = request.medium.pictures().iter().map(Picture::whole_bytes).sum();
        let taken = self.bounds.media.take(client, bytes);
        let taken = taken.map_err(refused)?;
        for picture in request.medium.pictures_mut() {
            if let Some(encoded) = pictures.of(picture.slot) {
                let fit = fit_of(&**model, picture.slot, encoded, (*picture.width, *picture.height))?;
                let decoded = self.decoded(encoded.clone(), picture.slot, fit, client);
                *picture.data = decoded.await?.into();
            }
        }
        Ok(Some(taken))
    }

    /// The data of a picture, decoded and scaled, of which the middle may be cut out.
    async fn decoded(
        &self,
        pictures: RequestPicture,
        slot: PictureSlot,
        fit: ReferenceFit,
        client: Client,
    ) -> Result<Vec<u8>, Error> {
        let RequestPicture { field, data, .. } = pictures;
        let decode = move |cancel: &_| decoded_as(&data, slot, fit, cancel);
        let decoded = self.decoding.run_of((PICTURES, client), decode).await?;
        decoded.map_err(|problem| invalid(&field, problem.to_string()))
    }
}

/// The data of the picture of a slot.
fn decoded_as(
    data: &[u8],
    slot: PictureSlot,
    fit: ReferenceFit,
    cancel: &CancelToken,
) -> Result<Vec<u8>, PictureError> {
    match slot {
        PictureSlot::Mask => pictures::decode_mask(data, fit.scaled, cancel),
        PictureSlot::Start
        | PictureSlot::End
        | PictureSlot::Reference(_)
        | PictureSlot::Seen(_)
        | PictureSlot::Control(_) => {
            pictures::decode(data, Some(fit.scaled), cancel).map(|pixels| fit.cut(pixels.rgb, 3))
        }
    }
}

/// How the picture of a slot of this size is scaled and cut.
fn fit_of(
    model: &dyn Model,
    slot: PictureSlot,
    encoded: &RequestPicture,
    size: (u32, u32),
) -> Result<ReferenceFit, Error> {
    match slot {
        PictureSlot::Reference(_) => fit(model, encoded),
        PictureSlot::Start
        | PictureSlot::End
        | PictureSlot::Mask
        | PictureSlot::Seen(_)
        | PictureSlot::Control(_) => Ok(ReferenceFit::scaled_to(size)),
    }
}

/// How the model takes a reference picture.
fn fit(model: &dyn Model, reference: &RequestPicture) -> Result<ReferenceFit, Error> {
    let (width, height) = reference.size;
    let fit = model.reference_fit(width, height);
    fit.map_err(|problem| Error::Invalid(vec![problem]))
}

/// The mask of a request in the size of its picture.
pub(crate) fn mask_of(pictures: &RequestPictures, size: (u32, u32)) -> Option<Mask> {
    pictures.has(PictureSlot::Mask).then(|| Mask::of_size(size))
}

/// The picture that a film ends with, in the size of the film.
pub(crate) fn end_of(pictures: &RequestPictures, size: (u32, u32)) -> Option<InitImage> {
    pictures.has(PictureSlot::End).then(|| InitImage::of_size(size))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::DType;
    use model::{Precision, resized};

    use super::*;

    /// A model that takes a reference twice gets both sizes of the client's picture, each scaled once.
    #[test]
    fn a_reference_is_decoded_for_each_size_that_a_model_takes() {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipelines/fixtures");
        for name in ["qwen-vl-tiny", "qwen-image-tiny"] {
            copy(&fixtures.join(name), folder.path());
        }
        let index = folder.path().join("model_index.json");
        let text = std::fs::read_to_string(&index).unwrap();
        let text = text.replace("QwenImagePipeline", "QwenImageEditPlusPipeline");
        std::fs::write(&index, text).unwrap();
        let model = pipelines::families()
            .open(folder.path(), &Precision::full(DType::F32))
            .unwrap();

        let rgb: Vec<u8> = (0..3 * 150 * 100).map(|place| (place * 7 % 251) as u8).collect();
        let data: Bytes = pictures::png(150, 100, &rgb, None).unwrap().into();
        let reference = RequestPicture {
            field: REFERENCES.to_owned(),
            data,
            size: (150, 100),
        };
        let pictures = RequestPictures(vec![(PictureSlot::Reference(0), reference)]);
        let [taken, seen] = Generation::references_of(&pictures, &*model).unwrap();
        let sizes = |pictures: &[InitImage]| -> Vec<(u32, u32)> {
            pictures
                .iter()
                .map(|picture| (picture.width, picture.height))
                .collect()
        };
        assert_eq!(
            (sizes(&taken), sizes(&seen)),
            (vec![(1248, 832)], vec![(480, 320)])
        );
        for (slot, size) in [
            (PictureSlot::Reference(0), (1248, 832)),
            (PictureSlot::Seen(0), (480, 320)),
        ] {
            let encoded = pictures.of(slot).unwrap();
            let fit = fit_of(&*model, slot, encoded, size).unwrap();
            let found = decoded_as(&encoded.data, slot, fit, &CancelToken::default()).unwrap();
            assert!(found == resized(&rgb, 3, (150, 100), size), "{slot:?}");
        }
        assert!(pictures.of(PictureSlot::Seen(1)).is_none());
    }

    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().flatten() {
            let target = to.join(entry.file_name());
            match entry.path().is_dir() {
                true => copy(&entry.path(), &target),
                false => {
                    std::fs::copy(entry.path(), target).unwrap();
                }
            }
        }
    }
}

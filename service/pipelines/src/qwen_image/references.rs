//! Pictures that are edited. The text encoder sees each of them in the prompt, and the transformer as tokens after those of the
//! generated picture (`QwenImageEditPipeline`, `QwenImageEditPlusPipeline`).

use model::{MAX_SIDE, Memo, Passes, ReferenceFit};

use super::model::{QwenImageModel, VISION};
use super::variant::Variant;
use crate::place::Place;
use crate::text::qwen2_vl::Prompt;
use crate::text::tokenizers::TokenizeError;
use crate::vision::qwen2_vl::{Grid, size_of_area};
use crate::{Image, InitImage, Medium, Request, RequestError, Role, Rung, StageError, StagePlan, ValueShape};

/// Names of the stages of a picture, for the text encoder and for the transformer, followed by its number.
pub(super) const ENCODE_PICTURE: &str = "encode_picture_";
pub(super) const ENCODE_REFERENCE: &str = "encode_reference_";

/// Names of their values, followed by its number: the vision tower's tokens, `[tokens, width]` of the text encoder, and the latent,
/// f32 `[1, channels, height / 8, width / 8]` in the transformer's scale.
pub(super) const PICTURE: &str = "picture_";
pub(super) const REFERENCE: &str = "reference_";

/// Pixels to which a reference is scaled.
const AREA: u32 = 1024 * 1024;

/// Pixels to which it is scaled for the text encoder by Edit-2509 and 2511, from the client's picture; Edit sees it as it is
/// taken.
const AREA_SEEN: u32 = 384 * 384;

/// The places of all pictures: the generated one, then the references.
pub(super) fn places(image: &Image) -> Vec<Place> {
    let references = image.references.iter();
    let references = references.map(|reference| (reference.width, reference.height));
    let all = std::iter::once((image.width, image.height)).chain(references);
    all.map(|(width, height)| Place::of_picture(width, height))
        .collect()
}

impl QwenImageModel {
    /// How a reference picture of this size is taken: scaled to a megapixel, without a cut.
    pub(super) fn fit(&self, width: u32, height: u32) -> Result<ReferenceFit, RequestError> {
        let refuse = |problem: String| RequestError::new("references", problem);
        if width == 0 || height == 0 {
            return Err(refuse(format!("one is {width}x{height}")));
        }
        let size = size_of_area((width, height), AREA);
        if size.0.max(size.1) > MAX_SIDE {
            return Err(refuse(format!(
                "one is {width}x{height}; one side may be at most 16 times as long as the other"
            )));
        }
        let problem = |problem: String| refuse(format!("one is {width}x{height}: {problem}"));
        let seen = (self.variant == Variant::EditPlus).then(|| size_of_area((width, height), AREA_SEEN));
        self.processor.grid(seen.unwrap_or(size)).map_err(problem)?;
        Ok(ReferenceFit {
            seen,
            ..ReferenceFit::scaled_to(size)
        })
    }

    /// The references of a request as the text encoder sees them, before its own processor scales them.
    pub(super) fn seen<'a>(&self, image: &'a Image) -> Result<&'a [InitImage], RequestError> {
        let seen = match self.variant {
            Variant::Text | Variant::Edit => &image.references,
            Variant::EditPlus => &image.seen,
        };
        match seen.len() == image.references.len() {
            true => Ok(seen),
            false => Err(RequestError::new(
                "references",
                "are there without the size in which the text encoder sees them",
            )),
        }
    }

    /// The patches of a picture that the text encoder sees.
    pub(super) fn grid(&self, seen: &InitImage) -> Result<Grid, RequestError> {
        let grid = self.processor.grid((seen.width, seen.height));
        grid.map_err(|problem| RequestError::new("references", problem))
    }

    /// The patches of its pixels, f32 `[patches, numbers]` in host memory.
    pub(super) fn patches(&self, seen: &InitImage) -> Result<candle_core::Tensor, StageError> {
        if seen.rgb.is_empty() || !seen.is_whole() {
            return Err(StageError::BadInput("a reference without its pixels".to_owned()));
        }
        Ok(self.processor.patches(&seen.rgb, (seen.width, seen.height))?)
    }

    /// One of a request's texts in its template, with the tokens of the pictures that are edited.
    pub(super) fn prompt(
        &self,
        request: &Request,
        image: &Image,
        text: &str,
    ) -> Result<Prompt, RequestError> {
        let grids = self.seen(image)?.iter().map(|seen| self.grid(seen));
        let grids = grids.collect::<Result<Vec<Grid>, RequestError>>()?;
        let (template, most) = (self.variant.template(), self.variant.most_tokens(request));
        let refused = |error: TokenizeError| RequestError::new("prompt", error.to_string());
        let prompt = template
            .encode(&self.tokenizer, text, &grids, most)
            .map_err(refused)?;
        let known = self
            .tokenizer
            .check_known(&prompt.ids, super::model::TEXT_ENCODER, self.text.vocab_size);
        known.map_err(refused)?;
        Ok(prompt)
    }

    /// The stages of the pictures that are edited in the vision tower.
    pub(super) fn picture_stages(&self, image: &Image) -> Result<Vec<StagePlan>, RequestError> {
        let seen = self.seen(image)?.iter().enumerate();
        seen.map(|(number, seen)| self.picture_stage(number, seen))
            .collect()
    }

    /// The stages of the pictures that are edited in the autoencoder.
    pub(super) fn reference_stages(&self, image: &Image) -> Vec<StagePlan> {
        let autoencoder = self.autoencoder();
        let references = image.references.iter().enumerate();
        let stages = references.map(|(number, reference)| {
            let (name, value) = (
                format!("{ENCODE_REFERENCE}{number}"),
                format!("{REFERENCE}{number}"),
            );
            autoencoder.reference_stage(&name, &value, reference)
        });
        stages.collect()
    }

    /// The stage of a picture in the vision tower. It is remembered for requests with the same picture.
    fn picture_stage(&self, number: usize, seen: &InitImage) -> Result<StagePlan, RequestError> {
        let (grid, dtype) = (self.grid(seen)?, self.parts.dtype());
        let components = &self.parts.components;
        let scratch =
            self.text.vision.scratch(grid, dtype) + components.dequantizing(VISION, grid.patches(), |_| true);
        let read = Image {
            references: vec![seen.clone()],
            ..Image::of(seen.width, seen.height)
        };
        let name = format!("{ENCODE_PICTURE}{number}");
        Ok(StagePlan {
            shape: format!("{}x{} patches", grid.columns, grid.rows),
            gives: vec![format!("{PICTURE}{number}")],
            memo: Some(Memo::of(Request::of(Medium::Image(read), 1, 0.0, 1))),
            passes: Passes::of(components.flops_of_products(VISION, |_| grid.patches())),
            reads_media: true,
            ..StagePlan::of(&name, Role::Encode, [VISION], vec![Rung::whole(scratch)])
        })
    }

    /// The vision tower's values.
    pub(super) fn pictures(&self, image: &Image) -> Result<Vec<ValueShape>, RequestError> {
        let value = |(number, seen): (usize, &InitImage)| {
            let shape = vec![self.grid(seen)?.tokens(), self.text.hidden_size];
            Ok(ValueShape::new(&format!("{PICTURE}{number}"), shape))
        };
        self.seen(image)?.iter().enumerate().map(value).collect()
    }

    /// The autoencoder's values.
    pub(super) fn reference_values(&self, image: &Image) -> impl Iterator<Item = ValueShape> {
        let references = image.references.iter().enumerate();
        references.map(move |(number, reference)| {
            let size = Image::of(reference.width, reference.height);
            let shape = self.autoencoder().latent(&size).shape;
            ValueShape::new(&format!("{REFERENCE}{number}"), shape)
        })
    }
}

//! Pictures that are edited. The text encoder sees each of them in the prompt, and the transformer as tokens after those of the
//! generated picture (`QwenImageEditPipeline`, `QwenImageEditPlusPipeline`).

use model::{MAX_SIDE, Memo, Passes, ReferenceFit, resized};

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

/// Pixels to which it is scaled for the text encoder by Edit-2509 and 2511; Edit takes it as it is.
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
        self.grid_at(size).map_err(problem)?;
        Ok(ReferenceFit::scaled_to(size))
    }

    /// The size of a reference of this size as the text encoder sees it, before its own processor scales it.
    fn seen_size(&self, size: (u32, u32)) -> (u32, u32) {
        match self.variant {
            Variant::Text | Variant::Edit => size,
            Variant::EditPlus => size_of_area(size, AREA_SEEN),
        }
    }

    /// The patches of a reference of this size.
    fn grid_at(&self, size: (u32, u32)) -> Result<Grid, String> {
        self.processor.grid(self.seen_size(size))
    }

    /// The patches of a reference.
    pub(super) fn grid(&self, reference: &InitImage) -> Result<Grid, RequestError> {
        let grid = self.grid_at((reference.width, reference.height));
        grid.map_err(|problem| RequestError::new("references", problem))
    }

    /// The patches of a reference's pixels, f32 `[patches, numbers]` in host memory.
    pub(super) fn patches(&self, reference: &InitImage) -> Result<candle_core::Tensor, StageError> {
        let size = (reference.width, reference.height);
        let seen = self.seen_size(size);
        if reference.rgb.is_empty() || !reference.is_whole() {
            return Err(StageError::BadInput("a reference without its pixels".to_owned()));
        }
        let scaled;
        let rgb = match seen == size {
            true => &reference.rgb[..],
            false => {
                scaled = resized(&reference.rgb, 3, size, seen);
                &scaled[..]
            }
        };
        Ok(self.processor.patches(rgb, seen)?)
    }

    /// One of a request's texts in its template, with the tokens of the pictures that are edited.
    pub(super) fn prompt(
        &self,
        request: &Request,
        image: &Image,
        text: &str,
    ) -> Result<Prompt, RequestError> {
        let grids = image.references.iter().map(|reference| self.grid(reference));
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
        let references = image.references.iter().enumerate();
        references
            .map(|(number, reference)| self.picture_stage(number, reference))
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
    fn picture_stage(&self, number: usize, reference: &InitImage) -> Result<StagePlan, RequestError> {
        let (grid, dtype) = (self.grid(reference)?, self.parts.dtype());
        let components = &self.parts.components;
        let scratch =
            self.text.vision.scratch(grid, dtype) + components.dequantizing(VISION, grid.patches(), |_| true);
        let read = Image {
            references: vec![reference.clone()],
            ..Image::of(reference.width, reference.height)
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
        let references = image.references.iter().enumerate();
        let value = |(number, reference): (usize, &InitImage)| {
            let shape = vec![self.grid(reference)?.tokens(), self.text.hidden_size];
            Ok(ValueShape::new(&format!("{PICTURE}{number}"), shape))
        };
        references.map(value).collect()
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

//! An open Qwen-Image checkpoint: its answers to a planner, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::CheckpointFile;
use model::bounds::{self, PIXELS_PER_TOKEN};
use model::plan::names;
use model::{LeftOut, Memo, Passes, Reads, ReferenceFit, smaller_sides};

use super::checkpoint::{EDITS, FOLDERS, FOLDERS_OF_EDITS, MARKS, PIPELINES};
use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use super::positions::{self, first_of_text};
use super::references::places;
use super::stages::{DENOISE, ENCODE_TEXT, captions};
use super::transformer::{TokenCounts, denoise_scratch};
use super::variant::Variant;
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent};
use crate::autoencoders::kl::plan::LATENT;
use crate::autoencoders::wan::{PictureAutoencoder, WanVaeConfig};
use crate::flow_match::SchedulerConfig;
use crate::mmdit::{StepCache, flops_of_pass, is_modulator, rows_of};
use crate::sampling::{Denoiser, Prompts, passes_in_step, shape_of_sampling};
use crate::stage::Stage;
use crate::start::{is_from_latent, steps_run};
use crate::text::qwen2_vl::{MAX_TOKENS, Prompt, Qwen2VlConfig};
use crate::text::tokenizers::QwenTokenizer;
use crate::vision::qwen2_vl::QwenImageProcessor;
use crate::{
    Family, Image, InitImage, Medium, Model, ModelError, ModelParts, Observer, Precision, Request,
    RequestError, Role, Rung, StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Names of the components.
pub(super) const TRANSFORMER: &str = "transformer";
pub(super) const VAE: &str = "vae";
pub(super) const TEXT_ENCODER: &str = "text_encoder";
/// The vision tower of the text encoder, of models that edit.
pub(super) const VISION: &str = "vision";

/// Name of the family.
pub(super) const FAMILY: &str = "qwen-image";

/// Counts of prompt tokens are rounded up to multiples of this in shapes and scratch, so that prompts of similar length share
/// learned peaks.
const TOKENS_AT_A_TIME: usize = 32;

/// The Qwen-Image family.
#[derive(Clone, Copy, Debug, Default)]
pub struct QwenImage;

impl Family for QwenImage {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("Qwen-Image")
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self, class: &str) -> &'static [&'static str] {
        match EDITS.contains(&class) {
            true => &FOLDERS_OF_EDITS,
            false => &FOLDERS,
        }
    }

    fn is_transformer_file(&self, names: &[&str]) -> bool {
        MARKS.naming_of(names).is_some()
    }

    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        Ok(QwenImageModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// A checkpoint of Qwen-Image or Qwen-Image-Edit.
#[derive(Clone, Debug)]
pub struct QwenImageModel {
    pub(super) transformer: TransformerConfig,
    pub(super) vae: WanVaeConfig,
    pub(super) text: Qwen2VlConfig,
    pub(super) scheduler: SchedulerConfig,
    pub(super) tokenizer: Arc<QwenTokenizer>,
    pub(super) processor: QwenImageProcessor,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
    pub(super) variant: Variant,
}

/// A black picture of this size.
fn black(side: u32) -> InitImage {
    InitImage {
        rgb: vec![0; 3 * (side * side) as usize].into(),
        ..InitImage::of_size((side, side))
    }
}

impl QwenImageModel {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<QwenImageModel, ModelError> {
        let specs = layout(&self.transformer);
        let targets = [TargetComponent::denoiser(TRANSFORMER, &specs, NAMES, "")];
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open(files, "Qwen-Image", &targets, &mut adapted.parts)?;
        Ok(adapted)
    }

    /// The autoencoder, for planning.
    pub(super) fn autoencoder(&self) -> PictureAutoencoder<'_> {
        PictureAutoencoder {
            config: &self.vae,
            components: &self.parts.components,
            dtype: self.parts.dtype(),
        }
    }

    /// The texts of a request in their templates.
    pub(super) fn prompts(&self, request: &Request, image: &Image) -> Result<Prompts<Prompt>, RequestError> {
        let first = first_of_text(&places(image));
        Prompts::texts(request).try_map(|(field, text)| {
            let prompt = self.prompt(request, image, text).map_err(|error| RequestError {
                field: if error.field == "prompt" {
                    field.into()
                } else {
                    error.field
                },
                ..error
            })?;
            // The text encoder reads the template's tokens too, which the transformer does not.
            let dropped = prompt.ids.len() - prompt.used();
            let most = positions::MOST.saturating_sub(first);
            let most = most.min(MAX_TOKENS.saturating_sub(dropped));
            match prompt.used() > most {
                true => Err(RequestError::new(
                    field,
                    format!(
                        "has {} tokens, those of pictures included; at most {most} are expected",
                        prompt.used()
                    ),
                )),
                false => Ok(prompt),
            }
        })
    }

    /// Numbers of tokens of a step under these texts.
    pub(super) fn tokens(&self, prompts: &Prompts<Prompt>, image: &Image) -> TokenCounts {
        let places = places(image);
        let generated = places.first().map_or(0, |place| place.tokens());
        TokenCounts {
            text: prompts.iter().map(Prompt::used).max().unwrap_or(0),
            generated,
            references: places.iter().skip(1).map(|place| place.tokens()).sum(),
        }
    }

    /// Names and shapes of the text encodings of a request.
    fn encodings(&self, request: &Request, prompts: &Prompts<Prompt>) -> Vec<ValueShape> {
        let width = self.transformer.joint_attention_dim;
        let names = captions(request);
        let named = names.iter().zip(prompts.iter());
        named
            .map(|(name, prompt)| ValueShape::new(name, vec![1, prompt.used(), width]))
            .collect()
    }

    fn encode_text_stage(
        &self,
        request: &Request,
        image: &Image,
        prompts: &Prompts<Prompt>,
    ) -> Result<StagePlan, RequestError> {
        let (components, dtype) = (&self.parts.components, self.parts.dtype());
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max();
        let tokens = longest.unwrap_or(0).next_multiple_of(TOKENS_AT_A_TIME);
        let pictured = prompts.iter().map(Prompt::pictured).max().unwrap_or(0);
        let scratch = self.text.scratch(tokens, pictured, dtype)
            + components.dequantizing(TEXT_ENCODER, tokens, |_| true);
        let sizes = |pictures: &[InitImage]| {
            let pictures = pictures.iter();
            pictures
                .map(|picture| InitImage::of_size((picture.width, picture.height)))
                .collect()
        };
        let read = Image {
            references: sizes(&image.references),
            seen: sizes(&image.seen),
            ..Image::of(0, 0)
        };
        let gives = self.encodings(request, prompts);
        Ok(StagePlan {
            shape: format!("t{tokens} p{pictured}{}", components.as_multiplied(TEXT_ENCODER)),
            takes: self.pictures(image)?,
            gives: gives.into_iter().map(|value| value.name).collect(),
            memo: Some(Memo::of(request.of_prompt(Medium::Image(read)))),
            passes: Passes::of(components.flops_of_products(TEXT_ENCODER, |_| tokens)),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [TEXT_ENCODER],
                vec![Rung::whole(scratch)],
            )
        })
    }

    fn denoise_stage(&self, request: &Request, image: &Image, prompts: &Prompts<Prompt>) -> StagePlan {
        let &Image { width, height, .. } = image;
        let mut tokens = self.tokens(prompts, image);
        tokens.text = tokens.text.next_multiple_of(TOKENS_AT_A_TIME);
        let steps = steps_run(request);
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: TRANSFORMER,
            width: self.transformer.width(),
            is_modulator,
        };
        let passes = (steps, passes_in_step(request));
        let buffers = denoise_scratch(&self.transformer, tokens, passes, self.parts.dtype());
        let cached = (tokens.generated, self.transformer.width());
        let buffers =
            buffers + StepCache::bytes(request, passes_in_step(request), cached, self.parts.dtype());
        let scratch = denoiser.scratch(buffers, tokens.all(), steps, request);
        let mut beside = match tokens.references {
            0 => String::new(),
            tokens => format!(" r{tokens}"),
        };
        beside.push_str(&shape_of_sampling(request));
        let latent = is_from_latent(request).then(|| self.autoencoder().latent(image));
        StagePlan {
            shape: format!(
                "{width}x{height} t{}{beside}{}",
                tokens.text,
                self.parts.components.as_multiplied(TRANSFORMER),
            ),
            steps,
            takes: self
                .encodings(request, prompts)
                .into_iter()
                .chain(latent)
                .chain(self.reference_values(image))
                .collect(),
            gives: names(&[LATENT]),
            passes: Passes {
                in_step: passes_in_step(request),
                flops: flops_of_pass(
                    &self.transformer.blocks(),
                    &self.parts.components,
                    TRANSFORMER,
                    (tokens.text, tokens.generated + tokens.references),
                ),
            },
            // After every step the unmasked part is restored from the start picture.
            reads_media: image.mask.is_some(),
            preview: request.preview.then(|| self.autoencoder().preview_need(image)),
            ..denoiser.stage_with_copies(
                DENOISE,
                request,
                scratch,
                rows_of((tokens.text, tokens.generated + tokens.references)),
            )
        }
    }
}

impl Model for QwenImageModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.adapted(files)?))
    }

    fn reads(&self) -> Reads {
        self.variant.reads()
    }

    fn most_references(&self) -> usize {
        self.variant.most_references()
    }

    fn reference_fit(&self, width: u32, height: u32) -> Result<ReferenceFit, RequestError> {
        self.fit(width, height)
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let mut problems = self.variant.problems(request);
        problems.extend(self.adapters.problems(&request.adapters));
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let image = request.image().map_err(refused)?;
        let prompts = self.prompts(request, image).map_err(refused)?;
        // The stages of one component follow each other.
        let mut stages = self.picture_stages(image).map_err(refused)?;
        stages.push(
            self.encode_text_stage(request, image, &prompts)
                .map_err(refused)?,
        );
        stages.extend(self.reference_stages(image));
        if image.init_image.is_some() && !request.from_values {
            stages.push(self.autoencoder().encode_stage(image));
        }
        stages.extend([
            self.denoise_stage(request, image, &prompts),
            self.autoencoder().decode_stage(image),
        ]);
        Ok(stages)
    }

    fn with_required_pictures(&self, mut request: Request) -> Request {
        if let Medium::Image(image) = &mut request.medium
            && self.variant.edits()
            && image.references.is_empty()
        {
            let size = (1024, 1024);
            image.references.push(InitImage::of_size(size));
            let seen = self.fit(size.0, size.1).ok().and_then(|fit| fit.seen);
            image.seen.extend(seen.map(InitImage::of_size));
        }
        request
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        self.autoencoder().request_of(values, self.defaults())
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        let (template, most) = (self.variant.template(), self.variant.most_tokens(request));
        let of_text = |text: &str| template.left_out(&self.tokenizer, text, most).ok();
        Prompts::texts(request).left_out(request, of_text)
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        smaller_sides(request, PIXELS_PER_TOKEN)
    }

    fn smallest(&self) -> Request {
        let mut request = bounds::smallest(self.defaults());
        if let Medium::Image(image) = &mut request.medium
            && self.variant.edits()
        {
            image.references = vec![black(2 * PIXELS_PER_TOKEN)];
            if self.variant == Variant::EditPlus {
                image.seen.clone_from(&image.references);
            }
        }
        request
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        self.planned_of(stage, request)
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage::new(self, stage, observer).run()
    }
}

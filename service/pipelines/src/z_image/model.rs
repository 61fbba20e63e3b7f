//! An open Z-Image checkpoint: its answers to a planner, and the stages of a request.

use gpu::CheckpointFile;
use model::Memo;
use model::bounds::{self, PIXELS_PER_TOKEN};
use model::plan::names;
use model::{LeftOut, Passes, Reads, smaller_sides};
use std::path::Path;
use std::sync::Arc;

use super::checkpoint::{FOLDERS, MARKS, PIPELINES};
use super::config::{MULTIPLE, TransformerConfig};
use super::layout::{NAMES, layout};
use super::positions::Lengths;
use super::stages::{DENOISE, ENCODE_TEXT, captions};
use super::transformer::{denoise_scratch, is_modulator, negative_scratch, refining_scratch};
use super::variant::Variant;
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent};
use crate::autoencoders::kl::VaeConfig;
use crate::autoencoders::kl::plan::{Autoencoder, LATENT};
use crate::defaults::GuidanceRule;
use crate::flow_match::SchedulerConfig;
use crate::sampling::{Denoiser, Prompts, flops_of_attention, passes_in_step};
use crate::stage::Stage;
use crate::start::{is_from_latent, steps_run};
use crate::text::qwen3::Qwen3Config;
use crate::text::tokenizers::{QwenTokenizer, Thinking, TokenizeError};
use crate::{
    Family, Image, Medium, Model, ModelError, ModelParts, Observer, Precision, Request, RequestError, Role,
    Rung, StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Names of the components.
pub(super) const TRANSFORMER: &str = "transformer";
pub(super) const VAE: &str = "vae";
pub(super) const TEXT_ENCODER: &str = "text_encoder";

/// Name of the family.
pub(super) const FAMILY: &str = "z-image";

/// The Z-Image family.
#[derive(Clone, Copy, Debug, Default)]
pub struct ZImage;

impl Family for ZImage {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("Z-Image")
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self, _class: &str) -> &'static [&'static str] {
        &FOLDERS
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
        Ok(ZImageModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// A checkpoint of Z-Image or of Z-Image-Turbo.
#[derive(Clone, Debug)]
pub struct ZImageModel {
    pub(super) transformer: TransformerConfig,
    pub(super) vae: VaeConfig,
    pub(super) text: Qwen3Config,
    /// Layers of the text encoder that are run.
    pub(super) depth: usize,
    pub(super) scheduler: SchedulerConfig,
    pub(super) guidance: GuidanceRule,
    pub(super) variant: Variant,
    pub(super) tokenizer: Arc<QwenTokenizer>,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
}

impl ZImageModel {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<ZImageModel, ModelError> {
        let targets = [TargetComponent::denoiser(
            TRANSFORMER,
            &layout(&self.transformer),
            NAMES,
            "",
        )];
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open(files, "Z-Image", &targets, &mut adapted.parts)?;
        Ok(adapted)
    }

    /// The autoencoder, for planning.
    pub(super) fn autoencoder(&self) -> Autoencoder<'_> {
        Autoencoder {
            config: &self.vae,
            components: &self.parts.components,
            dtype: self.parts.dtype(),
        }
    }

    /// The token ids of one of a request's texts.
    pub(super) fn tokens(&self, request: &Request, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let most = request.max_sequence_length as usize;
        let ids = self.tokenizer.encode_turn(text, Thinking::Allowed, most)?;
        self.tokenizer
            .check_known(&ids, TEXT_ENCODER, self.text.vocab_size)?;
        Ok(ids)
    }

    /// The number of tokens of each of a request's texts, on which the shape of attention depends.
    pub(super) fn text_tokens(&self, request: &Request) -> Result<Prompts<usize>, RequestError> {
        Prompts::texts(request).try_map(|(field, text)| {
            let ids = self.tokens(request, text);
            ids.map(|ids| ids.len())
                .map_err(|error| RequestError::new(field, error.to_string()))
        })
    }

    /// Token counts of the picture and of its text.
    pub(super) fn lengths(&self, image: &Image, text: usize) -> Lengths {
        Lengths {
            rows: (image.height / PIXELS_PER_TOKEN) as usize,
            columns: (image.width / PIXELS_PER_TOKEN) as usize,
            text,
        }
    }

    fn encode_text_stage(&self, request: &Request, tokens: &Prompts<usize>) -> StagePlan {
        let longest = tokens.iter().copied().max().unwrap_or_default();
        // Prompts of similar length share their learned peaks.
        let tokens = longest.next_multiple_of(MULTIPLE);
        let is_quantized = self.parts.components.is_quantized(TEXT_ENCODER);
        let scratch = self.text.scratch(tokens, is_quantized, self.parts.dtype())
            + self.parts.components.dequantizing(TEXT_ENCODER, tokens, |_| true);
        StagePlan {
            shape: format!("t{tokens}{}", self.parts.components.as_multiplied(TEXT_ENCODER)),
            gives: captions(request).iter().map(|&name| name.to_owned()).collect(),
            memo: Some(Memo::of(Request {
                // A longer limit gives the same tokens.
                max_sequence_length: longest as u32,
                ..request.of_prompt(Medium::Image(Image::of(0, 0)))
            })),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [TEXT_ENCODER],
                vec![Rung::whole(scratch)],
            )
        }
    }

    /// How a step goes over the blocks: those of the picture alone, then those of picture and text.
    fn passes(&self, request: &Request, lengths: &Lengths) -> Passes {
        let (picture, all) = (lengths.picture(), lengths.all());
        let [of_picture, _, of_both] = self.transformer.blocks();
        let rows_of = |weight: &str| match weight.starts_with(of_picture.name) {
            true => picture,
            false => all,
        };
        let width = self.transformer.dim;
        Passes {
            in_step: passes_in_step(request),
            flops: self.parts.components.flops_of_products(TRANSFORMER, rows_of)
                + flops_of_attention(of_picture.count, picture, width)
                + flops_of_attention(of_both.count, all, width),
        }
    }

    fn denoise_stage(&self, request: &Request, image: &Image, tokens: &Prompts<usize>) -> StagePlan {
        let &Image { width, height, .. } = image;
        let named = captions(request);
        let captions = named.iter().zip(tokens.iter());
        let captions = captions
            .map(|(name, tokens)| ValueShape::new(name, vec![*tokens, self.transformer.cap_feat_dim]));
        let padded = |tokens: &usize| tokens.next_multiple_of(MULTIPLE);
        let longest = tokens.iter().map(padded).max().unwrap_or_default();
        let lengths = self.lengths(image, longest);
        let steps = steps_run(request);
        let dtype = self.parts.dtype();
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: TRANSFORMER,
            width: self.transformer.dim,
            is_modulator,
        };
        let mut buffers = denoise_scratch(&self.transformer, &lengths, steps, dtype);
        let mut texts = format!("t{}", padded(&tokens.prompt));
        if let Some(negative) = tokens.negative.as_ref().map(padded) {
            texts.push_str(&format!(" n{negative}"));
            let lengths = self.lengths(image, negative);
            let prediction = lengths.picture() * self.transformer.patch_width();
            buffers += negative_scratch(&self.transformer, &lengths, dtype)
                + self.guidance.length().bytes(prediction, dtype);
        }
        if request.has_curves() {
            buffers += refining_scratch(&self.transformer, &lengths, dtype);
        }
        let scratch = denoiser.scratch(buffers, lengths.all(), steps, request);
        let latent = is_from_latent(request).then(|| self.autoencoder().latent(image));
        StagePlan {
            shape: format!(
                "{width}x{height} {texts}{}{}",
                self.parts.components.as_multiplied(TRANSFORMER),
                if request.has_curves() { " curve" } else { "" },
            ),
            steps,
            takes: captions.chain(latent).collect(),
            gives: names(&[LATENT]),
            passes: self.passes(request, &lengths),
            // After every step the unmasked part is restored from the start picture.
            reads_media: image.mask.is_some(),
            preview: request.preview.then(|| self.autoencoder().preview_need(image)),
            ..denoiser.stage(DENOISE, request, scratch)
        }
    }
}

impl Model for ZImageModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.adapted(files)?))
    }

    fn reads(&self) -> Reads {
        self.variant.reads()
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let mut problems = self.variant.problems(request);
        problems.extend(self.adapters.problems(&request.adapters));
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let image = request.image().map_err(refused)?;
        let tokens = self.text_tokens(request).map_err(refused)?;
        let mut stages = vec![self.encode_text_stage(request, &tokens)];
        if image.init_image.is_some() && !request.from_values {
            stages.push(self.autoencoder().encode_stage(image));
        }
        stages.extend([
            self.denoise_stage(request, image, &tokens),
            self.autoencoder().decode_stage(image),
        ]);
        Ok(stages)
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        self.autoencoder().request_of(values, self.defaults())
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        let most = request.max_sequence_length as usize;
        let of_turn = |text: &str| {
            self.tokenizer
                .left_out_of_turn(text, Thinking::Allowed, most)
                .ok()
        };
        Prompts::texts(request).left_out(request, of_turn)
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        smaller_sides(request, PIXELS_PER_TOKEN)
    }

    fn smallest(&self) -> Request {
        bounds::smallest(self.defaults())
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        self.planned_of(stage, request)
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage::new(self, stage, observer).run()
    }
}

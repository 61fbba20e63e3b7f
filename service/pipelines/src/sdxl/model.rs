//! An open SDXL checkpoint: its answers to a planner, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::CheckpointFile;
use model::bounds::{self, PIXELS_PER_TOKEN};
use model::plan::names;
use model::{Field, LeftOut, Memo, Passes, Reads, first_whole_step, smaller_sides};

use super::checkpoint::{FOLDERS, MARKS, PIPELINES};
use super::config::UnetConfig;
use super::layout::{NAMES, layout};
use super::stages::{DENOISE, ENCODE_MASKED, ENCODE_TEXT, MASKED, encodings, ways};
use super::walk::Sizes;
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent, UsedAs};
use crate::autoencoders::kl::VaeConfig;
use crate::autoencoders::kl::plan::{Autoencoder, LATENT};
use crate::checkpoint::whole;
use crate::samplers::NoiseConfig;
use crate::sampling::{Denoiser, Prompts};
use crate::stage::Stage;
use crate::start::is_from_latent;
use crate::text::clip::ClipConfig;
use crate::text::tokenizers::{ClipTokenizer, TokenizeError};
use crate::{
    Family, Image, Medium, Model, ModelError, ModelParts, Observer, Precision, Request, RequestError, Role,
    Rung, StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Names of the components.
pub(super) const UNET: &str = "unet";
pub(super) const VAE: &str = "vae";
pub(super) const TEXT_ENCODER: &str = "text_encoder";
pub(super) const TEXT_ENCODER_2: &str = "text_encoder_2";

/// Name of the family.
pub(super) const FAMILY: &str = "sdxl";

/// Its common name.
pub(super) const FAMILY_TITLE: &str = "Stable Diffusion XL";

/// The optional fields of a request that the model reads.
pub(super) const READS: Reads = Reads::of(&[
    Field::InitImage,
    Field::InitLatent,
    Field::Mask,
    Field::Adapters,
    Field::NegativePrompt,
    Field::TrueGuidance,
    Field::Sampler,
]);

/// Prefixes of the layers of the first text encoder in files of adapters: diffusers, kohya, peft.
const CLIP_L: [&str; 4] = [
    "text_encoder.",
    "lora_te1_",
    "text_encoders.clip_l.transformer.",
    "base_model.model.text_encoder.",
];

/// Prefixes of those of the second.
const BIG_G: [&str; 4] = [
    "text_encoder_2.",
    "lora_te2_",
    "text_encoders.clip_g.transformer.",
    "base_model.model.text_encoder_2.",
];

/// The family of Stable Diffusion XL.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sdxl;

impl Family for Sdxl {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some(FAMILY_TITLE)
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
        Ok(SdxlModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// All fields of a request that are out of bounds.
pub(super) fn problems(request: &Request) -> Vec<RequestError> {
    let mut problems = bounds::problems(request);
    let is_named =
        |problems: &[RequestError], field: &str| problems.iter().any(|problem| problem.field == field);
    if request.guidance != 0.0 && !is_named(&problems, "guidance") {
        let problem = format!(
            "is {}; SDXL has no distilled guidance, its guidance is true_guidance: set that, and this to 0",
            request.guidance
        );
        problems.push(RequestError::new("guidance", problem));
    }
    let leaves_none = request.steps > 0 && first_whole_step(request.steps, request.strength) >= request.steps;
    if is_from_latent(request) && leaves_none && !is_named(&problems, "strength") {
        let problem = format!(
            "is {}; of {} steps that leaves none",
            request.strength, request.steps
        );
        problems.push(RequestError::new("strength", problem));
    }
    problems
}

/// A Stable Diffusion XL checkpoint.
#[derive(Clone, Debug)]
pub struct SdxlModel {
    pub(super) unet: UnetConfig,
    pub(super) vae: VaeConfig,
    /// CLIP-L and bigG.
    pub(super) encoders: [ClipConfig; 2],
    /// Theirs, which differ in their padding.
    pub(super) tokenizers: [Arc<ClipTokenizer>; 2],
    pub(super) noise: NoiseConfig,
    /// Whether an absent negative prompt is zeros.
    pub(super) zeros_for_empty: bool,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
}

impl SdxlModel {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<SdxlModel, ModelError> {
        let components = &self.parts.components;
        let specs = |encoder: usize, component: &str| {
            whole(self.encoders[encoder].tensor_shapes(&|name| components.has_tensor(component, name)))
        };
        let targets = [
            TargetComponent::convolutional(UNET, &layout(&self.unet), NAMES),
            TargetComponent::text_encoder(TEXT_ENCODER, &CLIP_L, &specs(0, TEXT_ENCODER), "text_model."),
            TargetComponent::text_encoder(TEXT_ENCODER_2, &BIG_G, &specs(1, TEXT_ENCODER_2), "text_model."),
        ];
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open(files, FAMILY_TITLE, &targets, &mut adapted.parts)?;
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

    /// Whether steps predict under zeros in place of a negative prompt.
    pub(super) fn negative_is_zero(&self, request: &Request) -> bool {
        self.zeros_for_empty && request.negative().is_some_and(str::is_empty)
    }

    /// The texts of a request that are encoded, each with the name of its field.
    pub(super) fn texts<'r>(&self, request: &'r Request) -> Prompts<(&'static str, &'r str)> {
        let texts = Prompts::texts(request);
        Prompts {
            negative: texts.negative.filter(|_| !self.negative_is_zero(request)),
            ..texts
        }
    }

    /// The chunks of tokens of a text, for either encoder; at least `least`.
    pub(super) fn chunks(
        &self,
        request: &Request,
        text: &str,
        least: usize,
    ) -> Result<[Vec<Vec<u32>>; 2], TokenizeError> {
        let most = request.max_sequence_length as usize;
        let [first, second] = [0, 1].map(|encoder| {
            let chunks = self.tokenizers[encoder].chunks(text, most, least)?;
            for chunk in &chunks {
                self.tokenizers[encoder].check_known(
                    chunk,
                    [TEXT_ENCODER, TEXT_ENCODER_2][encoder],
                    self.encoders[encoder].vocab_size,
                )?;
            }
            Ok(chunks)
        });
        let (first, second) = (first?, second?);
        // Both have the same words; a folder whose vocabularies differ would have them in other chunks.
        let count = first.len().max(second.len());
        match first.len() == second.len() {
            true => Ok([first, second]),
            false => self.chunks(request, text, count),
        }
    }

    /// Chunks of all texts of a request: those of the longest.
    pub(super) fn chunk_count(&self, request: &Request) -> Result<usize, RequestError> {
        let mut most = 1;
        for (field, text) in self.texts(request).iter() {
            let chunks = self.chunks(request, text, 1);
            let [chunks, _] = chunks.map_err(|error| RequestError::new(*field, error.to_string()))?;
            most = most.max(chunks.len());
        }
        Ok(most)
    }

    /// Tokens in a chunk.
    pub(super) fn chunk_length(&self) -> usize {
        self.tokenizers[0].length()
    }

    /// Names and shapes of the text encodings of a request.
    fn encodings(&self, request: &Request, chunks: usize) -> Vec<ValueShape> {
        let tokens = chunks * self.chunk_length();
        let texts = self.texts(request);
        let named = encodings(request);
        let names = std::iter::once(named.prompt).chain(named.negative.filter(|_| texts.negative.is_some()));
        names
            .flat_map(|(states, pooled)| {
                [
                    ValueShape::new(states, vec![1, tokens, self.unet.cross_attention_dim]),
                    ValueShape::new(pooled, vec![1, self.unet.pooled_width()]),
                ]
            })
            .collect()
    }

    fn encode_text_stage(&self, request: &Request, chunks: usize) -> StagePlan {
        let (dtype, tokens) = (self.parts.dtype(), self.chunk_length());
        let components = &self.parts.components;
        let bases = [TEXT_ENCODER, TEXT_ENCODER_2];
        let of_encoder = |(encoder, name): (&ClipConfig, &&str)| {
            let layers = components.dequantizing(name, tokens, |_| true);
            encoder.scratch(tokens, dtype) + layers.max(self.adapters.scratch(name, tokens, dtype))
        };
        let states = chunks * tokens * self.unet.cross_attention_dim * dtype.size_in_bytes();
        let encoders = self.encoders.iter().zip(&bases).map(of_encoder);
        let scratch = encoders.max().unwrap_or_default() + residency::Bytes(states as u64);
        let uses = &request.adapters;
        let read = Request {
            adapters: self.adapters.text_uses(&bases, uses),
            ..request.of_prompt(Medium::Image(Image::of(0, 0)))
        };
        // A negative prompt that is not encoded is not read.
        let read = match self.negative_is_zero(request) {
            true => Request {
                negative_prompt: None,
                true_guidance: 1.0,
                ..read
            },
            false => read,
        };
        StagePlan {
            shape: format!("c{chunks}"),
            gives: self
                .encodings(request, chunks)
                .into_iter()
                .map(|value| value.name)
                .collect(),
            memo: Some(Memo::of(read)),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                self.adapters.beside(&bases, uses, UsedAs::Text),
                vec![Rung::whole(scratch)],
            )
        }
    }

    /// The sizes of a prediction of a request, of this many items.
    pub(super) fn sizes(&self, image: &Image, chunks: usize, items: usize) -> Sizes {
        let (height, width) = self.vae.latent_sides(image.width, image.height);
        Sizes {
            items,
            sides: [height, width],
            text: chunks * self.chunk_length(),
        }
    }

    /// The first step that is run.
    pub(super) fn first_step(&self, request: &Request) -> u32 {
        match is_from_latent(request) {
            true => first_whole_step(request.steps, request.strength),
            false => 0,
        }
    }

    /// Whether the latent of the start picture is read: an inpainting UNet that runs the whole schedule sees the picture alone.
    pub(super) fn reads_start(&self, request: &Request) -> bool {
        let is_whole = request.strength >= 1.0 && !request.from_values;
        is_from_latent(request) && !(self.unet.takes_mask() && is_whole)
    }

    fn denoise_stage(&self, request: &Request, image: &Image, chunks: usize) -> StagePlan {
        let dtype = self.parts.dtype();
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: UNET,
            width: self.unet.block_out_channels.last().copied().unwrap_or_default(),
            is_modulator: |_| false,
        };
        let ways = ways(request);
        let items = ways.first().map_or(1, |way| way.items());
        let texts = self.unet.text_bytes(items * chunks * self.chunk_length(), dtype);
        let ranks = self.adapters.convolution_ranks(UNET, &request.adapters);
        let rungs = ways.iter().flat_map(|way| {
            let sizes = self.sizes(image, chunks, way.items());
            let [height, width] = sizes.sides;
            let buffers = self.unet.scratch_with(sizes, dtype, &ranks) + texts;
            let scratch = denoiser.scratch(buffers, sizes.items * height * width, 1, request);
            let rungs = self.adapters.rungs(UNET, &request.adapters, scratch, dtype);
            rungs.into_iter().map(|rung| way.labelled(rung))
        });
        let others: Vec<Rung> = rungs.collect();
        let with_filters = others.first().map(|first| self.with_filters(first));
        let rungs: Vec<Rung> = with_filters.into_iter().chain(others).collect();
        let beside = self.adapters.beside(&[UNET], &request.adapters, UsedAs::Steps);
        let latent = self
            .reads_start(request)
            .then(|| self.autoencoder().latent(image));
        let masked = self.unet.takes_mask().then(|| {
            let shape = self.autoencoder().latent(image).shape;
            ValueShape::new(MASKED, shape)
        });
        let guided = if items > 1 { " n" } else { "" };
        StagePlan {
            shape: format!(
                "{}x{} c{chunks}{guided}{}",
                image.width,
                image.height,
                self.parts.components.as_multiplied(UNET)
            ),
            steps: request.steps.saturating_sub(self.first_step(request)),
            takes: self
                .encodings(request, chunks)
                .into_iter()
                .chain(latent)
                .chain(masked)
                .collect(),
            gives: names(&[LATENT]),
            passes: Passes::of(self.unet.flops(
                &self.parts.components,
                UNET,
                self.sizes(image, chunks, items),
            )),
            per_item: true,
            // After every step the unmasked part is restored from the start picture.
            reads_media: image.mask.is_some(),
            preview: request.preview.then(|| self.autoencoder().preview_need(image)),
            ..StagePlan::of(DENOISE, Role::Sample, beside, rungs)
        }
    }

    /// The same rung, with the filters of all convolutions, which are else made in every step.
    fn with_filters(&self, rung: &Rung) -> Rung {
        let components = &self.parts.components;
        let (mut layers, mut bytes) = (Vec::new(), 0);
        for source in components.sources(UNET) {
            if let (Some(layer), &[outputs, inputs, rows, columns]) =
                (source.name.strip_suffix(".weight"), &source.shape[..])
                && rows * columns > 1
            {
                let numbers = outputs * inputs * rows * columns;
                bytes += ops::allocated(numbers * components.dtype().size_in_bytes());
                layers.push(layer.to_owned());
            }
        }
        rung.with_copies(layers, residency::Bytes(bytes))
    }
}

impl Model for SdxlModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.adapted(files)?))
    }

    fn reads(&self) -> Reads {
        READS
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let mut problems = problems(request);
        problems.extend(self.adapters.problems(&request.adapters));
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let image = request.image().map_err(refused)?;
        let chunks = self.chunk_count(request).map_err(refused)?;
        let autoencoder = self.autoencoder();
        let mut stages = vec![self.encode_text_stage(request, chunks)];
        if image.init_image.is_some() && self.reads_start(request) && !request.from_values {
            stages.push(autoencoder.encode_stage(image));
        }
        if self.unet.takes_mask() {
            stages.push(autoencoder.encode_stage_named(ENCODE_MASKED, MASKED, image));
        }
        stages.extend([
            self.denoise_stage(request, image, chunks),
            autoencoder.decode_stage(image),
        ]);
        Ok(stages)
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        self.autoencoder().request_of(values, self.defaults())
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        let most = request.max_sequence_length as usize;
        self.texts(request)
            .left_out(request, |text| self.tokenizers[0].left_out(text, most).ok())
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

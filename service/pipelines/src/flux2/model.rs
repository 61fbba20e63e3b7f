//! An open FLUX.2 checkpoint: its answers to a planner, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::CheckpointFile;
use model::Memo;
use model::bounds::{self, PIXELS_PER_TOKEN};
use model::plan::names;
use model::{Field, LeftOut, Passes, Reads, ReferenceFit, smaller_sides};

use super::checkpoint::{FOLDERS, MARKS, PIPELINES};
use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use super::references::{MOST, fit, places};
use super::stages::{DENOISE, ENCODE_TEXT, captions};
use super::transformer::denoise_scratch;
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent};
use crate::autoencoders::kl::VaeConfig;
use crate::autoencoders::kl::plan::{Autoencoder, LATENT};
use crate::flow_match::SchedulerConfig;
use crate::mmdit::{StepCache, flops_of_pass, is_modulator, rows_of};
use crate::place::Place;
use crate::sampling::{Denoiser, Prompts, passes_in_step, shape_of_sampling};
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
pub(super) const FAMILY: &str = "flux2";

/// The FLUX.2 family.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flux2;

impl Family for Flux2 {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("FLUX.2 klein")
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
        Ok(Flux2Model::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// The inputs from which a checkpoint generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Few steps, without guidance.
    Distilled,
    /// Many steps under true guidance.
    Base,
}

impl Variant {
    /// The optional fields of a request that the model reads.
    pub(super) fn reads(self) -> Reads {
        const DISTILLED: Reads = Reads::of(&[
            Field::InitImage,
            Field::InitLatent,
            Field::Mask,
            Field::References,
            Field::Adapters,
            Field::StepCache,
            Field::Fp8Attention,
        ]);
        match self {
            Variant::Distilled => DISTILLED,
            Variant::Base => DISTILLED.and(&[Field::NegativePrompt, Field::TrueGuidance]),
        }
    }

    /// All fields of a request that are out of bounds.
    pub(super) fn problems(self, request: &Request) -> Vec<RequestError> {
        let mut problems = bounds::problems(request);
        if request.guidance != 0.0 && !problems.iter().any(|problem| problem.field == "guidance") {
            let instead = match self {
                Variant::Distilled => "this FLUX.2 klein is distilled and takes no guidance: set it to 0",
                Variant::Base => {
                    "this FLUX.2 klein has no distilled guidance, its guidance is true_guidance: set that, and this to 0"
                }
            };
            let problem = format!("is {}; {instead}", request.guidance);
            problems.push(RequestError::new("guidance", problem));
        }
        problems
    }
}

/// A FLUX.2 klein checkpoint.
#[derive(Clone, Debug)]
pub struct Flux2Model {
    pub(super) transformer: TransformerConfig,
    pub(super) vae: VaeConfig,
    pub(super) text: Qwen3Config,
    /// The numbers of layers after which the states of the text encoder are taken, ascending.
    pub(super) taken: [usize; 3],
    pub(super) scheduler: SchedulerConfig,
    pub(super) tokenizer: Arc<QwenTokenizer>,
    /// The id of padding, which follows a text.
    pub(super) pad: u32,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
    pub(super) variant: Variant,
}

impl Flux2Model {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<Flux2Model, ModelError> {
        let specs = layout(&self.transformer);
        let targets = [TargetComponent::denoiser(TRANSFORMER, &specs, NAMES, "")];
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open(files, "FLUX.2", &targets, &mut adapted.parts)?;
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

    /// Layers of the text encoder that are run.
    pub(super) fn depth(&self) -> usize {
        let [.., last] = self.taken;
        last
    }

    /// The token ids of one of a request's texts, without padding.
    pub(super) fn tokens(&self, request: &Request, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let most = request.max_sequence_length as usize;
        let ids = self.tokenizer.encode_turn(text, Thinking::Skipped, most)?;
        self.tokenizer
            .check_known(&ids, TEXT_ENCODER, self.text.vocab_size)?;
        Ok(ids)
    }

    /// Names and shapes of the text encodings of a request.
    fn encodings(&self, request: &Request) -> Vec<ValueShape> {
        let tokens = request.max_sequence_length as usize;
        let shape = vec![1, tokens, self.transformer.joint_attention_dim];
        let captions = captions(request);
        captions
            .iter()
            .map(|&name| ValueShape::new(name, shape.clone()))
            .collect()
    }

    fn encode_text_stage(&self, request: &Request) -> Result<StagePlan, RequestError> {
        let tokens = request.max_sequence_length as usize;
        for (field, text) in Prompts::texts(request).iter() {
            let ids = self.tokens(request, text);
            ids.map_err(|error| RequestError::new(*field, error.to_string()))?;
        }
        let components = &self.parts.components;
        let states = self.taken.len();
        let scratch = self.text.scratch_of_states(tokens, states, self.parts.dtype())
            + components.dequantizing(TEXT_ENCODER, tokens, |_| true);
        Ok(StagePlan {
            shape: format!("t{tokens}{}", components.as_multiplied(TEXT_ENCODER)),
            gives: self
                .encodings(request)
                .into_iter()
                .map(|value| value.name)
                .collect(),
            memo: Some(Memo::of(request.of_prompt(Medium::Image(Image::of(0, 0))))),
            passes: Passes::of(components.flops_of_products(TEXT_ENCODER, |_| tokens)),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                [TEXT_ENCODER],
                vec![Rung::whole(scratch)],
            )
        })
    }

    fn denoise_stage(&self, request: &Request, image: &Image) -> StagePlan {
        let &Image { width, height, .. } = image;
        let text = request.max_sequence_length as usize;
        let generated = Place::of_picture(width, height).tokens();
        let references: usize = places(request, image).iter().map(|place| place.tokens()).sum();
        let steps = steps_run(request);
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: TRANSFORMER,
            width: self.transformer.width(),
            is_modulator,
        };
        let buffers = denoise_scratch(
            &self.transformer,
            text,
            (generated, references),
            (steps, passes_in_step(request)),
            self.parts.dtype(),
        );
        let cached = (generated, self.transformer.width());
        let buffers =
            buffers + StepCache::bytes(request, passes_in_step(request), cached, self.parts.dtype());
        let scratch = denoiser.scratch(buffers, text + generated + references, steps, request);
        let mut beside = match references {
            0 => String::new(),
            tokens => format!(" r{tokens}"),
        };
        beside.push_str(&shape_of_sampling(request));
        let latent = is_from_latent(request).then(|| self.autoencoder().latent(image));
        StagePlan {
            shape: format!(
                "{width}x{height} t{text}{beside}{}",
                self.parts.components.as_multiplied(TRANSFORMER),
            ),
            steps,
            takes: self
                .encodings(request)
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
                    (text, generated + references),
                ),
            },
            // After every step the unmasked part is restored from the start picture.
            reads_media: image.mask.is_some(),
            preview: request.preview.then(|| self.autoencoder().preview_need(image)),
            ..denoiser.stage_with_copies(DENOISE, request, scratch, rows_of((text, generated + references)))
        }
    }
}

impl Model for Flux2Model {
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
        MOST
    }

    fn reference_fit(&self, width: u32, height: u32) -> Result<ReferenceFit, RequestError> {
        fit(width, height)
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let mut problems = self.variant.problems(request);
        problems.extend(self.adapters.problems(&request.adapters));
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let image = request.image().map_err(refused)?;
        let mut stages = vec![self.encode_text_stage(request).map_err(refused)?];
        if image.init_image.is_some() && !request.from_values {
            stages.push(self.autoencoder().encode_stage(image));
        }
        stages.extend(self.reference_stages(image));
        stages.extend([
            self.denoise_stage(request, image),
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
                .left_out_of_turn(text, Thinking::Skipped, most)
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

//! An open ACE-Step checkpoint: its answers to a planner.

use gpu::CheckpointFile;
use model::plan::only_value;
use model::{LeftOut, Reads, smaller_lengths};
use std::path::Path;
use std::sync::Arc;

use super::checkpoint::{self, FOLDERS, PIPELINES};
use super::config::{ConditionConfig, TokenConfig, TransformerConfig};
use super::layout::{DECODER, NAMES};
use super::plan::{DENOISE, LATENT};
use super::tasks::{self, Abilities};
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent};
use crate::autoencoders::oobleck::OobleckConfig;
use crate::stage::Stage;
use crate::text::qwen3::Qwen3Config;
use crate::text::tokenizers::QwenTokenizer;
use crate::{
    Audio, Family, Kept, Medium, Model, ModelError, ModelParts, Observer, OwnLayout, Precision, Request,
    RequestError, SampleFormat, StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Names of the components.
pub(super) const TRANSFORMER: &str = "transformer";
pub(super) const CONDITION_ENCODER: &str = "condition_encoder";
pub(super) const TEXT_ENCODER: &str = "text_encoder";
pub(super) const VAE: &str = "vae";
pub(super) const TOKENIZER: &str = "audio_tokenizer";
pub(super) const DETOKENIZER: &str = "audio_token_detokenizer";

/// Display name of the family.
pub(super) const NAME: &str = "ACE-Step";

/// Name of the family.
pub(super) const FAMILY: &str = "ace-step";

/// The ACE-Step family.
#[derive(Clone, Copy, Debug, Default)]
pub struct AceStep;

impl Family for AceStep {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("ACE-Step 1.5")
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self, _class: &str) -> &'static [&'static str] {
        &FOLDERS
    }

    fn optional_folders(&self, _class: &str) -> &'static [&'static str] {
        &[TOKENIZER, DETOKENIZER]
    }

    fn own_layout(&self, files: &[&str]) -> Option<OwnLayout> {
        checkpoint::own_layout(files)
    }

    fn has_own_layout(&self, folder: &Path) -> bool {
        checkpoint::has_own_layout(folder)
    }

    fn is_transformer_file(&self, names: &[&str]) -> bool {
        checkpoint::prefix_of(names).is_some()
    }

    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        Ok(AceStepModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// The tokenizer of latents and its inverse.
#[derive(Clone, Debug)]
pub(super) struct TokenConfigs {
    pub(super) tokenizer: TokenConfig,
    pub(super) detokenizer: TokenConfig,
}

/// An ACE-Step checkpoint.
#[derive(Clone, Debug)]
pub struct AceStepModel {
    pub(super) transformer: TransformerConfig,
    pub(super) condition: ConditionConfig,
    pub(super) text: Qwen3Config,
    pub(super) vae: OobleckConfig,
    /// `None` for a checkpoint without a tokenizer of latents, which makes no covers.
    pub(super) tokens: Option<TokenConfigs>,
    pub(super) tokenizer: Arc<QwenTokenizer>,
    /// Shift of the times of steps.
    pub(super) shift: f32,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
}

impl AceStepModel {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<AceStepModel, ModelError> {
        let targets = [TargetComponent::denoiser(
            TRANSFORMER,
            &self.transformer.adapted(),
            NAMES,
            DECODER,
        )];
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open(files, NAME, &targets, &mut adapted.parts)?;
        Ok(adapted)
    }

    /// The tasks and abilities of the model.
    pub(super) fn able(&self) -> Abilities {
        Abilities {
            is_turbo: self.transformer.is_turbo(),
            has_tokens: self.tokens.is_some(),
            rate: self.vae.sampling_rate,
        }
    }

    /// Latent frames per second.
    pub(super) fn frames_per_second(&self) -> f64 {
        f64::from(self.vae.sampling_rate) / self.vae.hop() as f64
    }
}

impl Model for AceStepModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.adapted(files)?))
    }

    fn reads(&self) -> Reads {
        tasks::READS
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let mut problems = tasks::problems(request, self.able());
        problems.extend(self.adapters.problems(&request.adapters));
        match (&request.medium, problems.is_empty()) {
            (Medium::Audio(audio), true) => self.stages(request, audio),
            _ => Err(problems),
        }
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        let &[1, frames, channels] = only_value(values, LATENT)? else {
            return None;
        };
        let seconds = frames as f64 / self.frames_per_second();
        let audio = Audio {
            seconds: seconds as f32,
            ..Audio::default()
        };
        (channels == self.vae.decoder_input_channels && self.frames_of_seconds(&audio) == frames).then(|| {
            Request {
                medium: Medium::Audio(audio),
                ..self.defaults()
            }
        })
    }

    fn track_format(&self) -> Option<SampleFormat> {
        Some(SampleFormat {
            samples_per_second: self.vae.sampling_rate,
            channels: self.vae.audio_channels as u32,
        })
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        match &request.medium {
            Medium::Audio(audio) => self.texts_left_out(request, audio),
            Medium::Image(_) | Medium::Video(_) => Vec::new(),
        }
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        match &request.medium {
            // A result with a source is as long as the source.
            Medium::Audio(audio) if audio.init_audio.is_some() => Vec::new(),
            _ => smaller_lengths(request),
        }
    }

    fn smallest(&self) -> Request {
        let audio = Audio {
            seconds: 1.0,
            ..Audio::default()
        };
        Request {
            prompt: "the smallest track".to_owned(),
            steps: 1,
            medium: Medium::Audio(audio),
            ..self.defaults()
        }
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        self.planned_of(stage, request)
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage::new(self, stage, observer).run()
    }
    fn run_shared(
        &self,
        stages: &[StageRun<'_>],
        kept: &mut Kept,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Values, StageError>>, StageError> {
        let results = self.denoise_shared(stages, kept, observer);
        let results = results.map_err(|error| error.of_stage(DENOISE))?.into_iter();
        Ok(results
            .map(|result| result.map_err(|error| error.of_stage(DENOISE)))
            .collect())
    }
}

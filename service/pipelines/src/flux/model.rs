//! A FLUX checkpoint that is open: what it can be asked, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::{LoadPlan, Target, TensorSource};
use residency::{Bytes, Component};

use super::bounds::{PIXELS_PER_TOKEN, problems};
use super::checkpoint::{FOLDERS, PIPELINES};
use super::config::TransformerConfig;
use super::transformer::{codes_bytes, denoise_scratch, is_modulator};
use crate::autoencoder_kl::{Chunking, VaeConfig, decode_scratch, encode_ladder, ladder};
use crate::checkpoint::ComponentFiles;
use crate::flow_match::{SchedulerConfig, first_step};
use crate::text::clip::ClipConfig;
use crate::text::t5::T5Config;
use crate::text::tokenizers::{ClipTokenizer, T5Tokenizer, TokenizeError};
use crate::{
    Defaults, Family, ImageRequest, Model, ModelError, Precision, RequestError, Rung, StageKind, StagePlan,
};

/// The family.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flux;

impl Family for Flux {
    fn name(&self) -> &'static str {
        "flux"
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self) -> &'static [&'static str] {
        &FOLDERS
    }

    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError> {
        Ok(FluxModel::open(path, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// A FLUX.1 checkpoint, dev or schnell.
#[derive(Debug)]
pub struct FluxModel {
    pub(super) precision: Precision,
    pub(super) transformer: TransformerConfig,
    pub(super) vae: VaeConfig,
    pub(super) clip: ClipConfig,
    pub(super) t5: T5Config,
    pub(super) scheduler: SchedulerConfig,
    pub(super) clip_tokenizer: ClipTokenizer,
    pub(super) t5_tokenizer: T5Tokenizer,
    pub(super) defaults: Defaults,
    pub(super) components: Vec<Component>,
    pub(super) files: Vec<ComponentFiles>,
}

impl FluxModel {
    fn component(&self, name: &str) -> Vec<Component> {
        self.components
            .iter()
            .filter(|component| component.name == name)
            .cloned()
            .collect()
    }

    /// Activation bytes that the quantized layers of a component take beside what the mathematics does, over so many
    /// tokens: one layer is run at a time, and the largest of those whose names are chosen counts.
    fn dequantizing(&self, component_name: &str, tokens: usize, is_run: fn(&str) -> bool) -> Bytes {
        let Some(LoadPlan::Files(sources)) = self.load_plan(component_name) else {
            return Bytes(0);
        };
        let dtype = self.precision.dtype;
        let of_layer = |source: &TensorSource| match source.target {
            Target::Quantized(format) => {
                let (rows, columns) = gpu::rows_and_columns(&source.shape);
                Some(ops::linear_scratch(format, rows, columns, tokens, dtype))
            }
            Target::Full(_) => None,
        };
        let run = sources.iter().filter(|source| is_run(&source.name));
        Bytes(run.filter_map(of_layer).max().unwrap_or_default())
    }

    /// Whether a component has layers in fp8, which cards may multiply as they are.
    fn holds_fp8(&self, component_name: &str) -> bool {
        let Some(LoadPlan::Files(sources)) = self.load_plan(component_name) else {
            return false;
        };
        let is_fp8 =
            |source: &TensorSource| matches!(source.target, Target::Quantized(gpu::WeightFormat::Fp8(_)));
        sources.iter().any(is_fp8)
    }

    /// What a stage's shape says of a component whose fp8 is multiplied as it is: that takes other memory than int8 of as
    /// many bytes.
    fn as_multiplied(&self, component_name: &str) -> &'static str {
        match self.holds_fp8(component_name) {
            true => " fp8",
            false => "",
        }
    }

    /// Sides of the latent of a picture: height, then width.
    pub(super) fn latent_sides(&self, width: u32, height: u32) -> (usize, usize) {
        (
            height as usize / self.vae.factor(),
            width as usize / self.vae.factor(),
        )
    }

    fn encode_text_stage(&self, request: &ImageRequest) -> StagePlan {
        let tokens = request.max_sequence_length as usize;
        let dtype = self.precision.dtype;
        let pooled = self.clip_tokenizer.length();
        let scratch = (self.clip.scratch(pooled, dtype)
            + self.dequantizing("text_encoder", pooled, |_| true))
        .max(self.t5.scratch(tokens, dtype) + self.dequantizing("text_encoder_2", tokens, |_| true));
        StagePlan {
            kind: StageKind::EncodeText,
            components: [self.component("text_encoder"), self.component("text_encoder_2")].concat(),
            rungs: vec![Rung {
                label: "whole".to_owned(),
                scratch,
                approximate: false,
            }],
            shape: format!("t{tokens}{}", self.as_multiplied("text_encoder_2")),
            steps: 1,
        }
    }

    fn denoise_stage(&self, request: &ImageRequest) -> StagePlan {
        let &ImageRequest {
            width,
            height,
            max_sequence_length: tokens,
            ..
        } = request;
        let picture = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize;
        let start = request
            .init_image
            .as_ref()
            .map_or(0, |_| first_step(request.steps, request.strength));
        let steps = request.steps.saturating_sub(start);
        let dtype = self.precision.dtype;
        let mut scratch = Bytes(denoise_scratch(
            &self.transformer,
            tokens as usize,
            picture,
            steps,
            dtype,
        ));
        scratch += self.dequantizing("transformer", tokens as usize + picture, |name| {
            !is_modulator(name)
        });
        if self.holds_fp8("transformer") {
            scratch += Bytes(codes_bytes(&self.transformer, tokens as usize, picture));
        }
        // Modulators have run before there are buffers.
        scratch = scratch.max(self.dequantizing("transformer", steps as usize, is_modulator));
        let mut components = self.component("transformer");
        if request.preview {
            components.extend(self.component("vae"));
            // What is conditioned stays while a preview is decoded at half the size.
            let (h, w) = self.latent_sides(width / 2, height / 2);
            scratch += decode_scratch(&self.vae, h, w, Chunking::Whole, dtype)
                + self.dequantizing("vae", 0, |_| true);
        }
        StagePlan {
            kind: StageKind::Denoise,
            components,
            rungs: vec![Rung {
                label: "whole".to_owned(),
                scratch,
                approximate: false,
            }],
            shape: format!(
                "{width}x{height} t{tokens}{}{}",
                self.as_multiplied("transformer"),
                if request.preview { " preview" } else { "" }
            ),
            steps,
        }
    }
}

impl Model for FluxModel {
    fn family(&self) -> &'static str {
        "flux"
    }

    fn defaults(&self) -> Defaults {
        self.defaults
    }

    fn components(&self) -> &[Component] {
        &self.components
    }

    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        let index = self
            .components
            .iter()
            .position(|component| component.name == component_name)?;
        Some(&self.files[index].plan)
    }

    fn files_of(&self, component_name: &str) -> Vec<Arc<Path>> {
        let index = self
            .components
            .iter()
            .position(|component| component.name == component_name);
        index
            .map(|index| self.files[index].files.clone())
            .unwrap_or_default()
    }

    fn validate(&self, request: &ImageRequest) -> Result<(), Vec<RequestError>> {
        let problems = problems(request);
        if problems.is_empty() {
            Ok(())
        } else {
            Err(problems)
        }
    }

    fn stages(&self, request: &ImageRequest) -> Vec<StagePlan> {
        let &ImageRequest { width, height, .. } = request;
        let encode_image = request.init_image.as_ref();
        let encode_image = encode_image.map(|_| self.lone_stage(StageKind::EncodeImage, width, height));
        std::iter::once(self.encode_text_stage(request))
            .chain(encode_image)
            .chain([
                self.denoise_stage(request),
                self.lone_stage(StageKind::Decode, width, height),
            ])
            .collect()
    }

    fn lone_stage(&self, kind: StageKind, width: u32, height: u32) -> StagePlan {
        let (h, w) = self.latent_sides(width, height);
        let rungs = match kind {
            StageKind::EncodeImage => encode_ladder(&self.vae, h, w, self.precision.dtype),
            StageKind::Decode | StageKind::EncodeText | StageKind::Denoise => {
                ladder(&self.vae, h, w, self.precision.dtype)
            }
        };
        // Convolutions are dequantized whatever their format: no tokens are.
        let dequantizing = self.dequantizing("vae", 0, |_| true);
        StagePlan {
            kind,
            components: self.component("vae"),
            rungs: rungs
                .into_iter()
                .map(|(_, rung)| Rung {
                    scratch: rung.scratch + dequantizing,
                    ..rung
                })
                .collect(),
            shape: format!("{width}x{height}"),
            steps: 1,
        }
    }

    fn planned(&self, kind: StageKind, request: &ImageRequest) -> Vec<ops::Planned> {
        self.planned_of(kind, request)
    }

    fn text_key(&self, request: &ImageRequest) -> Result<String, RequestError> {
        let refused = |error: TokenizeError| RequestError {
            field: "prompt".to_owned(),
            problem: error.to_string(),
        };
        let clip = self.clip_tokenizer.encode(&request.prompt).map_err(refused)?;
        let t5 = self
            .t5_tokenizer
            .encode(&request.prompt, request.max_sequence_length as usize);
        let t5 = t5.map_err(refused)?;
        let mut hash = blake3::Hasher::new();
        for ids in [clip, t5] {
            hash.update(&(ids.len() as u64).to_le_bytes());
            ids.iter().for_each(|id| {
                hash.update(&id.to_le_bytes());
            });
        }
        Ok(format!("flux:{}", hash.finalize().to_hex()))
    }

    fn latent_shape(&self, width: u32, height: u32) -> Vec<usize> {
        let (h, w) = self.latent_sides(width, height);
        vec![1, self.vae.latent_channels, h, w]
    }

    fn run(
        &self,
        plan: &StagePlan,
        rung: usize,
        request: &ImageRequest,
        input: &crate::StageInput,
        tensors: &dyn Fn(&str) -> Result<Arc<gpu::ComponentTensors>, crate::StageError>,
        device: &candle_core::Device,
        observer: &mut dyn crate::Observer,
    ) -> Result<crate::StageOutput, crate::StageError> {
        let mut stage = super::stages::Stage {
            model: self,
            request,
            tensors,
            device,
            observer,
        };
        stage.run(plan.kind, rung, input)
    }
}

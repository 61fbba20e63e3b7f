//! A Z-Image checkpoint that is open: what it can be asked, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::LoadPlan;
use residency::{Bytes, Component};

use super::checkpoint::{FOLDERS, PIPELINES};
use super::config::{MULTIPLE, TransformerConfig};
use super::positions::Lengths;
use super::stages::{CAPTION, DECODE, DENOISE, ENCODE_IMAGE, ENCODE_TEXT, LATENT, Stage};
use super::transformer::{codes_bytes, denoise_scratch, is_modulator};
use crate::autoencoder_kl::{Chunking, VaeConfig, decode_scratch, encode_ladder, ladder};
use crate::bounds::{self, MOST_TOKENS, PIXELS_PER_TOKEN};
use crate::checkpoint::ComponentSet;
use crate::family::smaller_sides;
use crate::flow_match::{SchedulerConfig, first_step};
use crate::plan::only_value;
use crate::text::qwen3::Qwen3Config;
use crate::text::tokenizers::{QwenTokenizer, TokenizeError};
use crate::{
    Family, Image, Medium, Model, ModelError, Observer, Precision, Request, RequestError, Role, Rung,
    StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Names of the components.
pub(super) const TRANSFORMER: &str = "transformer";
/// See [`TRANSFORMER`].
pub(super) const VAE: &str = "vae";
/// See [`TRANSFORMER`].
pub(super) const TEXT_ENCODER: &str = "text_encoder";

/// The family.
#[derive(Clone, Copy, Debug, Default)]
pub struct ZImage;

impl Family for ZImage {
    fn name(&self) -> &'static str {
        "z-image"
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self) -> &'static [&'static str] {
        &FOLDERS
    }

    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError> {
        Ok(ZImageModel::open(path, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// Every field of a request that is out of its bounds.
pub(super) fn problems(request: &Request) -> Vec<RequestError> {
    let mut problems = bounds::problems(request);
    if request.guidance != 0.0 && !problems.iter().any(|problem| problem.field == "guidance") {
        let problem = format!(
            "is {}; Z-Image-Turbo is distilled and takes 0, which is none",
            request.guidance
        );
        problems.push(RequestError::new("guidance", problem));
    }
    problems
}

/// A Z-Image-Turbo checkpoint.
#[derive(Debug)]
pub struct ZImageModel {
    pub(super) precision: Precision,
    pub(super) transformer: TransformerConfig,
    pub(super) vae: VaeConfig,
    pub(super) text: Qwen3Config,
    /// Layers of the text encoder that are run.
    pub(super) depth: usize,
    pub(super) scheduler: SchedulerConfig,
    pub(super) tokenizer: QwenTokenizer,
    /// What it generates where a request leaves everything open.
    pub(super) defaults: Request,
    pub(super) components: ComponentSet,
}

impl ZImageModel {
    /// Sides of the latent of a picture: height, then width.
    pub(super) fn latent_sides(&self, width: u32, height: u32) -> (usize, usize) {
        let factor = self.vae.factor();
        (height as usize / factor, width as usize / factor)
    }

    /// Shape of the latent of a picture.
    pub(super) fn latent_shape(&self, width: u32, height: u32) -> Vec<usize> {
        let (h, w) = self.latent_sides(width, height);
        vec![1, self.vae.latent_channels, h, w]
    }

    /// The tokens of a request's prompt.
    pub(super) fn tokens(&self, request: &Request) -> Result<Vec<u32>, TokenizeError> {
        let most = request.max_sequence_length as usize;
        self.tokenizer.encode_turn(&request.prompt, most)
    }

    /// How many they are: what attention asks for depends on it.
    pub(super) fn text_tokens(&self, request: &Request) -> usize {
        let most = request.max_sequence_length.min(MOST_TOKENS) as usize;
        self.tokens(request).map_or(most, |ids| ids.len())
    }

    /// Tokens of the picture and of its text.
    pub(super) fn lengths(&self, image: &Image, text: usize) -> Lengths {
        Lengths {
            rows: (image.height / PIXELS_PER_TOKEN) as usize,
            columns: (image.width / PIXELS_PER_TOKEN) as usize,
            text,
        }
    }

    fn encode_text_stage(&self, ids: &[u32]) -> StagePlan {
        // Prompts of about the same length share what is learned of them.
        let tokens = ids.len().next_multiple_of(MULTIPLE);
        let is_quantized = self.components.is_quantized(TEXT_ENCODER);
        let scratch = self.text.scratch(tokens, is_quantized, self.precision.dtype)
            + self.components.dequantizing(TEXT_ENCODER, tokens, |_| true);
        StagePlan {
            name: ENCODE_TEXT.to_owned(),
            role: Role::Encode,
            components: names(&[TEXT_ENCODER]),
            rungs: vec![whole(scratch)],
            shape: format!("t{tokens}{}", self.components.as_multiplied(TEXT_ENCODER)),
            steps: 1,
            takes: Vec::new(),
            gives: names(&[CAPTION]),
            per_item: false,
            memo: Some(memo(ids)),
        }
    }

    fn denoise_stage(&self, request: &Request, image: &Image, tokens: usize) -> StagePlan {
        let &Image { width, height, .. } = image;
        let caption = ValueShape::new(CAPTION, vec![tokens, self.transformer.cap_feat_dim]);
        let tokens = tokens.next_multiple_of(MULTIPLE);
        let lengths = self.lengths(image, tokens);
        let from_latent = image.init_image.is_some() || request.from_values;
        let start = if from_latent {
            first_step(request.steps, request.strength)
        } else {
            0
        };
        let steps = request.steps.saturating_sub(start);
        let dtype = self.precision.dtype;
        let mut scratch = Bytes(denoise_scratch(&self.transformer, &lengths, steps, dtype));
        scratch += self
            .components
            .dequantizing(TRANSFORMER, lengths.all(), |name| !is_modulator(name));
        if self.components.holds_fp8(TRANSFORMER) {
            scratch += Bytes(codes_bytes(&self.transformer, &lengths));
        }
        // Modulations are made before there are buffers.
        let of_modulators = self
            .components
            .dequantizing(TRANSFORMER, steps as usize, is_modulator);
        scratch = scratch.max(of_modulators);
        let mut components = names(&[TRANSFORMER]);
        if request.preview {
            components.push(VAE.to_owned());
            // What is conditioned stays while a preview is decoded at half the size.
            let (h, w) = self.latent_sides(width / 2, height / 2);
            scratch += decode_scratch(&self.vae, h, w, Chunking::Whole, dtype)
                + self.components.dequantizing(VAE, 0, |_| true);
        }
        let latent = from_latent.then(|| ValueShape::new(LATENT, self.latent_shape(width, height)));
        StagePlan {
            name: DENOISE.to_owned(),
            role: Role::Sample,
            components,
            rungs: vec![whole(scratch)],
            shape: format!(
                "{width}x{height} t{tokens}{}{}",
                self.components.as_multiplied(TRANSFORMER),
                if request.preview { " preview" } else { "" }
            ),
            steps,
            takes: std::iter::once(caption).chain(latent).collect(),
            gives: names(&[LATENT]),
            per_item: true,
            memo: None,
        }
    }

    fn encode_image_stage(&self, image: &Image) -> StagePlan {
        let (h, w) = self.latent_sides(image.width, image.height);
        StagePlan {
            name: ENCODE_IMAGE.to_owned(),
            role: Role::Encode,
            gives: names(&[LATENT]),
            ..self.vae_stage(image, encode_ladder(&self.vae, h, w, self.precision.dtype))
        }
    }

    fn decode_stage(&self, image: &Image) -> StagePlan {
        let (h, w) = self.latent_sides(image.width, image.height);
        StagePlan {
            takes: vec![ValueShape::new(
                LATENT,
                self.latent_shape(image.width, image.height),
            )],
            ..self.vae_stage(image, ladder(&self.vae, h, w, self.precision.dtype))
        }
    }

    fn vae_stage(&self, image: &Image, rungs: Vec<(Chunking, Rung)>) -> StagePlan {
        // Convolutions are dequantized whatever their format: no tokens are.
        let dequantizing = self.components.dequantizing(VAE, 0, |_| true);
        StagePlan {
            name: DECODE.to_owned(),
            role: Role::Decode,
            components: names(&[VAE]),
            rungs: rungs
                .into_iter()
                .map(|(_, rung)| Rung {
                    scratch: rung.scratch + dequantizing,
                    ..rung
                })
                .collect(),
            shape: format!("{}x{}", image.width, image.height),
            steps: 1,
            takes: Vec::new(),
            gives: Vec::new(),
            per_item: true,
            memo: None,
        }
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Identity of the tokens of a prompt.
fn memo(ids: &[u32]) -> String {
    let mut hash = blake3::Hasher::new();
    for id in ids {
        hash.update(&id.to_le_bytes());
    }
    format!("z-image:{}", hash.finalize().to_hex())
}

/// The one rung of a stage that is not cut into pieces.
fn whole(scratch: Bytes) -> Rung {
    Rung {
        label: "whole".to_owned(),
        scratch,
        approximate: false,
    }
}

impl Model for ZImageModel {
    fn family(&self) -> &'static str {
        "z-image"
    }

    fn defaults(&self) -> Request {
        self.defaults.clone()
    }

    fn components(&self) -> &[Component] {
        self.components.all()
    }

    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        self.components.load_plan(component_name)
    }

    fn files_of(&self, component_name: &str) -> Vec<Arc<Path>> {
        self.components.files_of(component_name)
    }

    fn plan(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let problems = problems(request);
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let image = request.image().map_err(refused)?;
        let ids = self.tokens(request);
        let ids = ids.map_err(|error| vec![RequestError::new("prompt", error.to_string())])?;
        let mut stages = vec![self.encode_text_stage(&ids)];
        if image.init_image.is_some() && !request.from_values {
            stages.push(self.encode_image_stage(image));
        }
        stages.extend([
            self.denoise_stage(request, image, ids.len()),
            self.decode_stage(image),
        ]);
        Ok(stages)
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        let &[1, channels, h, w] = only_value(values, LATENT)? else {
            return None;
        };
        let side = |numbers: usize| u32::try_from(numbers.checked_mul(self.vae.factor())?).ok();
        let image = Image::of(side(w)?, side(h)?);
        (channels == self.vae.latent_channels).then(|| Request {
            medium: Medium::Image(image),
            ..self.defaults()
        })
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        smaller_sides(request, PIXELS_PER_TOKEN)
    }

    fn smallest(&self) -> Request {
        let side = PIXELS_PER_TOKEN;
        Request {
            prompt: "the smallest picture".to_owned(),
            steps: 1,
            medium: Medium::Image(Image::of(side, side)),
            ..self.defaults()
        }
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        self.planned_of(stage, request)
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage {
            model: self,
            run: *stage,
            observer,
        }
        .run()
    }
}

//! An open FLUX checkpoint: its answers to a planner, and the stages of a request.

use gpu::CheckpointFile;
use std::path::Path;
use std::sync::Arc;

use model::Memo;
use model::bounds::{self, PIXELS_PER_TOKEN, problems};
use model::plan::names;
use model::{LeftOut, Passes, Reads, ReferenceFit, smaller_sides};
use residency::Bytes;

use super::adapter_targets::adapter_targets;
use super::checkpoint::{FOLDERS, MARKS, PIPELINES};
use super::config::TransformerConfig;
use super::control_net::OpenControlNet;
use super::edit::{Variant, preferred_size};
use super::stages::{DENOISE, ENCODE_TEXT, encodings};
use super::transformer::{denoise_scratch, negative_scratch};
use crate::adapters::{AdapterFile, AdapterKind, AdapterSet, UsedAs};
use crate::autoencoders::kl::VaeConfig;
use crate::autoencoders::kl::plan::{Autoencoder, LATENT};
use crate::flow_match::SchedulerConfig;
use crate::mmdit::{StepCache, flops_of_pass, is_modulator, rows_of};
use crate::sampling::{Denoiser, Prompts, passes_in_step, shape_of_sampling};
use crate::stage::Stage;
use crate::text::clip::ClipConfig;
use crate::text::t5::T5Config;
use crate::text::tokenizers::{ClipTokenizer, T5Tokenizer, TokenizeError};
use crate::{
    Family, Image, Medium, Model, ModelError, ModelParts, Observer, Precision, Request, RequestError, Role,
    Rung, StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Name of the family.
pub(super) const FAMILY: &str = "flux";

/// The FLUX.1 family.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flux;

impl Family for Flux {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("FLUX.1")
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
        Ok(FluxModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// A FLUX.1 checkpoint: dev, schnell, Kontext or Fill.
#[derive(Clone, Debug)]
pub struct FluxModel {
    pub(super) transformer: TransformerConfig,
    pub(super) vae: VaeConfig,
    pub(super) clip: ClipConfig,
    pub(super) t5: T5Config,
    pub(super) scheduler: SchedulerConfig,
    pub(super) clip_tokenizer: Arc<ClipTokenizer>,
    pub(super) t5_tokenizer: Arc<T5Tokenizer>,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
    pub(super) variant: Variant,
    pub(super) control_nets: Vec<OpenControlNet>,
}

impl FluxModel {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<FluxModel, ModelError> {
        let targets = adapter_targets(&self.transformer, &self.clip, &self.t5, &self.parts.components);
        let mut adapted = self.clone();
        let (nets, loras): (Vec<_>, Vec<_>) = files
            .iter()
            .cloned()
            .partition(|file| file.kind == AdapterKind::ControlNet);
        adapted.adapters = AdapterSet::open(&loras, "FLUX.1", &targets, &mut adapted.parts)?;
        adapted.control_nets.clear();
        for file in nets {
            let opened = OpenControlNet::open(&file, &self.transformer, self.parts.dtype());
            let (net, files) = opened.map_err(|error| ModelError::Adapter {
                name: file.name.clone(),
                error,
            })?;
            adapted.parts.components.push(&net.component, files);
            adapted.parts.adapters.push(net.report());
            adapted.control_nets.push(net);
        }
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

    /// Names and shapes of the text encodings of a request: those of its prompt, and of a negative prompt with an effect.
    pub(super) fn encodings(&self, request: &Request) -> Vec<ValueShape> {
        let tokens = request.max_sequence_length as usize;
        let (pooled, joint) = (
            self.transformer.pooled_projection_dim,
            self.transformer.joint_attention_dim,
        );
        encodings(request)
            .iter()
            .flat_map(|&(pooled_name, sequence_name)| {
                [
                    ValueShape::new(pooled_name, vec![1, pooled]),
                    ValueShape::new(sequence_name, vec![1, tokens, joint]),
                ]
            })
            .collect()
    }

    fn encode_text_stage(&self, request: &Request) -> Result<StagePlan, RequestError> {
        let tokens = request.max_sequence_length as usize;
        let dtype = self.parts.dtype();
        let pooled = self.clip_tokenizer.length();
        let encoder = |name: &str, tokens: usize| {
            let dequantizing = self.parts.components.dequantizing(name, tokens, |_| true);
            dequantizing.max(self.adapters.scratch(name, tokens, dtype))
        };
        let scratch = (self.clip.scratch(pooled, dtype) + encoder("text_encoder", pooled))
            .max(self.t5.scratch(tokens, dtype) + encoder("text_encoder_2", tokens));
        for (field, text) in Prompts::texts(request).iter() {
            self.check_prompt(field, text, tokens)?;
        }
        let (bases, uses) = (["text_encoder", "text_encoder_2"], &request.adapters);
        let components = self.adapters.beside(&bases, uses, UsedAs::Text);
        Ok(StagePlan {
            shape: format!(
                "t{tokens}{}{}",
                if request.negative().is_some() { " n" } else { "" },
                self.parts.components.as_multiplied("text_encoder_2")
            ),
            gives: self
                .encodings(request)
                .into_iter()
                .map(|value| value.name)
                .collect(),
            memo: Some(Memo::of(Request {
                adapters: self.adapters.text_uses(&bases, uses),
                ..request.of_prompt(Medium::Image(Image::of(0, 0)))
            })),
            passes: Passes::of(
                self.parts
                    .components
                    .flops_of_products("text_encoder_2", |_| tokens),
            ),
            ..StagePlan::of(ENCODE_TEXT, Role::Encode, components, vec![Rung::whole(scratch)])
        })
    }

    /// Refuses a prompt that a tokenizer cannot encode.
    fn check_prompt(&self, field: &str, prompt: &str, most: usize) -> Result<(), RequestError> {
        let refused = |error: TokenizeError| RequestError::new(field, error.to_string());
        let clip = self.clip_tokenizer.encode(prompt).map_err(refused)?;
        let known = self
            .clip_tokenizer
            .check_known(&clip, "text_encoder", self.clip.vocab_size);
        known.map_err(refused)?;
        let t5 = self.t5_tokenizer.encode(prompt, most);
        let t5 = t5.map_err(refused)?;
        let known = self
            .t5_tokenizer
            .check_known(&t5, "text_encoder_2", self.t5.vocab_size);
        known.map_err(refused)?;
        Ok(())
    }

    fn denoise_stage(&self, request: &Request, image: &Image) -> StagePlan {
        let &Image { width, height, .. } = image;
        let tokens = request.max_sequence_length;
        let generated = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize;
        let reference = self.reference_tokens(image);
        let picture = generated + reference;
        let steps = self.steps_of(request);
        let dtype = self.parts.dtype();
        let all_tokens = tokens as usize + picture;
        let denoiser = Denoiser {
            parts: &self.parts,
            adapters: &self.adapters,
            name: "transformer",
            width: self.transformer.width(),
            is_modulator,
        };
        let mut buffers = denoise_scratch(&self.transformer, tokens as usize, picture, steps, dtype);
        if request.negative().is_some() {
            buffers += negative_scratch(&self.transformer, tokens as usize, picture, steps, dtype);
        }
        let cached = (generated, self.transformer.width());
        buffers += StepCache::bytes(request, passes_in_step(request), cached, dtype);
        let mut scratch = denoiser.scratch(buffers, all_tokens, steps, request);
        if self.transformer.splits_last_layers {
            scratch += self.adapters.copied(denoiser.name, dtype);
        }
        let mut nets = Vec::new();
        for (_, _, net) in self.controls_of(request, image) {
            nets.push(&net.component);
            scratch += Bytes(net.config.scratch(tokens as usize, generated, steps, dtype));
            scratch += self
                .parts
                .components
                .dequantizing(&net.component, all_tokens, |_| true);
        }
        let latent = self
            .starts_from_latent(request)
            .then(|| self.autoencoder().latent(image));
        let mut beside = match reference {
            0 => String::new(),
            tokens => format!(" r{tokens}"),
        };
        beside.push_str(&shape_of_sampling(request));
        if !nets.is_empty() {
            beside.push_str(&format!(" c{}", nets.len()));
        }
        let mut stage =
            denoiser.stage_with_copies(DENOISE, request, scratch, rows_of((tokens as usize, picture)));
        for net in nets {
            if !stage.components.contains(net) {
                stage.components.push(net.clone());
            }
        }
        StagePlan {
            shape: format!(
                "{width}x{height} t{tokens}{beside}{}",
                self.parts.components.as_multiplied("transformer"),
            ),
            steps,
            takes: self
                .encodings(request)
                .into_iter()
                .chain(latent)
                .chain(self.editing_values(request, image))
                .collect(),
            gives: names(&[LATENT]),
            passes: Passes {
                in_step: passes_in_step(request),
                flops: flops_of_pass(
                    &self.transformer.blocks(),
                    &self.parts.components,
                    "transformer",
                    (tokens as usize, picture),
                ),
            },
            // After every step the unmasked part is restored from the start picture.
            reads_media: image.mask.is_some(),
            preview: request.preview.then(|| self.autoencoder().preview_need(image)),
            ..stage
        }
    }
}

impl Model for FluxModel {
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
        let mut problems = problems(request);
        problems.extend(self.adapters.problems(&request.adapters));
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let image = request.image().map_err(refused)?;
        if let Some(problem) = self.control_problem(image) {
            return Err(vec![problem]);
        }
        let mut stages = vec![self.encode_text_stage(request).map_err(refused)?];
        if image.init_image.is_some() && !request.from_values {
            stages.push(self.autoencoder().encode_stage(image));
        }
        stages.extend(self.editing_stages(request, image));
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
        Prompts::texts(request).left_out(request, |text| self.t5_tokenizer.left_out(text, most).ok())
    }

    fn reference_fit(&self, width: u32, height: u32) -> Result<ReferenceFit, RequestError> {
        match self.variant {
            Variant::Kontext => preferred_size(width, height).map(ReferenceFit::scaled_to),
            Variant::Plain | Variant::Fill => Ok(ReferenceFit::scaled_to((width, height))),
        }
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

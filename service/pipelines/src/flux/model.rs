//! A FLUX checkpoint, recognised: what it consists of, what it can be asked, and the stages of a request.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu::{LoadPlan, Target, TensorSource};
use residency::{Bytes, Component};
use serde::Deserialize;

use super::bounds::{PIXELS_PER_TOKEN, problems};
use super::checkpoint::{FOLDERS, PIPELINES, Recognised, config_of_single_file, recognise};
use super::clip::ClipConfig;
use super::components::{
    ComponentFiles, Wanted, autoencoder_of_single_file, component_of_folder, transformer_of_folder,
    transformer_of_single_file,
};
use super::config::TransformerConfig;
use super::scheduler::{SchedulerConfig, first_step};
use super::t5::T5Config;
use super::tokenizers::{ClipTokenizer, T5Tokenizer};
use super::transformer::{codes_bytes, denoise_scratch};
use super::vae::Chunking;
use super::vae::{VaeConfig, decode_scratch, encode_ladder, ladder};
use crate::files::{damaged, read_json, unsupported};
use crate::{
    Defaults, Family, ImageRequest, Model, ModelError, Precision, RequestError, Rung, StageKind, StagePlan,
    provisional_identity,
};

/// Its components, in the order of [`FluxModel::components`].
const COMPONENTS: [&str; 4] = ["transformer", "vae", "text_encoder", "text_encoder_2"];

/// Bytes a second that a reload is predicted to take until it was measured.
const RELOAD_BYTES_PER_SECOND: f64 = 4e9;

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
    defaults: Defaults,
    components: Vec<Component>,
    files: Vec<ComponentFiles>,
}

impl FluxModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is neither.
    ///
    /// # Errors
    /// When it is FLUX and damaged or not supported, or cannot be quantized as it is asked for.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<FluxModel>, ModelError> {
        let Some(recognised) = recognise(path)? else {
            return Ok(None);
        };
        let formats = &precision.quantization;
        if let Some((unknown, _)) = formats.formats().find(|(name, _)| !COMPONENTS.contains(name)) {
            return Err(ModelError::no_such_component(unknown, &COMPONENTS));
        }
        let wanted = |component: &'static str| Wanted {
            component,
            dtype: precision.dtype,
            format: formats.format_of(component),
        };
        let base = match &recognised {
            Recognised::Folder(folder) => folder,
            Recognised::SingleFile { base, .. } => base,
        };
        let base = &std::fs::canonicalize(base).map_err(|e| damaged(base, e.to_string()))?;
        let folder_config = base.join("transformer").join("config.json");
        let is_folder = matches!(recognised, Recognised::Folder(_));
        let (transformer, transformer_files) = match recognised {
            Recognised::Folder(_) => {
                let config: TransformerConfig = checked(&folder_config, TransformerConfig::check)?;
                let files = transformer_of_folder(&base.join("transformer"), &config, wanted("transformer"))?;
                (config, files)
            }
            Recognised::SingleFile {
                path,
                checkpoint,
                naming,
                ..
            } => {
                let of_base = match folder_config.is_file() {
                    true => read_json(&folder_config)?,
                    false => TransformerConfig::default(),
                };
                let config = config_of_single_file(&path, &checkpoint, naming, &of_base)?;
                config.check().map_err(|problem| unsupported(&path, problem))?;
                let specs = naming.specs(&config);
                let files = transformer_of_single_file(&path, checkpoint, &specs, wanted("transformer"))?;
                (config, files)
            }
        };
        let bfl_vae = match is_folder {
            true => None,
            false => bfl_vae(path, base),
        };
        let vae = match bfl_vae {
            Some(_) => VaeConfig::flux(),
            None => checked(&base.join("vae/config.json"), VaeConfig::check)?,
        };
        let clip: ClipConfig = checked(&base.join("text_encoder/config.json"), ClipConfig::check)?;
        let t5: T5Config = checked(&base.join("text_encoder_2/config.json"), T5Config::check)?;
        check_widths(base, &transformer, &vae, &clip, &t5)?;
        // Vocabularies are most of the time that it takes to open a model: two threads read them.
        let (clip_tokenizer, t5_tokenizer) = std::thread::scope(|scope| {
            let t5 = scope.spawn(|| T5Tokenizer::open(&base.join("tokenizer_2")));
            let clip = ClipTokenizer::open(&base.join("tokenizer"));
            (
                clip,
                t5.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            )
        });
        let clip_tokenizer = clip_tokenizer?;
        if clip_tokenizer.length() > clip.max_position_embeddings {
            let (tokens, places) = (clip_tokenizer.length(), clip.max_position_embeddings);
            let problem = format!("its CLIP has {places} positions for {tokens} tokens");
            return Err(unsupported(base, problem));
        }
        let files = vec![
            transformer_files,
            match bfl_vae {
                Some(file) => autoencoder_of_single_file(&file, vae.tensor_shapes(), wanted("vae"))?,
                None => component_of_folder(&base.join("vae"), wanted("vae"), |_| vae.tensor_shapes())?,
            },
            component_of_folder(&base.join("text_encoder"), wanted("text_encoder"), |has| {
                clip.tensor_shapes(has)
            })?,
            component_of_folder(&base.join("text_encoder_2"), wanted("text_encoder_2"), |has| {
                t5.tensor_shapes(has)
            })?,
        ];
        let components = COMPONENTS
            .iter()
            .zip(&files)
            .map(|(name, files)| component(name, files, precision));
        Ok(Some(FluxModel {
            precision: precision.clone(),
            components: components.collect(),
            files,
            scheduler: checked(
                &base.join("scheduler/scheduler_config.json"),
                SchedulerConfig::check,
            )?,
            clip_tokenizer,
            t5_tokenizer: t5_tokenizer?,
            defaults: defaults(base, transformer.guidance_embeds)?,
            transformer,
            vae,
            clip,
            t5,
        }))
    }

    fn component(&self, name: &str) -> Vec<Component> {
        self.components
            .iter()
            .filter(|component| component.name == name)
            .cloned()
            .collect()
    }

    /// Activation bytes that the quantized layers of a component take beside what the mathematics does, over so many
    /// tokens: one layer is run at a time, and the largest counts.
    fn dequantizing(&self, component_name: &str, tokens: usize) -> Bytes {
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
        Bytes(sources.iter().filter_map(of_layer).max().unwrap_or_default())
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
        let scratch = (self.clip.scratch(pooled, dtype) + self.dequantizing("text_encoder", pooled))
            .max(self.t5.scratch(tokens, dtype) + self.dequantizing("text_encoder_2", tokens));
        StagePlan {
            kind: StageKind::EncodeText,
            components: [self.component("text_encoder"), self.component("text_encoder_2")].concat(),
            rungs: vec![Rung {
                label: "whole".to_owned(),
                scratch,
                approximate: false,
            }],
            shape: format!("t{tokens}"),
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
        scratch += self.dequantizing("transformer", tokens as usize + picture);
        if self.holds_fp8("transformer") {
            scratch += Bytes(codes_bytes(&self.transformer, tokens as usize, picture));
        }
        let mut components = self.component("transformer");
        if request.preview {
            components.extend(self.component("vae"));
            // What is conditioned stays while a preview is decoded at half the size.
            let (h, w) = self.latent_sides(width / 2, height / 2);
            scratch += decode_scratch(&self.vae, h, w, Chunking::Whole, dtype) + self.dequantizing("vae", 0);
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
                "{width}x{height} t{tokens}{}",
                if request.preview { " preview" } else { "" }
            ),
            steps,
        }
    }
}

/// A component's identity and size.
fn component(name: &str, files: &ComponentFiles, precision: &Precision) -> Component {
    let bytes = files.plan.bytes();
    Component {
        id: provisional_identity(&files.place, name, precision),
        name: name.to_owned(),
        bytes,
        reload_seconds: bytes.0 as f64 / RELOAD_BYTES_PER_SECOND,
    }
}

/// A configuration that this build knows.
fn checked<T: serde::de::DeserializeOwned>(
    path: &Path,
    check: impl Fn(&T) -> Result<(), String>,
) -> Result<T, ModelError> {
    let config = read_json(path)?;
    check(&config).map_err(|problem| unsupported(path, problem))?;
    Ok(config)
}

/// Components of one pipeline fit together.
fn check_widths(
    base: &Path,
    transformer: &TransformerConfig,
    vae: &VaeConfig,
    clip: &ClipConfig,
    t5: &T5Config,
) -> Result<(), ModelError> {
    let pairs = [
        (
            "the VAE's latent channels",
            vae.latent_channels,
            transformer.latent_channels(),
        ),
        (
            "the VAE's pixels per latent cell",
            vae.factor(),
            PIXELS_PER_TOKEN as usize / 2,
        ),
        ("the VAE's channels of a picture", vae.out_channels, 3),
        ("the VAE's channels of a picture to encode", vae.in_channels, 3),
        (
            "CLIP's width",
            clip.hidden_size,
            transformer.pooled_projection_dim,
        ),
        ("T5's width", t5.d_model, transformer.joint_attention_dim),
    ];
    match pairs.into_iter().find(|(_, found, expected)| found != expected) {
        Some((what, found, expected)) => Err(unsupported(
            base,
            format!("{what}: {found}, and the transformer takes {expected}"),
        )),
        None => Ok(()),
    }
}

/// The autoencoder of Black Forest Labs that belongs to a single file: beside it or in its base, if the base
/// has none in diffusers' layout.
fn bfl_vae(file: &Path, base: &Path) -> Option<PathBuf> {
    if base.join("vae").is_dir() {
        return None;
    }
    let folders = [file.parent().unwrap_or(Path::new(".")), base];
    folders
        .into_iter()
        .map(|folder| folder.join("ae.safetensors"))
        .find(|path| path.is_file())
}

/// What `moored.json` in the model's folder says, over what dev or schnell are used with.
fn defaults(base: &Path, guided: bool) -> Result<Defaults, ModelError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Told {
        steps: Option<u32>,
        guidance: Option<f32>,
        max_sequence_length: Option<u32>,
        width: Option<u32>,
        height: Option<u32>,
    }
    let path = base.join("moored.json");
    let told: Told = if path.is_file() {
        read_json(&path)?
    } else {
        Told::default()
    };
    let (steps, guidance, tokens) = if guided { (28, 3.5, 512) } else { (4, 0.0, 256) };
    let defaults = Defaults {
        steps: told.steps.unwrap_or(steps),
        guidance: told.guidance.unwrap_or(guidance),
        max_sequence_length: told.max_sequence_length.unwrap_or(tokens),
        width: told.width.unwrap_or(1024),
        height: told.height.unwrap_or(1024),
    };
    let request = ImageRequest {
        prompt: String::new(),
        width: defaults.width,
        height: defaults.height,
        steps: defaults.steps,
        guidance: defaults.guidance,
        seed: 0,
        max_sequence_length: defaults.max_sequence_length,
        init_image: None,
        strength: 1.0,
        preview: false,
    };
    let problems = problems(&request);
    if problems.is_empty() {
        return Ok(defaults);
    }
    let problems: Vec<String> = problems
        .into_iter()
        .map(|RequestError { field, problem }| format!("{field} {problem}"))
        .collect();
    Err(damaged(&path, problems.join("; ")))
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
        let dequantizing = self.dequantizing("vae", 0);
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
        let refused = |error: super::tokenizers::TokenizeError| RequestError {
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

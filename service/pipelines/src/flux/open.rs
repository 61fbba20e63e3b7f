//! Opens a FLUX checkpoint by its headers and configurations, and validates that its components match.

use std::path::Path;

use gpu::CheckpointFile;
use model::bounds::problems;

use super::checkpoint::MARKS;
use super::config::TransformerConfig;
use super::edit::Variant;
use super::model::{FAMILY, FluxModel};
use super::quantize_rule::role_of;
use crate::adapters::AdapterSet;
use crate::autoencoders::kl;
use crate::checkpoint::{
    ComponentFiles, ComponentSet, FilePart, NamesInModel, Recognised, Shapes, TransformerPlace, Wanted,
    component_of_checkpoint, component_of_folder, open_single_file,
};
use crate::defaults::folder_defaults;
use crate::files::{check_pairs, checked, count_all_as_read, pipeline_class, recorded};
use crate::flow_match::SchedulerConfig;
use crate::mmdit;
use crate::text::clip::ClipConfig;
use crate::text::t5::{self, T5Config};
use crate::text::tokenizers::{ClipTokenizer, T5Tokenizer};
use crate::{Image, Medium, ModelError, ModelParts, Precision, Request};

/// Component names, in the order of [`crate::Model::components`].
const COMPONENTS: [&str; 4] = ["transformer", "vae", CLIP, T5];

/// The components of the text encoders, and their names in the file of a whole model.
const CLIP: &str = "text_encoder";
const T5: &str = "text_encoder_2";
const CLIP_IN_MODEL: NamesInModel = NamesInModel {
    prefixes: &["text_encoders.clip_l.transformer."],
    marks: &["text_model.embeddings.token_embedding.weight"],
};
const T5_IN_MODEL: NamesInModel = NamesInModel {
    prefixes: &["text_encoders.t5xxl.transformer."],
    marks: &["shared.weight", "encoder.embed_tokens.weight"],
};

/// Components that presets quantize: nearly all bytes. The others are small, and lose quality out of proportion.
const LARGE: [&str; 2] = ["transformer", "text_encoder_2"];

impl FluxModel {
    /// Opens a folder in diffusers' layout or a single file, by headers and configurations; `None` if it is not FLUX.
    ///
    /// # Errors
    /// When it is FLUX and damaged or not supported, or cannot be quantized as requested.
    pub fn open(path: &Path, precision: &Precision) -> Result<Option<FluxModel>, ModelError> {
        FluxModel::of(path, open_single_file(path)?.as_ref(), precision)
    }

    /// As [`FluxModel::open`]. `file` is open if the path is a single file.
    pub(super) fn of(
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<FluxModel>, ModelError> {
        let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
            return Ok(None);
        };
        let wanted = Wanted::new(precision, &COMPONENTS, &LARGE, role_of)?;
        let base = base.as_path();
        let is_folder = matches!(transformer, TransformerPlace::Folder(_));
        let class = pipeline_class(base)?.unwrap_or_default();
        let file_name = match is_folder {
            true => String::new(),
            false => path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
        };
        let (transformer, transformer_files): (TransformerConfig, _) =
            transformer.open(base, wanted.of("transformer"))?;
        let alone = (!is_folder).then_some(path);
        let vae = kl::Place::of(base, alone, kl::Published::Flux1, transformer.latent_channels())?;
        let clip: ClipConfig = checked(&base.join("text_encoder/config.json"), ClipConfig::check)?;
        let t5: T5Config = checked(&base.join("text_encoder_2/config.json"), T5Config::check)?;
        check_widths(base, &transformer, &clip, &t5)?;
        // Reading vocabularies dominates the time to open a model: two threads read them.
        let (clip_tokenizer, t5_tokenizer) = std::thread::scope(|scope| {
            let t5 = scope.spawn(|| recorded(|| T5Tokenizer::shared(&base.join("tokenizer_2"))));
            let clip = ClipTokenizer::shared(&base.join("tokenizer"));
            let t5 = t5.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let (t5, read) = t5;
            count_all_as_read(&read);
            (clip, t5)
        });
        let clip_tokenizer = clip_tokenizer?;
        clip.check_length(base, clip_tokenizer.length())?;
        let files = [
            transformer_files,
            vae.files(wanted.of("vae"))?,
            text_encoder(base, alone, (CLIP, CLIP_IN_MODEL), &wanted, |has| {
                clip.tensor_shapes(has)
            })?,
            text_encoder(base, alone, (T5, T5_IN_MODEL), &wanted, |has| {
                t5.tensor_shapes(has)
            })?,
        ];
        let variant = Variant::of(&class, &file_name, &transformer);
        let mut components =
            ComponentSet::new(COMPONENTS.into_iter().zip(files), precision.dtype, wanted.formats);
        let blocks = transformer.blocks();
        components.in_blocks("transformer", |name| mmdit::block_of(&blocks, name));
        components.in_blocks("text_encoder_2", t5::block_of);
        let defaults = folder_defaults(base, defaults(&transformer, variant), variant.reads(), problems)?;
        Ok(Some(FluxModel {
            parts: ModelParts::of_components(FAMILY, defaults, &LARGE, components),
            adapters: AdapterSet::default(),
            scheduler: SchedulerConfig::of_pipeline(base)?,
            clip_tokenizer,
            t5_tokenizer: t5_tokenizer?,
            control_nets: Vec::new(),
            variant,
            transformer,
            vae: vae.config,
            clip,
            t5,
        }))
    }
}

/// A text encoder, in its folder or in the file of the whole model.
fn text_encoder(
    base: &Path,
    single: Option<&Path>,
    (name, in_model): (&'static str, NamesInModel),
    wanted: &Wanted,
    shapes: impl FnOnce(&dyn Fn(&str) -> bool) -> Shapes,
) -> Result<ComponentFiles, ModelError> {
    match FilePart::of_model(single, in_model)? {
        Some(own) => {
            let checkpoint = own.checkpoint(|name| Some(name.to_owned()))?;
            component_of_checkpoint(own.path(), checkpoint, wanted.of(name), shapes)
        }
        None => component_of_folder(&base.join(name), wanted.of(name), shapes),
    }
}

/// Checks that the widths of the components of one pipeline match.
fn check_widths(
    base: &Path,
    transformer: &TransformerConfig,
    clip: &ClipConfig,
    t5: &T5Config,
) -> Result<(), ModelError> {
    let pairs = [
        (
            "CLIP's width",
            clip.hidden_size,
            transformer.pooled_projection_dim,
        ),
        ("T5's width", t5.d_model, transformer.joint_attention_dim),
    ];
    check_pairs(base, &pairs)
}

/// The default request of dev, schnell, Kontext or Fill, from their pipelines or their model cards.
fn defaults(config: &TransformerConfig, variant: Variant) -> Request {
    let (steps, guidance, tokens) = match variant {
        Variant::Fill => (50, 30.0, 512),
        Variant::Kontext => (28, 2.5, 512),
        Variant::Plain if config.guidance_embeds => (28, 3.5, 512),
        Variant::Plain => (4, 0.0, 256),
    };
    let mut defaults = Request::of(Medium::Image(Image::of(1024, 1024)), steps, guidance, tokens);
    if config.takes_mask() {
        defaults.strength = 1.0;
    }
    defaults
}

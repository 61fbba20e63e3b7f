//! Components of the authors' layouts: one checkpoint has all but the text encoder and the autoencoder. Sizes are read from its
//! tensors, so that a file without configuration can be opened too. Constants are those of the configuration or of the
//! published models.

use super::checkpoint::AuthorsPlaces;
use super::config::{ConditionConfig, LayerConfig, TokenConfig, TransformerConfig};
use super::layout::{SILENCE, in_original};
use super::model::{CONDITION_ENCODER, DETOKENIZER, TEXT_ENCODER, TOKENIZER, TRANSFORMER, TokenConfigs, VAE};
use super::open::{Parts, check_silence};
use crate::ModelError;
use crate::autoencoders::oobleck::{OobleckConfig, diffusers_name_of_original};
use crate::checkpoint::{
    Checkpoint, ComponentFiles, TensorSpec, Wanted, component_of_checkpoint, component_of_folder,
    component_of_specs, open,
};
use crate::files::{checked, damaged, read_json, unsupported};
use crate::text::qwen3::Qwen3Config;

/// The components of a checkpoint in an authors' layout.
///
/// # Errors
/// When one of them is damaged or not supported.
pub(super) fn parts_of_authors(places: &AuthorsPlaces, wanted: &Wanted) -> Result<Parts, ModelError> {
    let sizes = Sizes { places };
    let supported = |problem| unsupported(&places.place, problem);
    let component = |name: &'static str, shapes, prefix: &str| {
        let config = places.config.as_deref();
        let specs = in_original(shapes, prefix);
        component_of_specs(&places.place, &places.checkpoint, &specs, wanted.of(name), config)
    };
    let transformer = sizes.transformer()?;
    transformer.check().map_err(supported)?;
    let condition = sizes.condition(&transformer.layer)?;
    condition.check().map_err(supported)?;
    let condition_files = component(CONDITION_ENCODER, condition.tensor_shapes(), "encoder.")?
        .with(silence(places, &condition, wanted)?);
    let has_tokens = [
        "tokenizer.quantizer.project_in.weight",
        "detokenizer.proj_out.weight",
    ]
    .iter()
    .all(|name| places.checkpoint.has(name));
    let tokens = || -> Result<_, ModelError> {
        let configs = sizes.tokens(&transformer.layer)?;
        configs.tokenizer.check().map_err(supported)?;
        configs.detokenizer.check_detokenizer().map_err(supported)?;
        let tokenizer = component(TOKENIZER, configs.tokenizer.tokenizer_shapes(), "tokenizer.")?;
        let detokenizer = component(
            DETOKENIZER,
            configs.detokenizer.detokenizer_shapes(),
            "detokenizer.",
        )?;
        Ok((configs, [tokenizer, detokenizer]))
    };
    Ok(Parts {
        condition: (condition, condition_files),
        text: text_encoder(places, wanted)?,
        vae: vae(places, wanted)?,
        tokens: has_tokens.then(tokens).transpose()?,
        transformer: {
            let files = component(TRANSFORMER, transformer.tensor_shapes(), "decoder.")?;
            (transformer, files)
        },
    })
}

/// The latents of silence, which are in a separate file.
fn silence(
    places: &AuthorsPlaces,
    condition: &ConditionConfig,
    wanted: &Wanted,
) -> Result<ComponentFiles, ModelError> {
    let path = &places.silence;
    let checkpoint = Checkpoint::of_file(&open(path)?, |name| Some(name.to_owned()))?;
    let names: Vec<&str> = checkpoint.names().collect();
    let [name] = names[..] else {
        return Err(damaged(
            path,
            format!("it has {} tensors; one is expected", names.len()),
        ));
    };
    let shape = checkpoint.tensor(name)?.shape;
    check_silence(path, &shape, condition)?;
    let spec = TensorSpec {
        tensor: name.to_owned(),
        ..TensorSpec::whole(SILENCE.to_owned(), shape)
    };
    component_of_specs(path, &checkpoint, &[spec], wanted.of(CONDITION_ENCODER), None)
}

fn text_encoder(
    places: &AuthorsPlaces,
    wanted: &Wanted,
) -> Result<(Qwen3Config, ComponentFiles), ModelError> {
    let path = &places.text_encoder;
    if path.is_dir() {
        let config = checked(&path.join("config.json"), Qwen3Config::check)?;
        let files = component_of_folder(path, wanted.of(TEXT_ENCODER), |has| {
            config.tensor_shapes_with_norm(has)
        })?;
        return Ok((config, files));
    }
    let checkpoint = Checkpoint::of_file(&open(path)?, |name| Some(name.to_owned()))?;
    let names = ["model.embed_tokens.weight", "embed_tokens.weight"];
    let found = names.into_iter().find(|name| checkpoint.has(name));
    let table = found.ok_or_else(|| damaged(path, "it has no token embedding"))?;
    let rows = checkpoint.tensor(table)?.shape.first().copied();
    let config = Qwen3Config::qwen3_embedding_0_6b(rows.unwrap_or_default());
    let shapes = |has: &dyn Fn(&str) -> bool| config.tensor_shapes_with_norm(has);
    let files = component_of_checkpoint(path, checkpoint, wanted.of(TEXT_ENCODER), shapes)?;
    Ok((config, files))
}

fn vae(places: &AuthorsPlaces, wanted: &Wanted) -> Result<(OobleckConfig, ComponentFiles), ModelError> {
    let path = &places.vae;
    if path.is_dir() {
        let config = checked(&path.join("config.json"), OobleckConfig::check)?;
        let files = component_of_folder(path, wanted.of(VAE), |_| config.tensor_shapes())?;
        return Ok((config, files));
    }
    let config = OobleckConfig {
        downsampling_ratios: vec![2, 4, 4, 6, 10],
        sampling_rate: 48_000,
        ..OobleckConfig::default()
    };
    let checkpoint = Checkpoint::of_file(&open(path)?, diffusers_name_of_original)?;
    let shapes = match checkpoint.tensor("decoder.block.0.snake1.alpha")?.shape.len() {
        1 => config.original_tensor_shapes(),
        _ => config.tensor_shapes(),
    };
    let files = component_of_checkpoint(path, checkpoint, wanted.of(VAE), |_| shapes)?;
    Ok((config, files))
}

/// Sizes by the shapes of tensors.
struct Sizes<'a> {
    places: &'a AuthorsPlaces,
}

impl Sizes<'_> {
    /// Sides of a tensor.
    fn shape<const N: usize>(&self, name: &str) -> Result<[usize; N], ModelError> {
        let shape = self.places.checkpoint.tensor(name)?.with_ones_of(&[2; N]).shape;
        let wrong = |shape: Vec<usize>| {
            damaged(
                &self.places.place,
                format!("tensor {name} is {shape:?}; {N} sides are expected"),
            )
        };
        <[usize; N]>::try_from(shape).map_err(wrong)
    }

    /// The layers whose names begin with `prefix`, with the constants of `constants`.
    fn layer(&self, prefix: &str, constants: &LayerConfig) -> Result<LayerConfig, ModelError> {
        let of = |part: &str| self.shape::<2>(&format!("{prefix}layers.0.{part}.weight"));
        let [head] = self.shape(&format!("{prefix}layers.0.self_attn.q_norm.weight"))?;
        let [queries, width] = of("self_attn.q_proj")?;
        let [keys, _] = of("self_attn.k_proj")?;
        let [inner, _] = of("mlp.gate_proj")?;
        let head = head.max(1);
        Ok(LayerConfig {
            hidden_size: width,
            intermediate_size: inner,
            num_attention_heads: queries / head,
            num_key_value_heads: keys / head,
            head_dim: head,
            ..constants.clone()
        })
    }

    fn blocks(&self, prefix: &str) -> usize {
        self.places.checkpoint.blocks(&format!("{prefix}layers"))
    }

    fn transformer(&self) -> Result<TransformerConfig, ModelError> {
        let written: TransformerConfig = match &self.places.config {
            Some(path) => read_json(path)?,
            None => TransformerConfig::default(),
        };
        let [_, in_channels, patch_size] = self.shape("decoder.proj_in.1.weight")?;
        let [_, acoustic, _] = self.shape("decoder.proj_out.1.weight")?;
        let [_, condition] = self.shape("decoder.condition_embedder.weight")?;
        let name = self.places.place.file_name().and_then(|name| name.to_str());
        // A configuration without a version is of the model that the file's name states.
        let is_named =
            written.model_version.is_none() && name.is_some_and(|name| name.to_lowercase().contains("turbo"));
        Ok(TransformerConfig {
            layer: self.layer("decoder.", &written.layer)?,
            num_hidden_layers: self.blocks("decoder."),
            in_channels,
            audio_acoustic_hidden_dim: acoustic,
            patch_size,
            encoder_hidden_size: Some(condition),
            is_turbo: written.is_turbo || is_named,
            model_version: written.model_version,
        })
    }

    fn condition(&self, constants: &LayerConfig) -> Result<ConditionConfig, ModelError> {
        let [_, text_hidden_dim] = self.shape("encoder.text_projector.weight")?;
        let [_, timbre_hidden_dim] = self.shape("encoder.timbre_encoder.embed_tokens.weight")?;
        Ok(ConditionConfig {
            layer: self.layer("encoder.lyric_encoder.", constants)?,
            text_hidden_dim,
            timbre_hidden_dim,
            num_lyric_encoder_hidden_layers: self.blocks("encoder.lyric_encoder."),
            num_timbre_encoder_hidden_layers: self.blocks("encoder.timbre_encoder."),
        })
    }

    fn tokens(&self, constants: &LayerConfig) -> Result<TokenConfigs, ModelError> {
        let written: TokenConfig = match &self.places.config {
            Some(path) => read_json(path)?,
            None => TokenConfig::default(),
        };
        let [_, acoustic] = self.shape("tokenizer.audio_acoustic_proj.weight")?;
        let [fsq_dim, _] = self.shape("tokenizer.quantizer.project_out.weight")?;
        let [_, frames, _] = self.shape("detokenizer.special_tokens")?;
        let of = |prefix: &str| -> Result<TokenConfig, ModelError> {
            Ok(TokenConfig {
                layer: self.layer(prefix, &constants.alternating())?,
                audio_acoustic_hidden_dim: acoustic,
                pool_window_size: frames,
                fsq_dim,
                num_attention_pooler_hidden_layers: self.blocks(prefix),
                ..written.clone()
            })
        };
        Ok(TokenConfigs {
            tokenizer: of("tokenizer.attention_pooler.")?,
            detokenizer: of("detokenizer.")?,
        })
    }
}

//! The configurations of the transformer, the condition encoder, and the tokenizer of latents with its inverse.

use serde::Deserialize;

use crate::files::check_sizes;

/// Width of the sinusoidal embedding of times.
pub(super) const SINUSOIDS: usize = 256;

/// The layers that all parts are made of. Missing fields have diffusers' defaults, which are those of the 2B models.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct LayerConfig {
    /// Width of a token.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Most tokens between a query and its keys, in layers with a window.
    pub sliding_window: usize,
    /// Must be false.
    pub attention_bias: bool,
    /// `sliding_attention` or `full_attention` for each layer; by default they alternate, the first with a window.
    pub layer_types: Option<Vec<String>>,
}

impl Default for LayerConfig {
    fn default() -> LayerConfig {
        LayerConfig {
            hidden_size: 2048,
            intermediate_size: 6144,
            num_attention_heads: 16,
            num_key_value_heads: 8,
            head_dim: 128,
            rope_theta: 1_000_000.0,
            rms_norm_eps: 1e-6,
            sliding_window: 128,
            attention_bias: false,
            layer_types: None,
        }
    }
}

impl LayerConfig {
    /// The window of a layer over `tokens` tokens; `None` if it sees all.
    pub(super) fn window(&self, layer: usize, tokens: usize) -> Option<usize> {
        let named = self.layer_types.as_ref().and_then(|types| types.get(layer));
        let is_windowed = match named {
            Some(name) => name == "sliding_attention",
            None => layer.is_multiple_of(2),
        };
        (is_windowed && tokens > self.sliding_window + 1).then_some(self.sliding_window)
    }

    /// The layers' configuration with alternating attention, whatever the file says, as some parts of the reference have it.
    pub(super) fn alternating(&self) -> LayerConfig {
        LayerConfig {
            layer_types: None,
            ..self.clone()
        }
    }

    /// Elements per token of queries.
    pub(super) fn queries(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Elements per token of keys, or of values.
    pub(super) fn keys(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    fn check(&self) -> Result<(), String> {
        let widths = [self.hidden_size, self.intermediate_size, self.head_dim];
        let (heads, of_keys) = (self.num_attention_heads, self.num_key_value_heads);
        check_sizes(&[
            (&widths, 1 << 16),
            (&[heads], 1 << 10),
            (&[self.sliding_window], 1 << 20),
        ])?;
        if widths.contains(&0) || !self.head_dim.is_multiple_of(2) {
            return Err("layers of no width, or heads of an odd one".to_owned());
        }
        if heads == 0 || of_keys == 0 || !heads.is_multiple_of(of_keys) {
            return Err(format!("{heads} heads of queries over {of_keys} of keys"));
        }
        if self.attention_bias {
            return Err("biases of attention, which are not known".to_owned());
        }
        if !(self.rope_theta > 0.0 && self.rms_norm_eps > 0.0) {
            return Err(format!(
                "rope_theta {}, rms_norm_eps {}",
                self.rope_theta, self.rms_norm_eps
            ));
        }
        let known = |kind: &String| ["sliding_attention", "full_attention"].contains(&kind.as_str());
        match self.layer_types.iter().flatten().find(|kind| !known(kind)) {
            Some(kind) => Err(format!("layers with {kind}, which is not known")),
            None => Ok(()),
        }
    }
}

fn check_layers(number: usize) -> Result<(), String> {
    match number {
        1..=1024 => Ok(()),
        other => Err(format!("{other} layers")),
    }
}

/// `transformer/config.json`: diffusers' `AceStepTransformer1DModel`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    #[serde(flatten)]
    pub layer: LayerConfig,
    pub num_hidden_layers: usize,
    /// Channels of the input: those of the source, of its mask, and of the latent.
    pub in_channels: usize,
    /// Channels of a latent frame.
    pub audio_acoustic_hidden_dim: usize,
    /// Latent frames of a token.
    pub patch_size: usize,
    /// Width of the condition encoder; `None` for that of the transformer.
    pub encoder_hidden_size: Option<usize>,
    /// Whether guidance is distilled into the weights.
    pub is_turbo: bool,
    /// `turbo`, `base`, `sft`.
    pub model_version: Option<String>,
}

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            layer: LayerConfig::default(),
            num_hidden_layers: 24,
            in_channels: 192,
            audio_acoustic_hidden_dim: 64,
            patch_size: 2,
            encoder_hidden_size: None,
            is_turbo: false,
            model_version: None,
        }
    }
}

impl TransformerConfig {
    /// Whether the model runs without guidance, and has no tasks of tracks.
    pub fn is_turbo(&self) -> bool {
        self.is_turbo || self.model_version.as_deref() == Some("turbo")
    }

    /// Width of a condition.
    pub fn condition_width(&self) -> usize {
        self.encoder_hidden_size.unwrap_or(self.layer.hidden_size)
    }

    /// Tokens of `frames` latent frames.
    pub(super) fn tokens(&self, frames: usize) -> usize {
        frames.div_ceil(self.patch_size)
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        self.layer.check()?;
        check_layers(self.num_hidden_layers)?;
        let (channels, acoustic) = (self.in_channels, self.audio_acoustic_hidden_dim);
        if acoustic == 0 || acoustic > 1 << 12 || channels != 3 * acoustic {
            return Err(format!(
                "{channels} channels of input for latents of {acoustic}; three times as many are supported"
            ));
        }
        if !(1..=64).contains(&self.patch_size) {
            return Err(format!("patches of {}", self.patch_size));
        }
        match self.condition_width() {
            1..=65_536 => Ok(()),
            other => Err(format!("an encoder_hidden_size of {other}")),
        }
    }
}

/// `condition_encoder/config.json`: `AceStepConditionEncoder`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct ConditionConfig {
    #[serde(flatten)]
    pub layer: LayerConfig,
    /// Width of the text encoder.
    pub text_hidden_dim: usize,
    /// Channels of a latent frame.
    pub timbre_hidden_dim: usize,
    pub num_lyric_encoder_hidden_layers: usize,
    pub num_timbre_encoder_hidden_layers: usize,
}

impl Default for ConditionConfig {
    fn default() -> ConditionConfig {
        ConditionConfig {
            layer: LayerConfig::default(),
            text_hidden_dim: 1024,
            timbre_hidden_dim: 64,
            num_lyric_encoder_hidden_layers: 8,
            num_timbre_encoder_hidden_layers: 4,
        }
    }
}

impl ConditionConfig {
    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        self.layer.check()?;
        check_layers(self.num_lyric_encoder_hidden_layers)?;
        check_layers(self.num_timbre_encoder_hidden_layers)?;
        match [self.text_hidden_dim, self.timbre_hidden_dim]
            .iter()
            .all(|width| (1..=65_536).contains(width))
        {
            true => Ok(()),
            false => Err(format!(
                "text of {} and timbre of {}",
                self.text_hidden_dim, self.timbre_hidden_dim
            )),
        }
    }
}

/// `audio_tokenizer/config.json` and `audio_token_detokenizer/config.json`: `AceStepAudioTokenizer` and its inverse.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct TokenConfig {
    #[serde(flatten)]
    pub layer: LayerConfig,
    /// Channels of a latent frame.
    pub audio_acoustic_hidden_dim: usize,
    /// Latent frames of a token.
    pub pool_window_size: usize,
    /// Width before and after the quantizer: that of the layers.
    pub fsq_dim: usize,
    /// Levels of each number of a token; `None` for those of the published models.
    pub fsq_input_levels: Option<Vec<usize>>,
    /// Must be 1.
    pub fsq_input_num_quantizers: usize,
    pub num_attention_pooler_hidden_layers: usize,
}

impl Default for TokenConfig {
    fn default() -> TokenConfig {
        TokenConfig {
            layer: LayerConfig::default(),
            audio_acoustic_hidden_dim: 64,
            pool_window_size: 5,
            fsq_dim: 2048,
            fsq_input_levels: None,
            fsq_input_num_quantizers: 1,
            num_attention_pooler_hidden_layers: 2,
        }
    }
}

impl TokenConfig {
    /// Levels of each number of a token.
    pub fn levels(&self) -> Vec<usize> {
        let levels = self.fsq_input_levels.clone();
        levels.unwrap_or_else(|| vec![8, 8, 8, 5, 5, 5])
    }

    /// Checks that this tokenizer is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        self.check_detokenizer()?;
        let levels = self.levels();
        if levels.is_empty() || levels.len() > 64 || levels.iter().any(|level| !(2..=1 << 16).contains(level))
        {
            return Err(format!("levels of {levels:?}"));
        }
        if self.fsq_input_num_quantizers != 1 {
            return Err(format!(
                "{} quantizers; one is supported",
                self.fsq_input_num_quantizers
            ));
        }
        match self.fsq_dim == self.layer.hidden_size {
            true => Ok(()),
            false => Err(format!(
                "a quantizer of {} after layers of {}",
                self.fsq_dim, self.layer.hidden_size
            )),
        }
    }

    /// Checks that this detokenizer is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check_detokenizer(&self) -> Result<(), String> {
        self.layer.check()?;
        check_layers(self.num_attention_pooler_hidden_layers)?;
        match (1..=1024).contains(&self.pool_window_size)
            && (1..=1 << 12).contains(&self.audio_acoustic_hidden_dim)
        {
            true => Ok(()),
            false => Err(format!(
                "tokens of {} frames of {}",
                self.pool_window_size, self.audio_acoustic_hidden_dim
            )),
        }
    }
}

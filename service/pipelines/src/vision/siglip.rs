//! SigLIP's encoder of pictures: transformers' `SiglipVisionModel`, `last_hidden_state`. FramePack uses it.
//!
//! Computed by candle-transformers over resident tensors, so in full precision only. The pooling head is neither
//! loaded nor computed.

use candle_core::{DType, Module, Tensor};
use candle_nn::Activation;
use candle_transformers::models::siglip::{VisionConfig, VisionModel};
use gpu::ComponentTensors;
use model::StageError;
use ops::allocated;
use residency::Bytes;
use serde::Deserialize;

use crate::checkpoint::QuantizeRole;
use crate::files::check_sizes;
use crate::resident;
use crate::text::encoding::check_finite;

/// Prefix of all names in published checkpoints.
const PREFIX: &str = "vision_model.";

/// The activation that is supported.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The encoder's `config.json`, or its `vision_config` where it is a part of `SiglipModel`. Missing fields have the
/// defaults of transformers' `SiglipVisionConfig`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Written")]
pub struct SiglipConfig {
    /// Width of a token.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// Channels of a picture.
    pub num_channels: usize,
    /// Side of a picture in pixels.
    pub image_size: usize,
    /// Side of a token's patch in pixels.
    pub patch_size: usize,
    /// Activation: only `gelu_pytorch_tanh` is supported.
    pub hidden_act: String,
    /// Epsilon of the layer norms.
    pub layer_norm_eps: f64,
}

/// A configuration as it is written.
#[derive(Deserialize)]
#[serde(default)]
struct Written {
    vision_config: Option<Box<Written>>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_channels: usize,
    image_size: usize,
    patch_size: usize,
    hidden_act: String,
    layer_norm_eps: f64,
}

impl Default for Written {
    fn default() -> Written {
        Written {
            vision_config: None,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            num_channels: 3,
            image_size: 224,
            patch_size: 16,
            hidden_act: ACTIVATION.to_owned(),
            layer_norm_eps: 1e-6,
        }
    }
}

impl From<Written> for SiglipConfig {
    fn from(written: Written) -> SiglipConfig {
        let written = match written.vision_config {
            Some(vision) => *vision,
            None => written,
        };
        SiglipConfig {
            hidden_size: written.hidden_size,
            intermediate_size: written.intermediate_size,
            num_hidden_layers: written.num_hidden_layers,
            num_attention_heads: written.num_attention_heads,
            num_channels: written.num_channels,
            image_size: written.image_size,
            patch_size: written.patch_size,
            hidden_act: written.hidden_act,
            layer_norm_eps: written.layer_norm_eps,
        }
    }
}

impl SiglipConfig {
    /// so400m-patch14-384, whose single files have no configuration.
    pub fn so400m_patch14_384() -> SiglipConfig {
        SiglipConfig::from(Written {
            hidden_size: 1152,
            intermediate_size: 4304,
            num_hidden_layers: 27,
            num_attention_heads: 16,
            image_size: 384,
            patch_size: 14,
            ..Written::default()
        })
    }

    /// Checks that this encoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.hidden_size,
            self.intermediate_size,
            self.image_size,
            self.patch_size,
        ];
        check_sizes(&[(&widths, 1 << 14), (&[self.num_hidden_layers], 1 << 10)])?;
        if widths.contains(&0) || self.patch_size > self.image_size {
            return Err(format!(
                "{} channels in patches of {} of {} pixels",
                self.hidden_size, self.patch_size, self.image_size
            ));
        }
        // Attention is quadratic.
        if self.tokens() > 4096 {
            return Err(format!("{} tokens of a picture", self.tokens()));
        }
        if self.num_channels != 3 {
            return Err(format!("pictures of {} channels", self.num_channels));
        }
        if self.num_attention_heads == 0 || !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(format!(
                "a width of {} in {} heads",
                self.hidden_size, self.num_attention_heads
            ));
        }
        if self.hidden_act != ACTIVATION {
            return Err(format!(
                "the activation {:?}; only {ACTIVATION} is known",
                self.hidden_act
            ));
        }
        match self.layer_norm_eps > 0.0 {
            true => Ok(()),
            false => Err(format!("an epsilon of {}", self.layer_norm_eps)),
        }
    }

    /// Tokens of a picture.
    pub fn tokens(&self) -> usize {
        (self.image_size / self.patch_size.max(1)).pow(2)
    }

    /// Names and shapes of the tensors that are used. Names begin with `vision_model.` unless `has` knows them without
    /// it.
    pub fn tensor_shapes(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let (width, inner, patch) = (self.hidden_size, self.intermediate_size, self.patch_size);
        let prefix = prefix_of(has);
        let mut list = vec![(
            format!("{prefix}embeddings.position_embedding.weight"),
            vec![self.tokens(), width],
        )];
        let mut layer = |name: String, shape: &[usize]| {
            list.push((format!("{prefix}{name}.weight"), shape.to_vec()));
            list.push((format!("{prefix}{name}.bias"), shape[..1].to_vec()));
        };
        layer(
            "embeddings.patch_embedding".to_owned(),
            &[width, self.num_channels, patch, patch],
        );
        for i in 0..self.num_hidden_layers {
            let block = format!("encoder.layers.{i}");
            layer(format!("{block}.layer_norm1"), &[width]);
            for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
                layer(format!("{block}.self_attn.{part}"), &[width, width]);
            }
            layer(format!("{block}.layer_norm2"), &[width]);
            layer(format!("{block}.mlp.fc1"), &[inner, width]);
            layer(format!("{block}.mlp.fc2"), &[width, inner]);
        }
        layer("post_layernorm".to_owned(), &[width]);
        list
    }

    /// Predicted peak of activations of encoding a picture. Every operation allocates its result: the peaks are the
    /// patches, attention (scores, scaled, and weights, with queries, keys and values in both orders), and the
    /// feed-forward.
    pub fn scratch(&self, dtype: DType) -> Bytes {
        let (size, tokens) = (dtype.size_in_bytes(), self.tokens());
        let hidden = allocated(tokens * self.hidden_size * size);
        let scores = allocated(self.num_attention_heads * tokens * tokens * size);
        let inner = allocated(tokens * self.intermediate_size * size);
        let picture = self.num_channels * self.image_size * self.image_size;
        let pixels = allocated(picture * size_of::<f32>()) + 2 * allocated(picture * size);
        let attention = 12 * hidden + 3 * scores;
        let feed_forward = 6 * hidden + 3 * inner;
        Bytes(pixels + attention.max(feed_forward) + resident::packing_bytes(dtype))
    }

    /// As candle-transformers has it.
    fn vision(&self) -> VisionConfig {
        VisionConfig {
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_channels: self.num_channels,
            image_size: self.image_size,
            patch_size: self.patch_size,
            hidden_act: Activation::GeluPytorchTanh,
            layer_norm_eps: self.layer_norm_eps,
        }
    }
}

/// Prefix of the names of a checkpoint's tensors.
fn prefix_of(has: &dyn Fn(&str) -> bool) -> &'static str {
    match has("post_layernorm.weight") {
        true => "",
        false => PREFIX,
    }
}

/// All tensors stay in full precision.
pub(crate) fn role(_: &str) -> QuantizeRole {
    QuantizeRole::Full
}

/// SigLIP's encoder over resident tensors.
#[derive(Clone, Debug)]
pub struct SiglipEncoder {
    model: VisionModel,
    /// `[tokens, hidden_size]`, for its device and dtype.
    positions: Tensor,
    component: String,
    config: SiglipConfig,
}

impl SiglipEncoder {
    /// From the tensors of this component.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported encoder, [`StageError::Missing`] for a tensor that is missing or
    /// not of the configuration's shape.
    pub fn new(
        config: &SiglipConfig,
        component: &str,
        tensors: &ComponentTensors,
    ) -> Result<SiglipEncoder, StageError> {
        let bad = |problem| StageError::BadInput(format!("the SigLIP encoder has {problem}"));
        config.check().map_err(bad)?;
        let has = |name: &str| tensors.contains(name);
        let missing = StageError::missing_in(component);
        for (name, shape) in config.tensor_shapes(&has) {
            tensors.shaped(&name, &shape).map_err(missing)?;
        }
        let prefix = prefix_of(&has);
        let positions = tensors
            .get(&format!("{prefix}embeddings.position_embedding.weight"))
            .map_err(missing)?;
        let name_of = move |asked: &str| format!("{prefix}{asked}");
        let vars = resident::vars(tensors, positions.dtype(), positions.device(), name_of);
        Ok(SiglipEncoder {
            model: VisionModel::new(&config.vision(), false, vars)?,
            positions,
            component: component.to_owned(),
            config: config.clone(),
        })
    }

    /// Encodes a picture, `[1, 3, image_size, image_size]` of a processor: `[1, tokens, hidden_size]`, after the last
    /// norm, in the dtype of the weights. `cancelled` is called once.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for pixels of another shape.
    pub fn forward(&self, pixels: &Tensor, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let side = self.config.image_size;
        if pixels.dims() != [1, self.config.num_channels, side, side] {
            return Err(StageError::BadInput(format!(
                "pixels of {:?}, and the SigLIP encoder takes a picture of {side}x{side}",
                pixels.dims()
            )));
        }
        if cancelled() {
            return Err(StageError::Cancelled);
        }
        // The dtype is converted on the host, where no kernel has to be loaded for it.
        let pixels = pixels.to_dtype(self.positions.dtype())?;
        let pixels = pixels.to_device(self.positions.device())?;
        let encoding = self.model.forward(&pixels)?;
        check_finite(&encoding, &self.component)?;
        Ok(encoding)
    }
}

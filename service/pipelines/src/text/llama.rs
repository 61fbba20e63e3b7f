//! LLaMA's decoder as HunyuanVideo's text encoder: the states before its last two layers, without the last norm
//! (transformers' `LlamaModel`, `hidden_states[-3]`). Those layers are neither loaded nor computed.
//!
//! All precisions are computed by our own layers (`decoder.rs`): candle-transformers' `models::llama::Llama` answers
//! with the last token's logits only.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::Planned;
use residency::Bytes;
use serde::Deserialize;

use super::decoder::{Decoder, ResidentDecoder, Rope};
use super::tokenizers::TemplatedIds;

pub(crate) use super::decoder::{block_of, role};

/// Layers after the states that are used.
const UNUSED_LAYERS: usize = 2;

/// The encoder's `config.json`, or its `text_config` where the decoder is a part of
/// `LlavaForConditionalGeneration`. Missing fields have the defaults of transformers' `LlamaConfig`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Written")]
pub struct LlamaConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of a token.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of layers, with the two that are not used.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Activation: only `silu` is supported.
    pub hidden_act: String,
    /// Whether attention or feed-forward have biases: must be false.
    pub has_biases: bool,
    /// The rotary embedding.
    rope: Rope,
}

/// A configuration as it is written, where some defaults depend on other fields.
#[derive(Deserialize)]
#[serde(default)]
struct Written {
    text_config: Option<Box<Written>>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    hidden_act: String,
    attention_bias: bool,
    mlp_bias: bool,
    #[serde(flatten)]
    rope: Rope,
}

impl Default for Written {
    fn default() -> Written {
        Written {
            text_config: None,
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            rms_norm_eps: 1e-6,
            hidden_act: "silu".to_owned(),
            attention_bias: false,
            mlp_bias: false,
            rope: Rope::default(),
        }
    }
}

impl From<Written> for LlamaConfig {
    fn from(written: Written) -> LlamaConfig {
        let written = match written.text_config {
            Some(text) => *text,
            None => written,
        };
        let heads = written.num_attention_heads;
        LlamaConfig {
            vocab_size: written.vocab_size,
            hidden_size: written.hidden_size,
            intermediate_size: written.intermediate_size,
            num_hidden_layers: written.num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: written.num_key_value_heads.unwrap_or(heads),
            head_dim: written
                .head_dim
                .unwrap_or_else(|| written.hidden_size.checked_div(heads).unwrap_or(0)),
            rms_norm_eps: written.rms_norm_eps,
            hidden_act: written.hidden_act,
            has_biases: written.attention_bias || written.mlp_bias,
            rope: written.rope,
        }
    }
}

impl LlamaConfig {
    /// The configuration of HunyuanVideo's LLaVA-LLaMA-3-8B, whose single files have none.
    pub fn llava_llama3_8b() -> LlamaConfig {
        LlamaConfig::from(Written {
            vocab_size: 128_320,
            intermediate_size: 14_336,
            num_key_value_heads: Some(8),
            rms_norm_eps: 1e-5,
            rope: Rope::of(500_000.0),
            ..Written::default()
        })
    }

    /// The decoder's sizes.
    fn decoder(&self) -> Decoder {
        Decoder {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            heads_kv: self.num_key_value_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            theta: self.rope.theta(),
            has_head_norms: false,
            has_biases: false,
            sections: None,
        }
    }

    /// Checks that this decoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        self.decoder().check(&self.hidden_act)?;
        if self.depth() == 0 {
            return Err(format!(
                "{} layers, and nothing before the last {UNUSED_LAYERS}",
                self.num_hidden_layers
            ));
        }
        if self.has_biases {
            return Err("biases of attention or feed-forward, which are not known".to_owned());
        }
        self.rope.check()
    }

    /// Layers that are loaded and computed.
    fn depth(&self) -> usize {
        self.num_hidden_layers.saturating_sub(UNUSED_LAYERS)
    }

    /// Names and shapes of the tensors that are used. Names begin with `model.` unless `has` knows the token
    /// embedding by another name.
    pub fn tensor_shapes(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        self.decoder().tensor_shapes(self.depth(), has)
    }

    /// Predicted peak of activations of encoding `tokens`, including those of the template.
    pub fn scratch(&self, tokens: usize, dtype: DType) -> Bytes {
        self.decoder().scratch(tokens, dtype)
    }

    /// cuDNN shape of each layer's attention over `tokens`.
    pub fn planned(&self, tokens: usize, dtype: DType) -> Planned {
        self.decoder().planned(tokens, dtype)
    }
}

/// LLaMA without its last two layers, over resident tensors.
#[derive(Debug)]
pub struct LlamaEncoder<'a>(ResidentDecoder<'a>);

impl LlamaEncoder<'_> {
    /// The encoder with the tensors of this component.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported decoder, [`StageError::Missing`] for a tensor that is missing or
    /// not of the configuration's shape.
    pub fn new<'a>(
        config: &LlamaConfig,
        component: &str,
        tensors: &'a ComponentTensors,
    ) -> Result<LlamaEncoder<'a>, StageError> {
        let bad = |problem| StageError::BadInput(format!("the LLaMA encoder has {problem}"));
        config.check().map_err(bad)?;
        ResidentDecoder::new(config.decoder(), config.depth(), component, tensors).map(LlamaEncoder)
    }

    /// Encodes a prompt in its template: `[1, tokens, hidden_size]` of the tokens after the head of the template, in
    /// the dtype of the weights. `cancelled` is called before every layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, too many,
    /// or none after the head.
    pub fn forward(&self, prompt: &TemplatedIds, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let TemplatedIds { ids, head } = prompt;
        let tokens = prompt.used();
        if tokens == 0 {
            let problem = format!("{} tokens, of which the template has {head}", ids.len());
            return Err(StageError::BadInput(problem));
        }
        let encode = || self.0.encode(ids, cancelled);
        let states = self.0.checked(ids, cancelled, encode)?;
        Ok(states.narrow(0, *head, tokens)?.unsqueeze(0)?)
    }
}

#[cfg(test)]
mod tests {
    use gpu::{Fp8Scales, LoadPlan, Target, WeightFormat};
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

    use super::*;
    use crate::checkpoint::{Checkpoint, Requested, component_of_checkpoint, open};

    /// The component of a file as ComfyUI's users have: all layers and the head of a language model, `model.` before
    /// the names, and linear layers in fp8 with a scale each.
    #[test]
    fn unused_tensors_of_a_scaled_fp8_file_are_not_read() {
        let json = r#"{"vocab_size": 5, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1}"#;
        let config: LlamaConfig = serde_json::from_str(json).unwrap();
        let mut shapes = config.decoder().tensor_shapes(4, &|_| false);
        shapes.push(("model.norm.weight".to_owned(), vec![8]));
        shapes.push(("lm_head.weight".to_owned(), vec![5, 8]));
        let zeros = vec![0u8; 1 << 10];
        let mut views = vec![("scaled_fp8".to_owned(), Dtype::F8_E4M3, vec![2])];
        for (name, shape) in shapes {
            if role(&name) == crate::checkpoint::QuantizeRole::Quantized {
                views.push((name.replace(".weight", ".scale_weight"), Dtype::F32, vec![]));
                views.push((name, Dtype::F8_E4M3, shape));
            } else {
                views.push((name, Dtype::F16, shape));
            }
        }
        let views = views.into_iter().map(|(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape, &zeros[..bytes]).unwrap())
        });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("llava_llama3_fp8_scaled.safetensors");
        serialize_to_file(views.collect::<Vec<_>>(), None, &file).unwrap();

        let checkpoint = Checkpoint::of_file(&open(&file).unwrap(), |name| Some(name.to_owned())).unwrap();
        let wanted = Requested {
            component: "text_encoder",
            dtype: DType::BF16,
            format: None,
            role_of: role,
        };
        let component =
            component_of_checkpoint(&file, checkpoint, wanted, |has| config.tensor_shapes(has)).unwrap();
        let LoadPlan::Files(sources) = component.plan else {
            panic!("files")
        };
        let used = config.tensor_shapes(&|_| false);
        assert!(
            sources
                .iter()
                .map(|source| &source.name)
                .eq(used.iter().map(|(name, _)| name))
        );
        assert_eq!(used.len(), 1 + 2 * 9);
        for source in &sources {
            let expected = match source.name.contains("_proj.") {
                true => Target::Quantized(WeightFormat::Fp8(Fp8Scales::Tensor)),
                false => Target::Full(DType::BF16),
            };
            assert_eq!(source.target, expected, "{}", source.name);
        }
    }
}

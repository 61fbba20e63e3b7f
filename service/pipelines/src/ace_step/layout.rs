//! Names and shapes of the tensors in diffusers, and their names in the authors' files.

use super::config::{ConditionConfig, LayerConfig, SINUSOIDS, TokenConfig, TransformerConfig};
use crate::checkpoint::{LayerNames, Shapes, TensorSpec};

/// Learned embedding of no condition, in the condition encoder.
pub(super) const NULL: &str = "null_condition_emb";
/// Latents of silence.
pub(super) const SILENCE: &str = "silence_latent";

/// Names and shapes, as they are collected.
struct List(Shapes);

impl List {
    fn add(&mut self, name: &str, shape: &[usize]) {
        self.0.push((name.to_owned(), shape.to_vec()));
    }

    /// A weight `[outputs, inputs]` and a bias `[outputs]`.
    fn linear(&mut self, name: &str, [outputs, inputs]: [usize; 2]) {
        self.add(&format!("{name}.weight"), &[outputs, inputs]);
        self.add(&format!("{name}.bias"), &[outputs]);
    }

    /// Attention whose keys and values come from tokens of `hidden_size`.
    fn attention(&mut self, name: &str, layer: &LayerConfig) {
        let (width, queries, keys) = (layer.hidden_size, layer.queries(), layer.keys());
        self.add(&format!("{name}.to_q.weight"), &[queries, width]);
        self.add(&format!("{name}.to_k.weight"), &[keys, width]);
        self.add(&format!("{name}.to_v.weight"), &[keys, width]);
        self.add(&format!("{name}.to_out.0.weight"), &[width, queries]);
        self.add(&format!("{name}.norm_q.weight"), &[layer.head_dim]);
        self.add(&format!("{name}.norm_k.weight"), &[layer.head_dim]);
    }

    fn feed_forward(&mut self, name: &str, layer: &LayerConfig) {
        let (width, inner) = (layer.hidden_size, layer.intermediate_size);
        self.add(&format!("{name}.gate_proj.weight"), &[inner, width]);
        self.add(&format!("{name}.up_proj.weight"), &[inner, width]);
        self.add(&format!("{name}.down_proj.weight"), &[width, inner]);
    }

    /// The layers of an encoder, and the norm after them.
    fn encoder(&mut self, prefix: &str, layers: usize, layer: &LayerConfig) {
        let width = layer.hidden_size;
        for i in 0..layers {
            let name = format!("{prefix}layers.{i}");
            self.attention(&format!("{name}.self_attn"), layer);
            self.feed_forward(&format!("{name}.mlp"), layer);
            self.add(&format!("{name}.input_layernorm.weight"), &[width]);
            self.add(&format!("{name}.post_attention_layernorm.weight"), &[width]);
        }
        self.add(&format!("{prefix}norm.weight"), &[width]);
    }
}

impl TransformerConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (layer, width) = (&self.layer, self.layer.hidden_size);
        let mut list = List(Vec::new());
        list.add("proj_in_conv.weight", &[width, self.in_channels, self.patch_size]);
        list.add("proj_in_conv.bias", &[width]);
        for embedding in ["time_embed", "time_embed_r"] {
            list.linear(&format!("{embedding}.linear_1"), [width, SINUSOIDS]);
            list.linear(&format!("{embedding}.linear_2"), [width, width]);
            list.linear(&format!("{embedding}.time_proj"), [6 * width, width]);
        }
        list.linear("condition_embedder", [width, self.condition_width()]);
        for i in 0..self.num_hidden_layers {
            let name = format!("layers.{i}");
            for norm in ["self_attn_norm", "cross_attn_norm", "mlp_norm"] {
                list.add(&format!("{name}.{norm}.weight"), &[width]);
            }
            list.attention(&format!("{name}.self_attn"), layer);
            list.attention(&format!("{name}.cross_attn"), layer);
            list.feed_forward(&format!("{name}.mlp"), layer);
            list.add(&format!("{name}.scale_shift_table"), &[1, 6, width]);
        }
        list.add("norm_out.weight", &[width]);
        let acoustic = self.audio_acoustic_hidden_dim;
        list.add("proj_out_conv.weight", &[width, acoustic, self.patch_size]);
        list.add("proj_out_conv.bias", &[acoustic]);
        list.add("scale_shift_table", &[1, 2, width]);
        list.0
    }

    /// The layers that adapters change: under the names of diffusers, and of the authors.
    pub(super) fn adapted(&self) -> Vec<TensorSpec> {
        in_original(self.tensor_shapes(), "")
    }
}

impl ConditionConfig {
    /// Names and shapes of the tensors that are used, except the latents of silence, whose length depends on the file.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (layer, width) = (&self.layer, self.layer.hidden_size);
        let mut list = List(Vec::new());
        list.add("text_projector.weight", &[width, self.text_hidden_dim]);
        list.linear("lyric_encoder.embed_tokens", [width, self.text_hidden_dim]);
        list.encoder("lyric_encoder.", self.num_lyric_encoder_hidden_layers, layer);
        list.linear("timbre_encoder.embed_tokens", [width, self.timbre_hidden_dim]);
        list.encoder("timbre_encoder.", self.num_timbre_encoder_hidden_layers, layer);
        list.add(NULL, &[1, 1, width]);
        list.0
    }
}

impl TokenConfig {
    /// Names and shapes of the tokenizer's tensors.
    pub fn tokenizer_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (layer, width) = (&self.layer, self.layer.hidden_size);
        let mut list = List(Vec::new());
        list.linear("audio_acoustic_proj", [width, self.audio_acoustic_hidden_dim]);
        list.linear("attention_pooler.embed_tokens", [width, width]);
        list.add("attention_pooler.special_token", &[1, 1, width]);
        list.encoder(
            "attention_pooler.",
            self.num_attention_pooler_hidden_layers,
            layer,
        );
        let numbers = self.levels().len();
        list.linear("quantizer.project_in", [numbers, self.fsq_dim]);
        list.linear("quantizer.project_out", [self.fsq_dim, numbers]);
        list.0
    }

    /// Names and shapes of the detokenizer's tensors.
    pub fn detokenizer_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (layer, width) = (&self.layer, self.layer.hidden_size);
        let mut list = List(Vec::new());
        list.linear("embed_tokens", [width, width]);
        list.add("special_tokens", &[1, self.pool_window_size, width]);
        list.encoder("", self.num_attention_pooler_hidden_layers, layer);
        list.linear("proj_out", [self.audio_acoustic_hidden_dim, width]);
        list.0
    }
}

/// Parts of the authors' names, and the parts in their place in diffusers' names.
pub(super) const NAMES: LayerNames = LayerNames(&[
    ("proj_in.1", &["proj_in_conv"]),
    ("proj_out.1", &["proj_out_conv"]),
    ("q_proj", &["to_q"]),
    ("k_proj", &["to_k"]),
    ("v_proj", &["to_v"]),
    ("o_proj", &["to_out.0"]),
    ("q_norm", &["norm_q"]),
    ("k_norm", &["norm_k"]),
]);

/// Prefix of the authors' names of the transformer.
pub(super) const DECODER: &str = "decoder.";

/// These tensors in the authors' file, where a component's names begin with `prefix`.
pub(super) fn in_original(shapes: Shapes, prefix: &str) -> Vec<TensorSpec> {
    let specs = shapes.into_iter().map(|(name, shape)| TensorSpec {
        // In the authors' file the embedding of no condition belongs to no component.
        tensor: match name.as_str() {
            NULL => name.clone(),
            _ => format!("{prefix}{}", NAMES.authors(&name)),
        },
        ..TensorSpec::whole(name, shape)
    });
    specs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(shapes: Vec<(String, Vec<usize>)>) -> usize {
        shapes
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum()
    }

    #[test]
    fn the_published_models_have_their_published_sizes() {
        let millions = |shapes| (numbers(shapes) as f64 / 1e5).round() / 10.0;
        assert_eq!(millions(TransformerConfig::default().tensor_shapes()), 1575.5);
        assert_eq!(millions(ConditionConfig::default().tensor_shapes()), 608.4);
        assert_eq!(millions(TokenConfig::default().tokenizer_shapes()), 105.0);
        assert_eq!(millions(TokenConfig::default().detokenizer_shapes()), 105.0);
        let wide = TransformerConfig {
            layer: LayerConfig {
                hidden_size: 2560,
                intermediate_size: 9728,
                num_attention_heads: 32,
                ..LayerConfig::default()
            },
            num_hidden_layers: 32,
            encoder_hidden_size: Some(2048),
            ..TransformerConfig::default()
        };
        assert_eq!(millions(wide.tensor_shapes()), 4168.9);
    }

    #[test]
    fn names_are_translated_to_those_of_the_authors() {
        for (ours, theirs) in [
            (
                "layers.3.self_attn.to_out.0.weight",
                "layers.3.self_attn.o_proj.weight",
            ),
            (
                "layers.3.cross_attn.norm_k.weight",
                "layers.3.cross_attn.k_norm.weight",
            ),
            ("proj_in_conv.bias", "proj_in.1.bias"),
            ("scale_shift_table", "scale_shift_table"),
        ] {
            assert_eq!(NAMES.authors(ours), theirs);
        }
    }
}

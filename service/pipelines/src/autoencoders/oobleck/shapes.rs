//! Names and shapes of the autoencoder's tensors, as [`super::OobleckEncoder`] and [`super::OobleckDecoder`] need them.

use ops::Through;

use super::config::OobleckConfig;
use super::table::{Layer, TAPS};

/// The diffusers name of a tensor of stable-audio-tools' own naming, which ComfyUI's files have too, there with or without a
/// prefix `vae.`, `first_stage_model.` or `pretransform.model.`. In this naming layers are numbered, and a weight's length and
/// direction may be `parametrizations.weight.original0` and `original1`. Names of diffusers stay as they are. `None` for a name
/// of no part of the autoencoder.
///
/// The vectors of an activation are `[channels]` there ([`OobleckConfig::original_tensor_shapes`]).
pub fn diffusers_name_of_original(name: &str) -> Option<String> {
    let prefixes = ["pretransform.model.", "first_stage_model.", "vae."];
    let name = prefixes
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name);
    let (part, rest) = name.split_once('.')?;
    let is_encoder = match part {
        "encoder" => true,
        "decoder" => false,
        _ => return None,
    };
    let rest = rest
        .replace("parametrizations.weight.original0", "weight_g")
        .replace("parametrizations.weight.original1", "weight_v");
    let Some(mut path) = rest.strip_prefix("layers.") else {
        return Some(format!("{part}.{rest}"));
    };
    let mut numbers = Vec::new();
    let leaf = loop {
        let (number, rest) = path.split_once('.')?;
        numbers.push(number.parse::<usize>().ok()?);
        match rest.strip_prefix("layers.") {
            Some(deeper) => path = deeper,
            None => break rest,
        }
    };
    let is_activation = matches!(leaf, "alpha" | "beta");
    let of_unit = |unit: usize, layer: usize| {
        let layer = ["snake1", "conv1", "snake2", "conv2"].get(layer)?;
        Some(format!("res_unit{}.{layer}", unit + 1))
    };
    let layer = match (numbers.as_slice(), is_activation) {
        ([0], false) => "conv1".to_owned(),
        ([_], true) => "snake1".to_owned(),
        ([_], false) => "conv2".to_owned(),
        ([block, rest @ ..], _) => {
            let within = match (is_encoder, rest) {
                (true, [unit @ 0..=2, layer]) => of_unit(*unit, *layer)?,
                (true, [3]) | (false, [0]) => "snake1".to_owned(),
                (true, [4]) => "conv1".to_owned(),
                (false, [1]) => "conv_t1".to_owned(),
                (false, [unit @ 2..=4, layer]) => of_unit(unit - 2, *layer)?,
                _ => return None,
            };
            format!("block.{}.{within}", block.checked_sub(1)?)
        }
        ([], _) => return None,
    };
    Some(format!("{part}.{layer}.{leaf}"))
}

impl OobleckConfig {
    /// Names and shapes of all tensors of this configuration, as diffusers stores them: weights as a length `weight_g`
    /// and a direction `weight_v`.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.shapes(|channels| vec![1, channels, 1])
    }

    /// [`OobleckConfig::tensor_shapes`] where the vectors of activations are `[channels]`, as in files of
    /// stable-audio-tools.
    pub fn original_tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.shapes(|channels| vec![channels])
    }

    fn shapes(&self, of_vector: fn(usize) -> Vec<usize>) -> Vec<(String, Vec<usize>)> {
        let mut list = List {
            tensors: Vec::new(),
            of_vector,
        };
        for layer in self.encoder().iter().chain(&self.decoder()) {
            list.add(layer);
        }
        list.tensors
    }
}

struct List {
    tensors: Vec<(String, Vec<usize>)>,
    of_vector: fn(usize) -> Vec<usize>,
}

impl List {
    fn add(&mut self, layer: &Layer) {
        match layer {
            Layer::Convolution {
                name,
                snake,
                shape,
                channels: (inputs, outputs),
                has_bias,
            } => {
                if let Some(snake) = snake {
                    self.snake(snake, *inputs);
                }
                let rows_and_columns = match shape.through {
                    Through::Transposed { .. } => [*inputs, *outputs],
                    Through::Dilated { .. } | Through::Strided { .. } => [*outputs, *inputs],
                };
                self.weight(name, rows_and_columns, shape.taps);
                if *has_bias {
                    self.tensors.push((format!("{name}.bias"), vec![*outputs]));
                }
            }
            Layer::Unit { name, channels, .. } => {
                for (index, taps) in [(1, TAPS), (2, 1)] {
                    self.snake(&format!("{name}.snake{index}"), *channels);
                    let name = format!("{name}.conv{index}");
                    self.weight(&name, [*channels; 2], taps);
                    self.tensors.push((format!("{name}.bias"), vec![*channels]));
                }
            }
        }
    }

    /// A length for each row, and a direction for each row and column.
    fn weight(&mut self, name: &str, [rows, columns]: [usize; 2], taps: usize) {
        let (length, direction) = (vec![rows, 1, 1], vec![rows, columns, taps]);
        self.tensors.push((format!("{name}.weight_g"), length));
        self.tensors.push((format!("{name}.weight_v"), direction));
    }

    fn snake(&mut self, name: &str, channels: usize) {
        for vector in ["alpha", "beta"] {
            self.tensors
                .push((format!("{name}.{vector}"), (self.of_vector)(channels)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ace_step_has_as_many_parameters_as_its_file() {
        let config = OobleckConfig {
            downsampling_ratios: vec![2, 4, 4, 6, 10],
            ..OobleckConfig::default()
        };
        let count = |shapes: Vec<(String, Vec<usize>)>| -> usize {
            shapes
                .iter()
                .map(|(_, shape)| shape.iter().product::<usize>())
                .sum()
        };
        assert_eq!(count(config.tensor_shapes()), 168_695_426);
        assert_eq!(config.tensor_shapes().len(), 365);
        assert_eq!(
            count(config.tensor_shapes()),
            count(config.original_tensor_shapes())
        );
    }

    #[test]
    fn numbered_layers_get_the_names_of_diffusers() {
        for (original, expected) in [
            ("encoder.layers.0.weight_g", "encoder.conv1.weight_g"),
            (
                "encoder.layers.1.layers.0.layers.0.alpha",
                "encoder.block.0.res_unit1.snake1.alpha",
            ),
            (
                "vae.encoder.layers.5.layers.2.layers.3.bias",
                "encoder.block.4.res_unit3.conv2.bias",
            ),
            ("encoder.layers.2.layers.3.beta", "encoder.block.1.snake1.beta"),
            (
                "encoder.layers.2.layers.4.parametrizations.weight.original1",
                "encoder.block.1.conv1.weight_v",
            ),
            ("encoder.layers.6.alpha", "encoder.snake1.alpha"),
            ("encoder.layers.7.bias", "encoder.conv2.bias"),
            ("first_stage_model.decoder.layers.0.bias", "decoder.conv1.bias"),
            ("decoder.layers.1.layers.0.beta", "decoder.block.0.snake1.beta"),
            (
                "decoder.layers.1.layers.1.weight_v",
                "decoder.block.0.conv_t1.weight_v",
            ),
            (
                "decoder.layers.3.layers.4.layers.1.weight_g",
                "decoder.block.2.res_unit3.conv1.weight_g",
            ),
            ("pretransform.model.decoder.layers.6.beta", "decoder.snake1.beta"),
            ("decoder.layers.7.weight_v", "decoder.conv2.weight_v"),
            (
                "decoder.block.0.conv_t1.weight_v",
                "decoder.block.0.conv_t1.weight_v",
            ),
        ] {
            assert_eq!(
                diffusers_name_of_original(original).as_deref(),
                Some(expected),
                "{original}"
            );
        }
        for other in [
            "bottleneck.x",
            "encoder.layers.1.layers.5.bias",
            "decoder.layers.x.bias",
            "decoder.layers.1",
        ] {
            assert_eq!(diffusers_name_of_original(other), None, "{other}");
        }
    }
}

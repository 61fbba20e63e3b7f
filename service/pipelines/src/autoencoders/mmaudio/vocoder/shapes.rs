//! Names and shapes of the vocoder's tensors.

use super::config::VocoderConfig;
use super::table::{Convolution, Table};

/// How a file has the weights of convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// A length and a direction for each row, `weight_g` and `weight_v`.
    Normed,
    /// One tensor, `weight`.
    Folded,
}

impl VocoderConfig {
    /// Names and shapes of the tensors that are read, weights as a length and a direction for each row, as in the authors'
    /// file.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.shapes(Weights::Normed)
    }

    /// [`VocoderConfig::tensor_shapes`] of a file with folded weights.
    pub fn folded_tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.shapes(Weights::Folded)
    }

    fn shapes(&self, weights: Weights) -> Vec<(String, Vec<usize>)> {
        let Table {
            first,
            stages,
            activation,
            last,
        } = self.table();
        let mut list = Vec::new();
        let mut convolution = |of: &Convolution| {
            let Convolution { name, channels, .. } = of;
            let shape = of.shape_of_weight();
            match weights {
                Weights::Normed => {
                    list.push((format!("{name}.weight_g"), vec![shape[0], 1, 1]));
                    list.push((format!("{name}.weight_v"), shape.to_vec()));
                }
                Weights::Folded => list.push((format!("{name}.weight"), shape.to_vec())),
            }
            list.push((format!("{name}.bias"), vec![channels.1]));
        };
        convolution(&first);
        let mut activations = vec![(activation, last.channels.0)];
        for stage in &stages {
            convolution(&stage.up);
            for unit in stage.blocks.iter().flatten() {
                unit.convolutions.iter().for_each(&mut convolution);
                let channels = stage.up.channels.1;
                activations.extend(unit.activations.iter().map(|name| (name.clone(), channels)));
            }
        }
        convolution(&last);
        for (name, channels) in activations {
            for vector in ["alpha", "beta"] {
                list.push((format!("{name}.act.{vector}"), vec![channels]));
            }
        }
        list
    }
}

/// The name in this table of a tensor of the authors' file, whose tensors are under `generator`, and whose lengths and
/// directions may have the names of newer versions of torch. `None` for the filters of activations, which follow from
/// constants.
pub fn vocoder_name(name: &str) -> Option<String> {
    let name = name.strip_prefix("generator.").unwrap_or(name);
    let name = name.strip_prefix("vocoder.").unwrap_or(name);
    if name.ends_with(".filter") {
        return None;
    }
    Some(
        name.replace("parametrizations.weight.original0", "weight_g")
            .replace("parametrizations.weight.original1", "weight_v"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_vocoder_has_as_many_parameters_as_its_file() {
        let shapes = VocoderConfig::default().tensor_shapes();
        let count: usize = shapes
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        assert_eq!(count / 100_000, 1122, "{count}");
    }

    #[test]
    fn names_of_files_become_those_of_the_table() {
        for (found, expected) in [
            ("generator.conv_pre.weight_g", Some("conv_pre.weight_g")),
            (
                "ups.0.0.parametrizations.weight.original1",
                Some("ups.0.0.weight_v"),
            ),
            ("vocoder.conv_post.bias", Some("conv_post.bias")),
            ("resblocks.3.activations.0.upsample.filter", None),
            ("activation_post.downsample.lowpass.filter", None),
        ] {
            assert_eq!(vocoder_name(found).as_deref(), expected, "{found}");
        }
    }
}

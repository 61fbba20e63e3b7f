//! Names and shapes of the decoder's tensors.

use super::config::MmAudioConfig;
use super::table::{Layer, OfBlock, of_attention};

/// The gain of the decoder's last convolution, less one.
pub(super) const GAIN: &str = "decoder.learnable_gain";
/// Mean and deviation of each bin.
pub(super) const MEAN: &str = "data_mean";
pub(super) const DEVIATION: &str = "data_std";

impl MmAudioConfig {
    /// Names and shapes of the tensors that the decoder reads, under the authors' names. diffusers' have `vae.` before them.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut convolutions = Vec::new();
        for layer in self.decoder() {
            match layer {
                Layer::Convolution(convolution) => convolutions.push(convolution),
                Layer::Block { name, channels, .. } => {
                    let OfBlock {
                        conv1,
                        conv2,
                        shortcut,
                    } = OfBlock::new(&name, channels);
                    convolutions.extend([conv1, conv2].into_iter().chain(shortcut));
                }
                Layer::Attention { name, channels } => convolutions.extend(of_attention(&name, channels)),
                Layer::Twice | Layer::Activation => {}
            }
        }
        let weights = convolutions.iter().map(|convolution| {
            let shape = convolution.shape_of_weight().to_vec();
            (format!("{}.weight", convolution.name), shape)
        });
        let of_bins = [MEAN, DEVIATION].map(|name| (name.to_owned(), vec![1, self.mel_bins, 1]));
        weights
            .chain([(GAIN.to_owned(), vec![1])])
            .chain(of_bins)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_decoder_has_as_many_parameters_as_its_file() {
        let config = MmAudioConfig::default();
        let shapes = config.tensor_shapes();
        let count: usize = shapes
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        assert_eq!(count / 100_000, 991, "{count}");
    }
}

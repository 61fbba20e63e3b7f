//! Names and shapes of the transformer's tensors: those of diffusers, in single files too.

use super::config::TransformerConfig;
use crate::checkpoint::{LayerNames, Layout, TensorSpec};
use crate::mmdit::SINUSOIDS;

/// Further names of the layers in single files: there are none.
pub(super) const NAMES: LayerNames = LayerNames(&[]);

/// Name of the layers that embed a timestep.
pub(super) const TIMESTEP: &str = "time_text_embed.timestep_embedder";

/// All tensors of a transformer of this configuration.
pub(super) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let width = config.width();
    let mut list = Layout::default();
    let [first, second] = ["linear_1", "linear_2"].map(|name| format!("{TIMESTEP}.{name}"));
    for (name, sizes) in [
        ("img_in", [width, config.in_channels]),
        ("txt_in", [width, config.joint_attention_dim]),
        (first.as_str(), [width, SINUSOIDS]),
        (second.as_str(), [width, width]),
        ("norm_out.linear", [2 * width, width]),
        ("proj_out", [config.in_channels, width]),
    ] {
        list.linear(name, sizes, name, 0);
    }
    list.same("txt_norm.weight", &[config.joint_attention_dim]);
    list.blocks_of_diffusers(&config.blocks());
    list.0
}

impl TransformerConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        layout(self).into_iter().map(|spec| (spec.name, spec.shape))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use gpu::{BlockPlace, BlockSize, Uses, parts_of_blocks};
    use residency::Bytes;

    use super::*;
    use crate::mmdit::{block_of, is_modulator};

    #[test]
    fn the_published_model_has_its_published_size_a_third_of_it_in_modulators() {
        let specs = layout(&TransformerConfig::default());
        let numbers = |spec: &TensorSpec| spec.shape.iter().product::<usize>();
        assert_eq!(specs.iter().map(numbers).sum::<usize>(), 20_430_401_088);
        let modulators = specs
            .iter()
            .filter(|spec| spec.name.starts_with("transformer_blocks.") && is_modulator(&spec.name));
        assert_eq!(modulators.map(numbers).sum::<usize>(), 60 * 2 * 6 * 3072 * 3072);
        let names: BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
        assert_eq!(names.len(), specs.len());
    }

    /// The modulations of all steps are computed before the first, and serve all: the blocks that hold the modulators leave the card
    /// first.
    #[test]
    fn modulators_need_not_be_on_the_card_while_steps_run() {
        let config = TransformerConfig::default();
        let (mut blocks, mut whole) = (BTreeMap::<BlockPlace, u64>::new(), 0);
        for spec in layout(&config) {
            let bytes = 2 * spec.shape.iter().product::<usize>() as u64;
            whole += bytes;
            if let Some(place) = block_of(&config.blocks(), &spec.name).filter(|_| spec.shape.len() > 1) {
                *blocks.entry(place).or_default() += bytes;
            }
        }
        assert_eq!(blocks.len(), 2 * 60);
        let sizes = blocks.iter().map(|(place, bytes)| BlockSize {
            uses: place.uses,
            bytes: Bytes(*bytes),
            in_ring: Bytes(*bytes),
        });
        let parts = parts_of_blocks(Bytes(whole), &sizes.collect::<Vec<_>>());
        let modulators = |place: &BlockPlace| place.uses == Uses::Once;
        let held: u64 = blocks
            .iter()
            .filter(|(place, _)| modulators(place))
            .map(|(_, bytes)| bytes)
            .sum();
        let without = parts.sizes().iter().find(|size| size.streamed_once.0 == held);
        let without = without.expect("a part without modulators");
        let gibibytes = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        println!("{:.2} of {:.2} GiB", gibibytes(without.bytes.0), gibibytes(whole));
        // 12.66 GiB less, and a ring of the modulators of two blocks.
        assert_eq!(without.streamed.0, 0);
        assert_eq!(without.bytes.0, whole - held + 2 * held / 60);
    }
}

//! The memory of a sampling, for every family.

use residency::Bytes;

use crate::adapters::{AdapterSet, UsedAs};
use crate::{ModelParts, Request, Role, StagePlan};

/// The transformer of a sampling.
pub(crate) struct Denoiser<'a> {
    pub(crate) parts: &'a ModelParts,
    pub(crate) adapters: &'a AdapterSet,
    /// Name of its component.
    pub(crate) name: &'a str,
    /// Width of its hidden states.
    pub(crate) width: usize,
    /// Whether a tensor is the weight of a modulator, which steps do not use.
    pub(crate) is_modulator: fn(&str) -> bool,
}

impl Denoiser<'_> {
    /// Predicted activation bytes of `steps` steps over so many tokens: those of the `buffers`, the scratch of quantized layers
    /// and of adapters, and the codes of rows for native fp8 products.
    pub(crate) fn scratch(&self, buffers: u64, tokens: usize, steps: u32, request: &Request) -> Bytes {
        let (components, adapters) = (&self.parts.components, self.adapters);
        let dequantizing = |tokens, of_modulators: bool| {
            let layers = |name: &str| (self.is_modulator)(name) == of_modulators;
            components.dequantizing(self.name, tokens, layers)
        };
        let of_adapters = adapters.scratch(self.name, tokens, components.dtype());
        let mut scratch = Bytes(buffers) + dequantizing(tokens, false).max(of_adapters);
        if components.is_multiplied_in_fp8(self.name) {
            scratch += Bytes(ops::CodesOfRows::bytes(tokens, self.width));
        }
        // Modulators run before the buffers are allocated, and again in each step while they are there where strengths
        // change.
        let of_modulators = dequantizing(steps as usize, true);
        match request.has_curves() {
            true => scratch + of_modulators,
            false => scratch.max(of_modulators),
        }
    }

    /// The stage of a request whose steps need this scratch: of each item, with what its adapters have for the transformer.
    pub(crate) fn stage(&self, name: &str, request: &Request, scratch: Bytes) -> StagePlan {
        let (components, adapters) = (&self.parts.components, self.adapters);
        let beside = adapters.beside(&[self.name], &request.adapters, UsedAs::Steps);
        let rungs = adapters.rungs(self.name, &request.adapters, scratch, components.dtype());
        StagePlan {
            per_item: true,
            ..StagePlan::of(name, Role::Sample, beside, rungs)
        }
    }
}

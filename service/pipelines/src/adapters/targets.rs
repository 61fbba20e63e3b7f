//! The layers of a model that adapters may change, under every name that they have in files.

use std::collections::HashMap;

use crate::checkpoint::{LayerNames, Rows, TensorSpec, unwrapped};

/// Prefixes of the names of the denoiser's layers in programs that write `_` for `.`: kohya, OneTrainer, and SimpleTuner.
const JOINED: [&str; 3] = ["lora_unet_", "lora_transformer_", "lycoris_"];

/// A layer that a name in a file denotes, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerPart {
    /// Index into [`TargetComponent::layers`].
    pub(super) layer: usize,
    /// The rows of the named layer's output that are this layer's, in its order.
    pub(super) rows: Vec<Rows>,
}

/// A linear layer of a component, or a convolution.
#[derive(Clone, Debug)]
pub(super) struct TargetLayer {
    /// The layer's name in the component: the name of its weight without `.weight`.
    pub(super) name: String,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Rows and columns of a convolution's filter.
    pub(super) kernel: Option<[usize; 2]>,
}

impl TargetLayer {
    /// The shape of the factor that takes the layer's input to so many numbers.
    pub(super) fn down_shape(&self, rank: usize) -> Vec<usize> {
        let kernel = self.kernel.iter().flatten().copied();
        [rank, self.inputs].into_iter().chain(kernel).collect()
    }

    /// Numbers of both factors of this rank.
    pub(super) fn numbers(&self, rank: usize) -> usize {
        self.down_shape(rank).iter().product::<usize>() + self.outputs * rank
    }
}

/// Which layers of a component adapters may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Changed {
    Linears,
    LinearsAndConvolutions,
}

/// A component whose layers adapters may change.
#[derive(Clone, Debug)]
pub(crate) struct TargetComponent {
    /// Name of the component in the base.
    pub(crate) name: &'static str,
    /// Prefixes of its layers' names in files; `None` for a denoiser, whose names have the prefixes of checkpoints.
    prefixes: Option<Vec<&'static str>>,
    pub(super) layers: Vec<TargetLayer>,
    /// By every name of a layer, with dots and with underscores: its parts.
    by_name: HashMap<String, Vec<LayerPart>>,
}

impl TargetComponent {
    /// The layers of a denoiser, whose weights are these tensors, with `names` as further names. `optional` is the part at the
    /// front of layers' names that may be there or be left out.
    pub(crate) fn denoiser(
        name: &'static str,
        specs: &[TensorSpec],
        names: LayerNames,
        optional: &str,
    ) -> TargetComponent {
        TargetComponent::of(name, None, specs, Changed::Linears, names, optional)
    }

    /// As [`TargetComponent::denoiser`], with the convolutions over rows and columns, whose terms the denoiser computes
    /// ([`ConvolutionTerm`](super::ConvolutionTerm)).
    pub(crate) fn convolutional(
        name: &'static str,
        specs: &[TensorSpec],
        names: LayerNames,
    ) -> TargetComponent {
        TargetComponent::of(name, None, specs, Changed::LinearsAndConvolutions, names, "")
    }

    /// The layers of a text encoder, whose names in files begin with one of `prefixes`. `optional` is a part of layers'
    /// names that may be left out.
    pub(crate) fn text_encoder(
        name: &'static str,
        prefixes: &[&'static str],
        specs: &[TensorSpec],
        optional: &str,
    ) -> TargetComponent {
        let prefixes = Some(prefixes.to_vec());
        TargetComponent::of(name, prefixes, specs, Changed::Linears, LayerNames(&[]), optional)
    }

    fn of(
        name: &'static str,
        prefixes: Option<Vec<&'static str>>,
        specs: &[TensorSpec],
        changed: Changed,
        names: LayerNames,
        optional: &str,
    ) -> TargetComponent {
        let mut component = TargetComponent {
            name,
            prefixes,
            layers: Vec::new(),
            by_name: HashMap::new(),
        };
        for spec in specs {
            let (Some(layer), Some(in_file)) = (
                spec.name.strip_suffix(".weight"),
                spec.tensor.strip_suffix(".weight"),
            ) else {
                continue;
            };
            let (outputs, inputs, kernel) = match *spec.shape.as_slice() {
                [outputs, inputs] if is_linear(layer) => (outputs, inputs, None),
                [outputs, inputs, rows, columns] if changed == Changed::LinearsAndConvolutions => {
                    (outputs, inputs, Some([rows, columns]))
                }
                _ => continue,
            };
            let index = component.layers.len();
            component.layers.push(TargetLayer {
                name: layer.to_owned(),
                outputs,
                inputs,
                kernel,
            });
            let whole = vec![Rows {
                first: 0,
                count: outputs,
            }];
            let with_optional = |name: &str| match name.strip_prefix(optional) {
                Some(short) => short.to_owned(),
                None => format!("{optional}{name}"),
            };
            for (name, rows) in [(layer, &whole), (in_file, &spec.rows)] {
                for name in names.all(name) {
                    component.add(&with_optional(&name), index, rows);
                    component.add(&name, index, rows);
                }
            }
        }
        component
    }

    fn add(&mut self, name: &str, layer: usize, rows: &[Rows]) {
        for name in [name.to_owned(), name.replace('.', "_")] {
            let parts = self.by_name.entry(name).or_default();
            if !parts.iter().any(|part| part.layer == layer) {
                parts.push(LayerPart {
                    layer,
                    rows: rows.to_vec(),
                });
            }
        }
    }

    /// Adds a further name for the first `outputs` rows of the fused layers that `of` denotes.
    pub(crate) fn alias_of_first_rows(&mut self, name: &str, of: &str, outputs: usize) {
        let parts = self.by_name.get(of).cloned().unwrap_or_default();
        let within = |part: &LayerPart| {
            let last = part.rows.iter().map(|rows| rows.first + rows.count).max();
            last.is_some_and(|last| last <= outputs)
        };
        let parts = parts.into_iter().filter(within).collect();
        self.by_name.insert(name.to_owned(), parts);
    }

    /// The layers that a layer's name in a file denotes; `None` if it names no layer of this component.
    pub(super) fn find(&self, name: &str) -> Option<&[LayerPart]> {
        let known = |name: &str| self.by_name.get(name).map(Vec::as_slice);
        match &self.prefixes {
            Some(prefixes) => prefixes
                .iter()
                .find_map(|prefix| known(name.strip_prefix(prefix)?)),
            None => unwrapped(name, &['.']).find_map(known).or_else(|| {
                let mut joined = JOINED.iter().filter_map(|prefix| name.strip_prefix(prefix));
                joined.find_map(|name| unwrapped(name, &['.', '_']).find_map(known))
            }),
        }
    }
}

/// Whether a two-dimensional weight is that of a linear layer: tables of embeddings are not.
fn is_linear(layer: &str) -> bool {
    let last = layer.rsplit('.').next().unwrap_or(layer);
    ![
        "shared",
        "token_embedding",
        "position_embedding",
        "embed_tokens",
        "relative_attention_bias",
    ]
    .contains(&last)
}

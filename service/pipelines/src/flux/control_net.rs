//! ControlNets for FLUX.1: diffusers' `FluxControlNetModel`, single and union, with its tensor names.
//!
//! A ControlNet is a copy of some of the transformer's blocks that reads a control picture beside the latent. The outputs of
//! its blocks are added to the residual of the transformer's blocks, each output to several blocks in turn. It is a separate
//! component.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor};
use model::decimal;
use ops::Epilogue;
use serde::Deserialize;

use super::config::TransformerConfig;
use super::layout::layout;
use super::transformer::Prompted;
use super::trunk::{Trunk, TrunkConditioning};
use crate::adapters::{AdaptedTensors, AdapterError, AdapterFile, AdapterReport};
use crate::checkpoint::{Checkpoint, ComponentFiles, QuantizeRole, Requested, exact_component, whole};
use crate::files::read_json;
use crate::linear::Linear;
use crate::mmdit::{Added, BlockHook, BlockPlace, Buffers, Next};
use crate::{ControlUse, StageError};

/// The class in its configuration.
const CLASS: &str = "FluxControlNetModel";

/// `config.json` of a ControlNet.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ControlNetConfig {
    #[serde(rename = "_class_name", default)]
    class: String,
    #[serde(flatten)]
    pub(super) trunk: TransformerConfig,
    /// Number of modes of a union; `None` for a single one.
    #[serde(default)]
    pub(super) num_mode: Option<usize>,
    /// Set for a ControlNet that reads the control picture by its own convolutions instead of the autoencoder.
    #[serde(default)]
    conditioning_embedding_channels: Option<usize>,
}

/// An open ControlNet.
#[derive(Clone, Debug)]
pub(super) struct OpenControlNet {
    pub(super) name: String,
    pub(super) component: String,
    pub(super) config: ControlNetConfig,
}

impl OpenControlNet {
    /// Opens a ControlNet for a transformer, in full precision.
    ///
    /// # Errors
    /// When it is a ControlNet of another kind, or does not fit the transformer.
    pub(super) fn open(
        file: &AdapterFile,
        base: &TransformerConfig,
        dtype: DType,
    ) -> Result<(OpenControlNet, ComponentFiles), AdapterError> {
        let refused = |error: crate::ModelError| AdapterError::File(error.to_string());
        let config: ControlNetConfig = read_json(&file.path.join("config.json")).map_err(refused)?;
        if config.class != CLASS {
            return Err(AdapterError::File(format!(
                "it is a {}, and {CLASS} is supported",
                config.class
            )));
        }
        if config.conditioning_embedding_channels.is_some() {
            return Err(AdapterError::Unsupported {
                kind: "a control picture that convolutions of its own read (XLabs)",
                tensor: "conditioning_embedding_channels".to_owned(),
            });
        }
        config.trunk.check().map_err(AdapterError::File)?;
        let pairs = [
            ("in_channels", config.trunk.in_channels, base.out_width()),
            (
                "joint_attention_dim",
                config.trunk.joint_attention_dim,
                base.joint_attention_dim,
            ),
            (
                "pooled_projection_dim",
                config.trunk.pooled_projection_dim,
                base.pooled_projection_dim,
            ),
            ("width", config.trunk.width(), base.width()),
        ];
        if let Some((what, found, expected)) =
            pairs.into_iter().find(|(_, found, expected)| found != expected)
        {
            return Err(AdapterError::Shape {
                tensor: what.to_owned(),
                found: vec![found],
                expected: expected.to_string(),
            });
        }
        let wanted = Requested {
            component: "controlnet",
            dtype,
            format: None,
            role_of: |_| QuantizeRole::AsStored,
        };
        let specs = whole(config.tensor_shapes());
        let checkpoint = Checkpoint::of_folder(&file.path).map_err(refused)?;
        let files = exact_component(&file.path, checkpoint, &specs, wanted, "a FLUX ControlNet");
        let open = OpenControlNet {
            name: file.name.clone(),
            component: format!("controlnet:{}", file.name),
            config,
        };
        Ok((open, files.map_err(refused)?))
    }

    /// Describes the ControlNet for display.
    pub(super) fn report(&self) -> AdapterReport {
        let blocks = self.config.trunk.num_layers + self.config.trunk.num_single_layers;
        AdapterReport {
            name: self.name.clone(),
            layers: [("transformer".to_owned(), blocks)].into(),
            ..AdapterReport::default()
        }
    }
}

impl ControlNetConfig {
    /// Names and shapes of all tensors.
    fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let width = self.trunk.width();
        let own = layout(&self.trunk)
            .into_iter()
            .map(|spec| (spec.name, spec.shape));
        let own = own.filter(|(name, _)| !name.starts_with("norm_out.") && !name.starts_with("proj_out."));
        let mut all: Vec<_> = own.collect();
        let mut linear = |name: String, inputs: usize| {
            all.push((format!("{name}.weight"), vec![width, inputs]));
            all.push((format!("{name}.bias"), vec![width]));
        };
        linear("controlnet_x_embedder".to_owned(), self.trunk.in_channels);
        for i in 0..self.trunk.num_layers {
            linear(format!("controlnet_blocks.{i}"), width);
        }
        for i in 0..self.trunk.num_single_layers {
            linear(format!("controlnet_single_blocks.{i}"), width);
        }
        if let Some(modes) = self.num_mode {
            all.push(("controlnet_mode_embedder.weight".to_owned(), vec![modes, width]));
        }
        all
    }

    /// Tokens of text to which the ControlNet attends, including the token of the mode.
    pub(super) fn text_tokens(&self, tokens: usize) -> usize {
        tokens + usize::from(self.num_mode.is_some())
    }

    /// Predicted activation bytes in addition to those of the transformer: the residual samples of its blocks, its modulations, and its own
    /// buffers.
    pub(super) fn scratch(&self, text: usize, picture: usize, steps: u32, dtype: DType) -> u64 {
        let (width, number) = (self.trunk.width(), dtype.size_in_bytes());
        let samples = (self.trunk.num_layers + self.trunk.num_single_layers + 1) * picture * width * number;
        let own =
            super::transformer::denoise_scratch(&self.trunk, self.text_tokens(text), picture, steps, dtype);
        samples as u64 + own
    }
}

/// A ControlNet over resident tensors.
pub(super) struct ControlNet {
    trunk: Trunk,
    control_in: Linear,
    double_out: Vec<Linear>,
    single_out: Vec<Linear>,
    /// `[modes, width]`.
    modes: Option<Tensor>,
}

impl ControlNet {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        config: &ControlNetConfig,
        tensors: &ComponentTensors,
    ) -> Result<ControlNet, MissingTensor> {
        let adapted = AdaptedTensors::from(tensors);
        let width = config.trunk.width();
        let linear = |name: String, inputs: usize| Linear::new(&adapted, &name, inputs, width);
        let double_out = 0..config.trunk.num_layers;
        let single_out = 0..config.trunk.num_single_layers;
        Ok(ControlNet {
            trunk: Trunk::new(&config.trunk, &adapted)?,
            control_in: linear("controlnet_x_embedder".to_owned(), config.trunk.in_channels)?,
            double_out: double_out
                .map(|i| linear(format!("controlnet_blocks.{i}"), width))
                .collect::<Result<_, _>>()?,
            single_out: single_out
                .map(|i| linear(format!("controlnet_single_blocks.{i}"), width))
                .collect::<Result<_, _>>()?,
            modes: config
                .num_mode
                .map(|modes| tensors.shaped("controlnet_mode_embedder.weight", &[modes, width]))
                .transpose()?,
        })
    }

    /// Prepares the steps of a request over a control picture's packed latent `[1, tokens, in_channels]`.
    ///
    /// # Errors
    /// When the mode of a union is missing or not one of its modes; errors of the device.
    pub(super) fn prepared(
        self,
        prompted: &Prompted<'_>,
        times: &[f32],
        control: Tensor,
        each: &ControlUse,
    ) -> Result<PreparedControl, StageError> {
        let mode = match &self.modes {
            None => None,
            Some(modes) => {
                let mode = each
                    .mode
                    .map(|mode| mode as usize)
                    .filter(|mode| *mode < modes.dims()[0]);
                let mode = mode.ok_or_else(|| {
                    let count = modes.dims()[0];
                    StageError::BadInput(format!("{} is a union of {count} modes: name one", each.name))
                })?;
                Some(modes.narrow(0, mode, 1)?.unsqueeze(0)?)
            }
        };
        // ControlNets do not see the reference picture of an edit.
        let prompted = Prompted {
            reference: None,
            ..*prompted
        };
        let (device, dtype) = (control.device().clone(), control.dtype());
        let vector = self.trunk.embedded(&prompted, times)?;
        let text = prompted.sequence.dim(1)? + usize::from(mode.is_some());
        let conditioning = self.trunk.condition(&prompted, &vector, mode)?;
        let picture = prompted.rows * prompted.columns;
        let out = self
            .double_out
            .iter()
            .chain(&self.single_out)
            .chain([&self.control_in]);
        let buffers = self.trunk.buffers((1, text, picture), out, (dtype, &device))?;
        let width = self.trunk.config.width();
        let sample = || Tensor::zeros((1, picture, width), dtype, &device);
        let samples = |count: usize| {
            (0..count)
                .map(|_| sample())
                .collect::<candle_core::Result<Vec<_>>>()
        };
        let embedded = sample()?;
        self.control_in
            .forward_into(&control, Epilogue::None, &embedded, buffers.scratch())?;
        Ok(PreparedControl {
            samples: Samples {
                double: samples(self.double_out.len())?,
                single: samples(self.single_out.len())?,
            },
            ones: Tensor::ones((1, width), dtype, &device)?,
            factor: (Tensor::ones((1, width), DType::F32, &Device::Cpu)? * f64::from(each.scale))?
                .to_dtype(dtype)?
                .to_device(&device)?,
            net: self,
            conditioning,
            buffers,
            embedded,
        })
    }
}

/// The residual samples of the blocks, `[1, tokens, width]` each.
struct Samples {
    double: Vec<Tensor>,
    single: Vec<Tensor>,
}

/// A ControlNet with everything that the steps of a request share.
pub(super) struct PreparedControl {
    net: ControlNet,
    conditioning: TrunkConditioning,
    buffers: Buffers,
    /// The control picture's latent, embedded.
    embedded: Tensor,
    samples: Samples,
    ones: Tensor,
    /// The scale, `[1, width]`.
    factor: Tensor,
}

impl PreparedControl {
    /// Computes the samples of a step at a latent.
    ///
    /// # Errors
    /// Errors of the device and of `go_on`.
    pub(super) fn compute(
        &self,
        latent: &Tensor,
        step: usize,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let (trunk, buffers) = (&self.net.trunk, &self.buffers);
        let picture = buffers.picture()?;
        trunk
            .picture_in
            .forward_into(latent, Epilogue::None, &picture.hidden, buffers.scratch())?;
        picture.add(&[(&self.embedded, &self.ones)])?;
        // The norm after the last block, whose result is not used.
        let nobody = Next {
            scale: self.ones.clone(),
            shift: self.ones.clone(),
            as_codes: false,
        };
        let whole = buffers.whole()?;
        let wanted = if trunk.config.num_single_layers == 0 {
            &picture
        } else {
            &whole
        };
        let mut collect = CollectSamples { control: self };
        trunk.run(
            buffers,
            &self.conditioning,
            step,
            (wanted, &nobody, None),
            &mut collect,
            go_on,
        )
    }
}

/// Collects the output of each block of a ControlNet.
struct CollectSamples<'a> {
    control: &'a PreparedControl,
}

impl BlockHook for CollectSamples<'_> {
    fn after_block(&mut self, block: BlockPlace, buffers: &Buffers) -> Result<(), StageError> {
        let (net, samples) = (&self.control.net, &self.control.samples);
        let (layer, sample) = match block {
            BlockPlace::Double(i) => (&net.double_out[i], &samples.double[i]),
            BlockPlace::Single(i) => (&net.single_out[i], &samples.single[i]),
        };
        let picture = buffers.picture()?;
        Ok(layer.forward_into(&picture.hidden, Epilogue::None, sample, buffers.scratch())?)
    }
}

/// The residuals that ControlNets add to the blocks of a transformer. Each sample goes to as many blocks in turn as
/// [`sample_of_block`] says.
pub(super) struct Controls<'a> {
    /// The ControlNets that act in this step.
    pub(super) active: Vec<&'a PreparedControl>,
    pub(super) double_blocks: usize,
    pub(super) single_blocks: usize,
}

impl BlockHook for Controls<'_> {
    fn added(&self, block: BlockPlace) -> Vec<Added<'_>> {
        let sample = |control: &&PreparedControl| -> Option<(usize, bool)> {
            let (samples, blocks, index) = match block {
                BlockPlace::Double(i) => (control.samples.double.len(), self.double_blocks, i),
                BlockPlace::Single(i) => (control.samples.single.len(), self.single_blocks, i),
            };
            Some((
                sample_of_block(index, blocks, samples)?,
                matches!(block, BlockPlace::Double(_)),
            ))
        };
        let all = self.active.iter().filter_map(|control| {
            let (index, is_double) = sample(control)?;
            let samples = match is_double {
                true => &control.samples.double,
                false => &control.samples.single,
            };
            Some((samples.get(index)?, &control.factor))
        });
        all.collect()
    }
}

/// The index of the sample, of `samples`, that block `block` of `blocks` takes: each sample goes to `blocks / samples` blocks
/// in turn, rounded up. `None` without samples. (`interval_control` of diffusers' `FluxTransformer2DModel`.)
fn sample_of_block(block: usize, blocks: usize, samples: usize) -> Option<usize> {
    (samples > 0).then(|| block / blocks.div_ceil(samples))
}

/// Whether a ControlNet acts in step `step` (from 0) of `steps`: the whole step is between its start and its end.
/// (`controlnet_keep` of diffusers' `FluxControlNetPipeline`.)
pub(super) fn acts_in(each: &ControlUse, step: usize, steps: usize) -> bool {
    let (step, steps) = (step as f64, steps.max(1) as f64);
    step / steps >= decimal(each.start) && (step + 1.0) / steps <= decimal(each.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_control_sample_is_added_to_consecutive_blocks() {
        let of = |blocks: usize, samples: usize| -> Vec<usize> {
            (0..blocks)
                .filter_map(|block| sample_of_block(block, blocks, samples))
                .collect()
        };
        assert_eq!(of(5, 2), [0, 0, 0, 1, 1]);
        assert_eq!(of(7, 3), [0, 0, 0, 1, 1, 1, 2]);
        assert_eq!(of(19, 5)[15..], [3, 4, 4, 4]);
        // The last of six samples is not used.
        assert_eq!(of(19, 6).into_iter().max(), Some(4));
        assert!(of(4, 0).is_empty());
    }

    #[test]
    fn a_control_net_acts_in_whole_steps_between_its_bounds() {
        let acts = |start: f32, end: f32, steps: usize| -> Vec<bool> {
            let image = crate::InitImage {
                width: 16,
                height: 16,
                rgb: bytes::Bytes::new(),
            };
            let each = ControlUse {
                name: String::new(),
                image,
                scale: 1.0,
                start,
                end,
                mode: None,
            };
            (0..steps).map(|step| acts_in(&each, step, steps)).collect()
        };
        assert_eq!(acts(0.0, 0.6, 4), [true, true, false, false]);
        assert_eq!(acts(0.2, 0.6, 5), [false, true, true, false, false]);
        assert_eq!(acts(0.0, 1.0, 3), [true; 3]);
    }
}

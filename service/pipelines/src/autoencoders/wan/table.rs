//! The layers of either half, under their names in diffusers.

use super::arithmetic::{Blocks, Outcome};
use super::config::WanVaeConfig;
use super::layers::{Attention, Causal, OfPositions, Resnet};
use super::resample::{Enlarge, Halve};

/// A layer, with whatever its source gives for its tensors.
#[derive(Clone, Debug)]
pub(super) enum Layer<L, N> {
    OfPositions(OfPositions<L>),
    Causal(Causal<L, N>),
    Resnet(Resnet<L, N>),
    Attention(Attention<L, N>),
    Enlarge(Enlarge<L>),
    Halve(Halve<L>),
    /// Keeps its map for a later layer, averaged over blocks.
    Keep(Blocks),
    /// Adds the map that the layer of this index kept.
    Add {
        kept_by: usize,
    },
    /// Adds it with positions repeated.
    AddRepeated {
        kept_by: usize,
        blocks: Blocks,
    },
}

/// Where the tensors of layers come from.
pub(super) trait Source {
    type Layer;
    type Norm;
    /// A weight of this shape, and a bias with a number per output.
    fn layer(&mut self, name: &str, shape: &[usize]) -> Outcome<Self::Layer>;
    /// A weight of this shape, `[outputs, inputs, frames, rows, columns]`, of which the last frame is used.
    fn of_last_frame(&mut self, name: &str, shape: &[usize; 5]) -> Outcome<Self::Layer>;
    /// The weight of a norm, a `gamma` of this shape.
    fn norm(&mut self, name: &str, shape: &[usize]) -> Outcome<Self::Norm>;
}

/// The layers of a half.
pub(super) type Layers<S> = Vec<Layer<<S as Source>::Layer, <S as Source>::Norm>>;

struct Building<'a, S: Source> {
    source: &'a mut S,
    /// Whether layers see one frame.
    of_pictures: bool,
    list: Layers<S>,
}

/// The layers from frames to the moments of a latent.
pub(super) fn encoder<S: Source>(config: &WanVaeConfig, source: &mut S) -> Outcome<Layers<S>> {
    let mut half = Building {
        source,
        of_pictures: config.is_of_pictures,
        list: Vec::new(),
    };
    let moments = 2 * config.z_dim;
    let mut channels = config.base_dim;
    half.causal("encoder.conv_in", (config.in_channels, channels))?;
    let levels = config.dim_mult.len();
    let mut flat = 0;
    for level in 0..levels {
        let width = config.base_dim * config.dim_mult[level];
        let halves = level + 1 < levels;
        let in_time = halves && config.temperal_downsample[level];
        let kept_by = half.list.len();
        if config.is_residual {
            half.list.push(Layer::Keep(Blocks {
                frames: 1 + usize::from(in_time),
                sides: 1 + usize::from(halves),
                outputs: width,
            }));
        }
        for block in 0..config.num_res_blocks {
            let name = match config.is_residual {
                true => format!("encoder.down_blocks.{level}.resnets.{block}"),
                false => format!("encoder.down_blocks.{flat}"),
            };
            flat += 1;
            half.resnet(&name, (channels, width))?;
            channels = width;
        }
        if halves {
            let name = match config.is_residual {
                true => format!("encoder.down_blocks.{level}.downsampler"),
                false => format!("encoder.down_blocks.{flat}"),
            };
            flat += 1;
            half.halve(&name, channels, in_time)?;
        }
        if config.is_residual {
            half.list.push(Layer::Add { kept_by });
        }
    }
    half.middle("encoder.mid_block", channels)?;
    half.last("encoder", (channels, moments))?;
    half.of_positions("quant_conv", moments)?;
    Ok(half.list)
}

/// The layers from a latent to frames.
pub(super) fn decoder<S: Source>(config: &WanVaeConfig, source: &mut S) -> Outcome<Layers<S>> {
    let mut half = Building {
        source,
        of_pictures: config.is_of_pictures,
        list: Vec::new(),
    };
    half.of_positions("post_quant_conv", config.z_dim)?;
    let levels = config.dim_mult.len();
    let base = config.decoder_base();
    let mut channels = base * config.dim_mult[levels - 1];
    half.causal("decoder.conv_in", (config.z_dim, channels))?;
    half.middle("decoder.mid_block", channels)?;
    for level in 0..levels {
        let name = format!("decoder.up_blocks.{level}");
        let width = base * config.dim_mult[levels - 1 - level];
        let enlarges = level + 1 < levels;
        let in_time = enlarges && config.temperal_downsample[levels - 2 - level];
        let kept_by = half.list.len();
        if config.is_residual && enlarges {
            let outputs = channels;
            half.list.push(Layer::Keep(Blocks {
                frames: 1,
                sides: 1,
                outputs,
            }));
        }
        for block in 0..=config.num_res_blocks {
            half.resnet(&format!("{name}.resnets.{block}"), (channels, width))?;
            channels = width;
        }
        if !enlarges {
            continue;
        }
        if config.is_residual {
            half.enlarge(&format!("{name}.upsampler"), (width, width), in_time)?;
            let blocks = Blocks {
                frames: 1 + usize::from(in_time),
                sides: 2,
                outputs: width,
            };
            half.list.push(Layer::AddRepeated { kept_by, blocks });
        } else {
            channels = width / 2;
            half.enlarge(&format!("{name}.upsamplers.0"), (width, channels), in_time)?;
        }
    }
    half.last("decoder", (channels, config.out_channels))?;
    Ok(half.list)
}

impl<S: Source> Building<'_, S> {
    fn convolution(
        &mut self,
        name: &str,
        norm: Option<S::Norm>,
        (inputs, outputs): (usize, usize),
    ) -> Outcome<Causal<S::Layer, S::Norm>> {
        let shape = [outputs, inputs, 3, 3, 3];
        Ok(Causal {
            norm,
            layer: match self.of_pictures {
                true => self.source.of_last_frame(name, &shape)?,
                false => self.source.layer(name, &shape)?,
            },
            outputs,
            in_time: !self.of_pictures,
        })
    }

    fn norm(&mut self, name: &str, channels: usize) -> Outcome<S::Norm> {
        self.source.norm(name, &[channels, 1, 1, 1])
    }

    fn causal(&mut self, name: &str, channels: (usize, usize)) -> Outcome<()> {
        let layer = self.convolution(name, None, channels)?;
        self.list.push(Layer::Causal(layer));
        Ok(())
    }

    /// Norm, SiLU and a convolution: the last layers of a half.
    fn last(&mut self, half: &str, channels: (usize, usize)) -> Outcome<()> {
        let norm = self.norm(&format!("{half}.norm_out"), channels.0)?;
        let layer = self.convolution(&format!("{half}.conv_out"), Some(norm), channels)?;
        self.list.push(Layer::Causal(layer));
        Ok(())
    }

    fn single(
        &mut self,
        name: &str,
        (inputs, outputs): (usize, usize),
        axes: usize,
    ) -> Outcome<OfPositions<S::Layer>> {
        let mut shape = vec![outputs, inputs];
        shape.resize(2 + axes, 1);
        let layer = self.source.layer(name, &shape)?;
        Ok(OfPositions { layer, outputs })
    }

    fn of_positions(&mut self, name: &str, channels: usize) -> Outcome<()> {
        let layer = self.single(name, (channels, channels), 3)?;
        self.list.push(Layer::OfPositions(layer));
        Ok(())
    }

    fn resnet(&mut self, name: &str, (from, to): (usize, usize)) -> Outcome<()> {
        let norm = self.norm(&format!("{name}.norm1"), from)?;
        let first = self.convolution(&format!("{name}.conv1"), Some(norm), (from, to))?;
        let norm = self.norm(&format!("{name}.norm2"), to)?;
        let second = self.convolution(&format!("{name}.conv2"), Some(norm), (to, to))?;
        let shortcut = match from == to {
            true => None,
            false => Some(self.single(&format!("{name}.conv_shortcut"), (from, to), 3)?),
        };
        self.list.push(Layer::Resnet(Resnet {
            first,
            second,
            shortcut,
        }));
        Ok(())
    }

    /// Two residual blocks with attention between them.
    fn middle(&mut self, name: &str, channels: usize) -> Outcome<()> {
        self.resnet(&format!("{name}.resnets.0"), (channels, channels))?;
        let attention = format!("{name}.attentions.0");
        let attention = Attention {
            norm: self
                .source
                .norm(&format!("{attention}.norm"), &[channels, 1, 1])?,
            project: self.single(&format!("{attention}.to_qkv"), (channels, 3 * channels), 2)?,
            out: self
                .single(&format!("{attention}.proj"), (channels, channels), 2)?
                .layer,
        };
        self.list.push(Layer::Attention(attention));
        self.resnet(&format!("{name}.resnets.1"), (channels, channels))
    }

    fn in_time(&mut self, name: &str, channels: (usize, usize), is_there: bool) -> Outcome<Option<S::Layer>> {
        let (inputs, outputs) = channels;
        match is_there && !self.of_pictures {
            true => {
                let name = format!("{name}.time_conv");
                self.source.layer(&name, &[outputs, inputs, 3, 1, 1]).map(Some)
            }
            false => Ok(None),
        }
    }

    fn enlarge(&mut self, name: &str, (from, to): (usize, usize), in_time: bool) -> Outcome<()> {
        let time = self.in_time(name, (from, 2 * from), in_time)?;
        let space = self
            .source
            .layer(&format!("{name}.resample.1"), &[to, from, 3, 3])?;
        self.list.push(Layer::Enlarge(Enlarge {
            time,
            space,
            outputs: to,
        }));
        Ok(())
    }

    fn halve(&mut self, name: &str, channels: usize, in_time: bool) -> Outcome<()> {
        let space = self
            .source
            .layer(&format!("{name}.resample.1"), &[channels, channels, 3, 3])?;
        let time = self.in_time(name, (channels, channels), in_time)?;
        self.list.push(Layer::Halve(Halve { space, time }));
        Ok(())
    }
}

/// Names and shapes, without tensors.
struct List(Vec<(String, Vec<usize>)>);

impl Source for List {
    type Layer = ();
    type Norm = ();

    fn layer(&mut self, name: &str, shape: &[usize]) -> Outcome<()> {
        self.0.push((format!("{name}.weight"), shape.to_vec()));
        self.0.push((format!("{name}.bias"), shape[..1].to_vec()));
        Ok(())
    }

    fn of_last_frame(&mut self, name: &str, shape: &[usize; 5]) -> Outcome<()> {
        self.layer(name, shape)
    }

    fn norm(&mut self, name: &str, shape: &[usize]) -> Outcome<()> {
        self.0.push((format!("{name}.gamma"), shape.to_vec()));
        Ok(())
    }
}

impl WanVaeConfig {
    /// Names and shapes of all tensors of this configuration, which was checked.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut list = List(Vec::new());
        // A list takes all names.
        let _ = encoder(self, &mut list).and_then(|_| decoder(self, &mut list));
        list.0
    }
}

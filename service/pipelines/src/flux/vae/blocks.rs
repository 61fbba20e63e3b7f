//! The blocks that the encoder and the decoder are made of, over maps `[1, c, h, w]`.

use candle_core::{D, DType, Result, Tensor};
use gpu::{ComponentTensors, Weight};

use super::conv::{Convolution, Padding, Reading, in_full};
use super::norm::{Affine, GroupNorm};
use crate::family::StageError;

/// The most that one chunk of the attention's scores may take, in f32.
pub(super) const MOST_SCORES_BYTES: usize = 32 << 20;

/// How a map is walked through: in how many rows at a time, and whether anybody still wants it.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    pub(super) latent_height: usize,
    /// Rows of a strip, counted at the latent's resolution.
    pub(super) latent_rows: usize,
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

impl Walk<'_> {
    /// Rows of a strip of a map of this height.
    fn rows(&self, height: usize) -> usize {
        self.latent_rows
            .saturating_mul(height.div_ceil(self.latent_height))
            .clamp(1, height)
    }

    pub(super) fn go_on(&self) -> std::result::Result<(), StageError> {
        if (self.cancelled)() {
            Err(StageError::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// Reads the tensors of one layer.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) tensors: &'a ComponentTensors,
    pub(super) dtype: DType,
    pub(super) groups: usize,
}

impl Source<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> std::result::Result<Tensor, StageError> {
        let tensor = self.tensors.shaped(name, shape).map_err(missing)?;
        Ok(tensor.to_dtype(self.dtype)?)
    }

    /// A weight, in the dtype of maps where it is in full precision.
    fn weight(&self, name: &str, shape: &[usize]) -> std::result::Result<Weight, StageError> {
        match self.tensors.shaped_weight(name, shape).map_err(missing)? {
            Weight::Full(tensor) => Ok(Weight::Full(tensor.to_dtype(self.dtype)?)),
            quantized @ Weight::Quantized(_) => Ok(quantized),
        }
    }

    /// A convolution of a square kernel.
    pub(super) fn convolution(
        &self,
        name: &str,
        (in_channels, out_channels): (usize, usize),
        kernel: usize,
        stride: usize,
    ) -> std::result::Result<Convolution, StageError> {
        let shape = [out_channels, in_channels, kernel, kernel];
        let weight = self.weight(&format!("{name}.weight"), &shape)?;
        let bias = self.tensor(&format!("{name}.bias"), &[out_channels])?;
        Ok(Convolution::new(weight, bias, stride)?)
    }

    pub(super) fn norm(&self, name: &str, channels: usize) -> std::result::Result<GroupNorm, StageError> {
        let weight = self.tensor(&format!("{name}.weight"), &[channels])?;
        let bias = self.tensor(&format!("{name}.bias"), &[channels])?;
        Ok(GroupNorm::new(weight, bias, self.groups)?)
    }

    /// A linear layer `[c, c]`, which BFL's checkpoints keep as a 1x1 convolution `[c, c, 1, 1]`.
    fn square(&self, name: &str, channels: usize) -> std::result::Result<Square, StageError> {
        let weight = format!("{name}.weight");
        let found = self.tensors.weight(&weight);
        let as_convolution = found.is_ok_and(|weight| weight.dims().len() == 4);
        let shape: &[usize] = if as_convolution {
            &[channels, channels, 1, 1]
        } else {
            &[channels, channels]
        };
        let weight = self.weight(&weight, shape)?;
        let bias = self.tensor(&format!("{name}.bias"), &[channels])?;
        Ok(Square {
            weight,
            bias: bias.reshape((channels, 1))?,
        })
    }
}

fn missing(missing: gpu::MissingTensor) -> StageError {
    StageError::Missing {
        component: "vae".to_owned(),
        missing,
    }
}

/// A linear layer of as many outputs as inputs over columns `[c, n]`.
#[derive(Clone, Debug)]
struct Square {
    /// `[c, c]` or `[c, c, 1, 1]`.
    weight: Weight,
    /// `[c, 1]`.
    bias: Tensor,
}

impl Square {
    fn forward(&self, columns: &Tensor) -> Result<Tensor> {
        let channels = self.bias.dim(0)?;
        let weight = in_full(&self.weight, columns.dtype())?.reshape((channels, channels))?;
        weight.matmul(columns)?.broadcast_add(&self.bias)
    }
}

/// Where the outputs of a convolution go.
pub(super) enum Destination<'a> {
    /// A map of their own.
    New,
    /// Over a map that this layer is the last to read: rows are written once the strip that reads them again
    /// has been read.
    Over(&'a Tensor),
}

/// Convolves a map strip by strip. `finish` may add to each strip of outputs, given its first row.
pub(super) fn convolve(
    map: &Tensor,
    reading: Reading<'_>,
    convolution: &Convolution,
    destination: Destination<'_>,
    walk: Walk<'_>,
    finish: &dyn Fn(usize, Tensor) -> Result<Tensor>,
) -> std::result::Result<Tensor, StageError> {
    let (_, _, map_height, map_width) = map.dims4()?;
    let padding = reading.padding.before + reading.padding.after;
    let padded_height = reading.size(map_height) + padding;
    let one_row = convolution.rows_in(1);
    let height = (padded_height - one_row) / convolution.first_row_in(1) + 1;
    let width = (reading.size(map_width) + padding - one_row) / convolution.first_row_in(1) + 1;
    let rows = walk.rows(height);
    let convolve_strip = |first: usize, count: usize, before_convolving: &mut dyn FnMut() -> Result<()>| {
        let strip = reading.strip(map, convolution.first_row_in(first), convolution.rows_in(count))?;
        before_convolving()?;
        let out = convolution.forward(&strip)?;
        drop(strip);
        finish(first, out)
    };
    walk.go_on()?;
    if rows >= height {
        return Ok(convolve_strip(0, height, &mut || Ok(()))?);
    }
    let out = match destination {
        Destination::New => {
            let shape = (1, convolution.out_channels(), height, width);
            Tensor::zeros(shape, map.dtype(), map.device())?
        }
        Destination::Over(map) => map.clone(),
    };
    let mut unwritten: Option<(usize, Tensor)> = None;
    for first in (0..height).step_by(rows) {
        walk.go_on()?;
        let mut write = || match unwritten.take() {
            Some((row, strip)) => out.slice_set(&strip, 2, row),
            None => Ok(()),
        };
        let strip = convolve_strip(first, rows.min(height - first), &mut write)?;
        unwritten = Some((first, strip.contiguous()?));
    }
    if let Some((row, strip)) = unwritten {
        out.slice_set(&strip, 2, row)?;
    }
    Ok(out)
}

/// A convolution as it stands, of an even size or padded around.
pub(super) fn plain(
    map: &Tensor,
    convolution: &Convolution,
    padding: Padding,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let reading = Reading {
        normed: None,
        enlarged: false,
        padding,
    };
    convolve(map, reading, convolution, Destination::New, walk, &|_, strip| {
        Ok(strip)
    })
}

/// Nearest-neighbour enlargement by two and a convolution: `Upsample2D`.
pub(super) fn enlarge(
    map: &Tensor,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let reading = Reading {
        normed: None,
        enlarged: true,
        padding: Padding::AROUND,
    };
    convolve(map, reading, convolution, Destination::New, walk, &|_, strip| {
        Ok(strip)
    })
}

/// Group norm, SiLU and a 3x3 convolution.
pub(super) fn norm_and_convolve(
    map: &Tensor,
    norm: &GroupNorm,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let affine = norm.measure(map)?;
    convolve(
        map,
        activated(&affine),
        convolution,
        Destination::New,
        walk,
        &|_, strip| Ok(strip),
    )
}

fn activated(affine: &Affine) -> Reading<'_> {
    Reading {
        normed: Some(affine),
        enlarged: false,
        padding: Padding::AROUND,
    }
}

/// `ResnetBlock2D` without a time embedding.
#[derive(Clone, Debug)]
pub(super) struct Resnet {
    norm1: GroupNorm,
    conv1: Convolution,
    norm2: GroupNorm,
    conv2: Convolution,
    /// Where the number of channels changes.
    shortcut: Option<Convolution>,
}

impl Resnet {
    pub(super) fn new(
        source: Source<'_>,
        name: &str,
        (from, to): (usize, usize),
    ) -> std::result::Result<Resnet, StageError> {
        Ok(Resnet {
            norm1: source.norm(&format!("{name}.norm1"), from)?,
            conv1: source.convolution(&format!("{name}.conv1"), (from, to), 3, 1)?,
            norm2: source.norm(&format!("{name}.norm2"), to)?,
            conv2: source.convolution(&format!("{name}.conv2"), (to, to), 3, 1)?,
            shortcut: match from == to {
                true => None,
                false => Some(source.convolution(&format!("{name}.conv_shortcut"), (from, to), 1, 1)?),
            },
        })
    }

    /// Consumes `map`: in strips, the result is written over it, or over the map between the two convolutions
    /// where the number of channels changes. At no time are there more than two maps.
    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> std::result::Result<Tensor, StageError> {
        let affine = self.norm1.measure(&map)?;
        let inner = convolve(
            &map,
            activated(&affine),
            &self.conv1,
            Destination::New,
            walk,
            &|_, strip| Ok(strip),
        )?;
        let affine = self.norm2.measure(&inner)?;
        let Some(shortcut) = &self.shortcut else {
            let add = |first: usize, strip: Tensor| map.narrow(2, first, strip.dim(2)?)? + strip;
            return convolve(
                &inner,
                activated(&affine),
                &self.conv2,
                Destination::Over(&map),
                walk,
                &add,
            );
        };
        let unread = Reading {
            normed: None,
            enlarged: false,
            padding: Padding::NONE,
        };
        let add = |first: usize, strip: Tensor| {
            shortcut.forward(&unread.strip(&map, first, strip.dim(2)?)?)? + strip
        };
        convolve(
            &inner,
            activated(&affine),
            &self.conv2,
            Destination::Over(&inner),
            walk,
            &add,
        )
    }
}

/// `Attention` of one head over all cells of a map. Vectors are columns `[c, cells]` throughout, so that
/// nothing is transposed.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    norm: GroupNorm,
    to_q: Square,
    to_k: Square,
    to_v: Square,
    to_out: Square,
}

impl Attention {
    fn new(source: Source<'_>, name: &str, channels: usize) -> std::result::Result<Attention, StageError> {
        Ok(Attention {
            norm: source.norm(&format!("{name}.group_norm"), channels)?,
            to_q: source.square(&format!("{name}.to_q"), channels)?,
            to_k: source.square(&format!("{name}.to_k"), channels)?,
            to_v: source.square(&format!("{name}.to_v"), channels)?,
            to_out: source.square(&format!("{name}.to_out.0"), channels)?,
        })
    }

    /// Every query sees the whole map; queries are taken some at a time, which changes nothing but the memory
    /// that their scores need.
    fn forward(&self, map: &Tensor, walk: Walk<'_>) -> std::result::Result<Tensor, StageError> {
        let (_, channels, height, width) = map.dims4()?;
        let cells = height * width;
        let normed = self
            .norm
            .measure(map)?
            .apply(map, 0)?
            .to_dtype(map.dtype())?
            .reshape((channels, cells))?;
        let scale = 1.0 / (channels as f64).sqrt();
        let queries = (self.to_q.forward(&normed)?.to_dtype(DType::F32)? * scale)?;
        let keys = self.to_k.forward(&normed)?.to_dtype(DType::F32)?;
        let values = self.to_v.forward(&normed)?.to_dtype(DType::F32)?;
        drop(normed);
        let chunk = queries_at_a_time(cells);
        let mut seen = Vec::with_capacity(cells.div_ceil(chunk));
        for first in (0..cells).step_by(chunk) {
            walk.go_on()?;
            let queries = queries.narrow(1, first, chunk.min(cells - first))?.contiguous()?;
            seen.push(attend(&queries, &keys, &values)?.to_dtype(map.dtype())?);
        }
        let seen = Tensor::cat(&seen, 1)?;
        Ok((self.to_out.forward(&seen)?.reshape(map.shape())? + map)?)
    }
}

/// Queries whose scores against all cells are held at a time.
pub(super) fn queries_at_a_time(cells: usize) -> usize {
    (MOST_SCORES_BYTES / (4 * cells).max(1)).clamp(1, cells.max(1))
}

/// Softmax attention in f32: queries `[c, n]`, keys and values `[c, cells]`; `[c, n]`.
fn attend(queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
    let scores = queries.t()?.matmul(keys)?;
    let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    let totals = scores.sum_keepdim(D::Minus1)?;
    values.matmul(&scores.t()?)?.broadcast_div(&totals.t()?)
}

/// `UNetMidBlock2D`.
#[derive(Clone, Debug)]
pub(super) struct Middle {
    first: Resnet,
    attention: Option<Attention>,
    second: Resnet,
}

impl Middle {
    pub(super) fn new(
        source: Source<'_>,
        name: &str,
        channels: usize,
        with_attention: bool,
    ) -> std::result::Result<Middle, StageError> {
        Ok(Middle {
            first: Resnet::new(source, &format!("{name}.resnets.0"), (channels, channels))?,
            attention: match with_attention {
                true => Some(Attention::new(source, &format!("{name}.attentions.0"), channels)?),
                false => None,
            },
            second: Resnet::new(source, &format!("{name}.resnets.1"), (channels, channels))?,
        })
    }

    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> std::result::Result<Tensor, StageError> {
        let mut map = self.first.forward(map, walk)?;
        if let Some(attention) = &self.attention {
            map = attention.forward(&map, walk)?;
        }
        self.second.forward(map, walk)
    }
}

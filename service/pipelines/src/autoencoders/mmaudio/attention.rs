//! The attention in the middle of the decoder: one head of all channels, over all positions.

use candle_core::{DType, Tensor};
use ops::Mask;

use super::layers::{Outcome, Source, Wide, normalised, parts_of_sum};
use super::table::{Convolution, of_attention};

/// `AttnBlock1D` of the authors.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    /// Of all queries, then all keys, then all values.
    qkv: Wide,
    out: Wide,
}

impl Attention {
    pub(super) fn new(source: Source<'_>, name: &str, channels: usize) -> Outcome<Attention> {
        let [qkv, out] = of_attention(name, channels);
        Ok(Attention {
            qkv: source.of_weight(&qkv, &separated(source, &qkv)?, 1.0)?,
            out: source.convolution(&out, parts_of_sum().1)?,
        })
    }

    /// Attends in f32: queries and keys have unit length for each number, so scores are large.
    pub(super) fn forward(&self, x: &Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        let (rows, channels) = x.dims2()?;
        let seen = {
            let all = self.qkv.run(x, cancelled)?;
            let part = |index: usize| -> Outcome<Tensor> {
                let part = normalised(&all.narrow(1, index * channels, channels)?, false)?;
                Ok(part.reshape((1, rows, 1, channels))?)
            };
            let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
            drop(all);
            let seen = ops::blank(queries.dims(), DType::F32, x.device())?;
            let scale = 1.0 / (channels as f64).sqrt();
            ops::attention(&queries, &keys, &values, scale, Mask::None, &seen)?;
            seen.reshape((rows, channels))?
        };
        let sum = self.out.run(&seen, cancelled)?;
        ops::add_scaled(x, parts_of_sum().0, &sum)?;
        Ok(sum)
    }
}

/// The weight of queries, keys and values with the rows of each together. Those of a file lie side by side for each channel.
fn separated(source: Source<'_>, of: &Convolution) -> Outcome<Tensor> {
    let weight = source.weight(of)?;
    let (inputs, outputs) = of.channels;
    let channels = outputs / 3;
    let of_channels = weight.reshape((channels, 3, inputs))?;
    let separated = ops::blank(weight.dims(), weight.dtype(), weight.device())?;
    for part in 0..3 {
        let to = separated.narrow(0, part * channels, channels)?.squeeze(2)?;
        ops::copy_rows(&of_channels.narrow(1, part, 1)?.squeeze(1)?, &to)?;
    }
    Ok(separated)
}

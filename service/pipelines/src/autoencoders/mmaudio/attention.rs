//! The attention in the middle of the decoder: one head of all channels, over all positions.

use candle_core::Tensor;

use super::layers::{Outcome, Source, Wide, normalised, parts_of_sum};
use super::table::of_attention;

/// `AttnBlock1D` of the authors.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    qkv: Wide,
    out: Wide,
}

impl Attention {
    pub(super) fn new(source: Source<'_>, name: &str, channels: usize) -> Outcome<Attention> {
        let [qkv, out] = of_attention(name, channels);
        Ok(Attention {
            qkv: source.convolution(&qkv, 1.0)?,
            out: source.convolution(&out, parts_of_sum().1)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        let (rows, channels) = x.dims2()?;
        let seen = {
            // A query, a key and a value lie side by side for each channel.
            let all = self.qkv.run(x, cancelled)?.reshape((rows, channels, 3))?;
            let part = |index: usize| -> Outcome<Tensor> {
                Ok(normalised(&all.narrow(2, index, 1)?.squeeze(2)?.contiguous()?)?)
            };
            let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
            drop(all);
            let scores = queries
                .affine(1.0 / (channels as f64).sqrt(), 0.0)?
                .matmul(&keys.t()?)?;
            candle_nn::ops::softmax_last_dim(&scores)?.matmul(&values)?
        };
        let branch = self.out.run(&seen, cancelled)?;
        Ok((x.affine(parts_of_sum().0, 0.0)? + branch)?)
    }
}

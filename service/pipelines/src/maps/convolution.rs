//! A convolution with its weight and its bias.

use std::sync::{Arc, OnceLock};

use candle_core::{D, DType, Result, Tensor};
use gpu::Weight;
use ops::{Filter, Onto, Steps};

/// A convolution with its bias.
#[derive(Clone, Debug)]
pub(crate) struct Convolution {
    /// `[out, in, rows, columns]`, `[out, in, frames, rows, columns]` or `[out, in]`. Converted to a [`Filter`], and
    /// dequantized, at every run, unless the filter is kept: that takes a card microseconds, and avoids a second copy of all weights.
    weight: Weight,
    /// `[out]`.
    pub(crate) bias: Tensor,
    /// Whether of its frames the last is taken alone.
    of_last_frame: bool,
    /// The filter, where it is made once.
    kept: Option<Arc<OnceLock<Filter>>>,
}

impl Convolution {
    /// A convolution with a weight and a bias `[out]`.
    ///
    /// # Errors
    /// When the weight has another rank.
    pub(crate) fn new(weight: Weight, bias: Tensor) -> Result<Convolution> {
        if !matches!(weight.dims().len(), 2 | 4 | 5) {
            candle_core::bail!("a convolution with a weight of shape {:?}", weight.dims())
        }
        Ok(Convolution {
            weight,
            bias: bias.contiguous()?,
            of_last_frame: false,
            kept: None,
        })
    }

    /// The same convolution, whose filter is made at the first run and kept.
    pub(crate) fn keeping_filter(self) -> Convolution {
        Convolution {
            kept: Some(Arc::default()),
            ..self
        }
    }

    /// What a convolution of a frame and those before it does to the only frame of a picture.
    pub(crate) fn of_last_frame(self) -> Convolution {
        Convolution {
            of_last_frame: true,
            ..self
        }
    }

    /// Channels of the output.
    pub(crate) fn outputs(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or_default()
    }

    /// Whether the kernel has an axis of frames.
    pub(crate) fn has_frames(&self) -> bool {
        self.weight.dims().len() == 5
    }

    /// The filter for maps whose axes are in the order of the weight's: `[h, w, c]` or `[t, h, w, c]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn filter(&self, dtype: DType) -> Result<Filter> {
        if let Some(filter) = self.kept.as_ref().and_then(|kept| kept.get()) {
            return Ok(filter.clone());
        }
        let filter = match self.of_last_frame {
            true => Filter::last_frame(&self.weight, dtype),
            false => Filter::new(&self.weight, dtype),
        }?;
        if let Some(kept) = &self.kept {
            kept.get_or_init(|| filter.clone());
        }
        Ok(filter)
    }

    /// The filter for maps `[h, t, w, c]`, of a kernel with frames.
    ///
    /// # Errors
    /// When it has none; errors of the device.
    pub(crate) fn rows_first(&self, dtype: DType) -> Result<Filter> {
        Filter::rows_first(&self.weight, dtype)
    }

    /// A convolution of single positions, of a contiguous map `[.., in]` to `[.., out]`.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(crate) fn of_positions(&self, map: &Tensor, out: &Tensor, onto: Onto) -> Result<()> {
        let filter = Filter::new(&self.weight, map.dtype())?;
        let axes = self.weight.dims().len().max(3) - 2;
        let in_a_line = |map: &Tensor| {
            let channels = map.dim(D::Minus1)?;
            let mut shape = vec![map.elem_count() / channels.max(1)];
            shape.resize(axes, 1);
            shape.push(channels);
            map.reshape(shape)
        };
        let (map, out) = (in_a_line(map)?, in_a_line(out)?);
        ops::convolve(&map, &filter, Some(&self.bias), &Steps::EACH, &out, onto)
    }
}

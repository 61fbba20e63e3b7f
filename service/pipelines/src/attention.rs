//! Attention of tokens to each other, as a request asks for it.

use candle_core::{Result, Tensor};
use ops::{Mask, Planned};

/// How attention is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AttentionPrecision {
    #[default]
    Full,
    /// In e4m3, where the device has it ([`ops::attention_in_fp8`]).
    Fp8,
}

impl AttentionPrecision {
    /// What [`crate::Request::fp8_attention`] asks for.
    pub(crate) fn asked(request: &crate::Request) -> AttentionPrecision {
        match request.fp8_attention {
            true => AttentionPrecision::Fp8,
            false => AttentionPrecision::Full,
        }
    }

    /// Attention of all queries to all keys, `[b, n, h, d]` each, to `out`; scores are divided by the root of `d`. Queries, keys and
    /// values are not read afterwards: in e4m3 they are overwritten.
    ///
    /// # Errors
    /// When shapes do not match; errors of the device.
    pub(crate) fn attend(self, [q, k, v]: [&Tensor; 3], out: &Tensor) -> Result<()> {
        let scale = (q.dim(3)? as f64).powf(-0.5);
        match self {
            AttentionPrecision::Full => ops::attention(q, k, v, scale, Mask::None, out),
            AttentionPrecision::Fp8 => ops::attention_in_fp8(q, k, v, scale, out),
        }
    }

    /// A shape of such an attention, that of attention in full.
    pub(crate) fn planned(self, of_full: Planned) -> Planned {
        match (self, of_full) {
            (AttentionPrecision::Fp8, Planned::Attention(shape)) => {
                Planned::Attention(shape.in_fp8_if_possible())
            }
            (_, planned) => planned,
        }
    }
}

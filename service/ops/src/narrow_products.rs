//! Which quantized weights cards multiply in eight bits, with rows that are quantized too.

use std::sync::OnceLock;

use gpu::{GgufType, Rotation, W4A8Codes, WeightFormat};
use serde::{Deserialize, Serialize};

/// Which quantized weights cards with native fp8 products multiply in fp8, with rows of bf16 or f16. Others are
/// dequantized to the dtype of the rows.
///
/// Rows, and weights of other formats, are rounded to e4m3 with a scale a row: together an error of 0.037 of a product
/// (relative, L2; normally distributed numbers). A weight in four bits has a further error of 0.092, one in int8 of 0.009.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Products {
    /// No weight is multiplied in fp8.
    Never,
    /// Weights in fp8, and those of about four bits a number or fewer.
    #[default]
    Auto,
    /// Every quantized weight is multiplied in fp8.
    Always,
}

impl Fp8Products {
    /// Whether weights of a format are multiplied in fp8.
    #[must_use]
    pub fn takes(self, format: WeightFormat) -> bool {
        use GgufType::{IQ4NL, IQ4XS, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let is_coarse = match format {
            WeightFormat::Fp8(_)
            | WeightFormat::E5M2(_)
            | WeightFormat::BlockFp8
            | WeightFormat::Mxfp8(_) => true,
            WeightFormat::Nf4 | WeightFormat::Nf4Double | WeightFormat::Fp4 | WeightFormat::Fp4Double => true,
            WeightFormat::Nvfp4(..) | WeightFormat::Int4Groups { .. } | WeightFormat::Svdquant { .. } => true,
            WeightFormat::Gguf(Q2K | Q3K | Q4_0 | Q4_1 | Q4K | IQ4NL | IQ4XS | Mxfp4 | Nvfp4) => true,
            WeightFormat::Int8 | WeightFormat::Gguf(Q5_0 | Q5_1 | Q5K | Q6K | Q8_0) => false,
            // A group is turned back by threads side by side, which the kernel that makes codes of rows does not ensure.
            WeightFormat::Int8Scaled(_, rotation)
            | WeightFormat::Int4(rotation)
            | WeightFormat::W4A8 { rotation, .. }
                if rotation != Rotation::None =>
            {
                return false;
            }
            WeightFormat::Int8Scaled(..) | WeightFormat::Int8Groups { .. } => false,
            WeightFormat::W4A8 {
                codes: W4A8Codes::Six,
                ..
            } => false,
            WeightFormat::Int4(_) | WeightFormat::W4A8 { .. } => true,
        };
        match self {
            Fp8Products::Never => false,
            Fp8Products::Auto => is_coarse,
            Fp8Products::Always => true,
        }
    }
}

static FP8_PRODUCTS: OnceLock<Fp8Products> = OnceLock::new();

/// Sets [`Fp8Products`] for the process, before anything is predicted or computed. The first call counts; without one
/// it is [`Fp8Products::Auto`].
pub fn set_fp8_products(products: Fp8Products) {
    let _ = FP8_PRODUCTS.set(products);
}

/// Whether weights of this format are multiplied in fp8 where a card can.
#[must_use]
pub fn is_multiplied_in_fp8(format: WeightFormat) -> bool {
    FP8_PRODUCTS.get().copied().unwrap_or_default().takes(format)
}

/// Which quantized weights cards with tensor cores for int8 (compute capability 7.5 and later, but for 10.3, whose have a low rate)
/// multiply in int8, with rows of bf16 or f16. Others are dequantized.
///
/// Rows are rotated as the columns of the weight were and rounded to int8 with a scale a row: together an error of 0.012 of a product
/// (relative, L2), also where a few channels are far larger than the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Int8Products {
    /// No weight is multiplied in int8.
    Never,
    /// Weights in int8 whose columns were rotated.
    #[default]
    Auto,
}

impl Int8Products {
    /// The rotation of the columns of a weight in this format; `None` if no card multiplies it in int8.
    #[must_use]
    pub fn takes(self, format: WeightFormat) -> Option<Rotation> {
        match (self, format) {
            (Int8Products::Never, _) | (_, WeightFormat::Int8Scaled(_, Rotation::None)) => None,
            (Int8Products::Auto, WeightFormat::Int8Scaled(_, rotation)) => Some(rotation),
            (Int8Products::Auto, _) => None,
        }
    }
}

static INT8_PRODUCTS: OnceLock<Int8Products> = OnceLock::new();

/// Sets [`Int8Products`] for the process, before anything is predicted or computed. The first call counts; without one
/// it is [`Int8Products::Auto`].
pub fn set_int8_products(products: Int8Products) {
    let _ = INT8_PRODUCTS.set(products);
}

/// The rotation of rows for a weight of this format that a card may multiply in int8; `None` for others.
#[must_use]
pub fn int8_rotation(format: WeightFormat) -> Option<Rotation> {
    INT8_PRODUCTS.get().copied().unwrap_or_default().takes(format)
}

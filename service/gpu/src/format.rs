//! Memory layout of quantized weights. A quantized weight is plain bytes: scales first, then codes, in one allocation
//! of its component's pool. The bytes on the card and in a kept copy are the same; the bytes of a checkpoint that is
//! quantized already are taken over unchanged, piece after piece.
//!
//! A weight of any shape is treated as a matrix: the first dimension is its rows (output channels), all others
//! together its columns.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use residency::Bytes;
use serde::{Deserialize, Serialize};

mod packed;

pub use packed::{
    ColumnFactors, GroupNumbers, InputShift, Int4Order, SVDQUANT_FP4_GROUP, SVDQUANT_INT4_GROUP,
    SvdquantCodes, W4A8Codes, autoawq_nibble, svdquant_down, svdquant_fp4_scale, svdquant_nibble,
    svdquant_number, svdquant_up, tinychat_word,
};

/// Block size of nf4: numbers that share a scale.
pub const NF4_BLOCK: usize = 64;
/// Block size of the nested scales of nf4-double.
pub const NF4_NESTED_BLOCK: usize = 256;
/// Step of int8, 1/127, as bitsandbytes rounds it: a value is `code * absmax * INT8_STEP`.
pub const INT8_STEP: f32 = 7.874_016e-3;

/// Format of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightFormat {
    /// Signed bytes, and an absolute maximum in f32 for each row: `code * absmax * INT8_STEP`.
    Int8,
    /// Floats of 8 bits (1 sign, 4 exponent, 3 mantissa), with scales in f32: `code * scale`.
    Fp8(Fp8Scales),
    /// 4-bit indices into a table of 16 values, high nibble first, in blocks of [`NF4_BLOCK`] over the flattened
    /// weight, each with an absolute maximum in f32: `table[index] * absmax`. Source: QLoRA (Dettmers et al., 2023).
    Nf4,
    /// As [`WeightFormat::Nf4`], with the absolute maxima in 8 bits themselves, in blocks of [`NF4_NESTED_BLOCK`]:
    /// `absmax = nested_table[code] * nested_absmax + offset`.
    Nf4Double,
    /// Blocks of llama.cpp, along each row.
    Gguf(GgufType),
    /// As [`WeightFormat::Nf4`], with the table of bitsandbytes' fp4.
    Fp4,
    /// As [`WeightFormat::Nf4Double`], with the table of bitsandbytes' fp4.
    Fp4Double,
    /// Floats of 8 bits (1 sign, 5 exponent, 2 mantissa), with scales in f32: `code * scale`.
    E5M2(Fp8Scales),
    /// As [`WeightFormat::Fp8`], with a scale in f32 for each block of [`FP8_BLOCK`] rows and columns; the last blocks are
    /// cut. Source: DeepSeek-V3 (2024), `weight_scale_inv`.
    BlockFp8,
    /// Signed bytes with scales in f32 of a row or the tensor: `code * scale`, then rotated.
    Int8Scaled(Int8Scales, Rotation),
    /// Signed nibbles, the low one first, and a scale in f32 for each row: `code * scale`, then rotated
    /// (ComfyUI's `convrot_w4a4`).
    Int4(Rotation),
    /// Codes of four or six bits; a scale for each group of columns, and one in f32 for each row: `clamp(round(value(code) *
    /// group), ±127) * row`, then rotated (ComfyUI's `asym_w4a8_int8`).
    W4A8 {
        group: u8,
        codes: W4A8Codes,
        /// Type of the scales of groups.
        scales: W4A8Scales,
        rotation: Rotation,
    },
    /// Floats of 4 bits (1 sign, 2 exponent, 1 mantissa) in blocks of [`NVFP4_BLOCK`] columns with a scale in e4m3, and a scale
    /// in f32 of the tensor: `code * (block * tensor)`, then by the factors of columns.
    Nvfp4(Nvfp4Order, ColumnFactors),
    /// Floats in e4m3 in blocks of [`MXFP8_BLOCK`] columns, each with a power of two: `code * 2^(exponent - 127)`. Source: OCP
    /// Microscaling Formats 1.0 (2023).
    Mxfp8(ScaleOrder),
    /// Nibbles with a scale and a zero for each group of columns: AWQ (Lin et al., 2023) in the layouts of four programs.
    Int4Groups {
        order: Int4Order,
        /// Columns of a group.
        group: u16,
        /// Type of scales, and of zeros that are numbers.
        numbers: GroupNumbers,
    },
    /// Signed bytes with a scale and a zero (a signed byte) for each group of columns: `(code - zero) * scale` (torchao).
    Int8Groups {
        /// Columns of a group.
        group: u32,
        /// Type of scales.
        numbers: GroupNumbers,
    },
    /// Codes of four bits in the order of Nunchaku's kernels, multiplied by a factor for each column, and a low-rank product of
    /// bf16 that is added to them. Source: SVDQuant (Li et al., 2024).
    Svdquant {
        codes: SvdquantCodes,
        /// Rank of the product, a multiple of 16.
        rank: u16,
    },
}

/// Order of the scales of blocks of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleOrder {
    /// That of tensor cores ([`swizzled`]).
    TensorCores,
    /// Row by row.
    Rows,
}

/// Types of the scales of groups of [`WeightFormat::W4A8`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum W4A8Scales {
    E4M3,
    F32,
}

impl W4A8Scales {
    /// Bytes of a scale.
    pub fn width(self) -> usize {
        match self {
            W4A8Scales::E4M3 => 1,
            W4A8Scales::F32 => 4,
        }
    }
}

/// Sides of the blocks of [`WeightFormat::BlockFp8`].
pub const FP8_BLOCK: usize = 128;
/// Columns of a block of [`WeightFormat::Nvfp4`].
pub const NVFP4_BLOCK: usize = 16;
/// Columns of a block of [`WeightFormat::Mxfp8`].
pub const MXFP8_BLOCK: usize = 32;

/// The layouts of nvfp4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nvfp4Order {
    /// ComfyUI and Black Forest Labs: the high nibble first, scales in the order of tensor cores ([`swizzled`]).
    TensorCores,
    /// NVIDIA's ModelOpt, and torchao: the low nibble first, scales row by row.
    Rows,
    /// torchao with `is_swizzled_scales`: the low nibble first, scales in the order of tensor cores.
    LowFirst,
}

impl Nvfp4Order {
    /// Order of the scales of blocks.
    pub fn scales(self) -> ScaleOrder {
        match self {
            Nvfp4Order::TensorCores | Nvfp4Order::LowFirst => ScaleOrder::TensorCores,
            Nvfp4Order::Rows => ScaleOrder::Rows,
        }
    }
}

/// Granularity of the scales of an int8 weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Int8Scales {
    Tensor,
    Rows,
}

/// By what the columns of a row are multiplied, group by group, after its codes are scaled: the regular Hadamard matrix of this
/// size over its square root, which is its own inverse. The matrix of four is one everywhere but minus one on the second
/// diagonal, larger ones are its Kronecker powers. Source: ConvRot (2025), as ComfyUI applies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rotation {
    /// By nothing.
    None,
    By16,
    By64,
    By256,
}

impl Rotation {
    /// The rotation by groups of so many columns; `None` for other sizes.
    pub fn of(columns: usize) -> Option<Rotation> {
        [Rotation::By16, Rotation::By64, Rotation::By256]
            .into_iter()
            .find(|rotation| rotation.group() == columns)
    }

    /// The rotation by the largest groups that divide rows of so many columns.
    fn largest(columns: usize) -> Rotation {
        [Rotation::By256, Rotation::By64, Rotation::By16]
            .into_iter()
            .find(|rotation| columns.is_multiple_of(rotation.group()))
            .unwrap_or(Rotation::None)
    }

    /// Multiplies each group by the matrix over its square root, in one pass for each factor of four: every number becomes the
    /// sum of its four less twice the one opposite. Sums are of pairs of neighbours, as a card's lanes add them. The numbers are
    /// whole groups.
    pub fn turn(self, numbers: &mut [f32]) {
        let size = self.group();
        if size == 1 {
            return;
        }
        // The square root of a power of four is a power of two: exact.
        let factor = 1.0 / (size as f32).sqrt();
        for group in numbers.chunks_exact_mut(size) {
            let mut apart = 1;
            while apart < size {
                for first in (0..size).step_by(4 * apart) {
                    for at in first..first + apart {
                        let four = [0, 1, 2, 3].map(|place| group[at + place * apart]);
                        let sum = (four[0] + four[1]) + (four[2] + four[3]);
                        for place in 0..4 {
                            group[at + place * apart] = sum - 2.0 * four[3 - place];
                        }
                    }
                }
                apart *= 4;
            }
            group.iter_mut().for_each(|number| *number *= factor);
        }
    }

    /// Columns of a group, 1 without a rotation.
    pub fn group(self) -> usize {
        match self {
            Rotation::None => 1,
            Rotation::By16 => 16,
            Rotation::By64 => 64,
            Rotation::By256 => 256,
        }
    }
}

/// The place of the scale of a row and a block of columns in the order of tensor cores: tiles of 128 rows by four blocks. Each
/// row of tiles has `blocks` blocks, rounded up to whole tiles. Source: cuBLAS, "1D block scaling factors layout".
pub fn swizzled(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / 128 * blocks.div_ceil(4) + block / 4;
    tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
}

/// Granularity of the scales of an fp8 weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Scales {
    /// No scale: codes are values.
    None,
    /// One scale per tensor.
    Tensor,
    /// One scale per row.
    Rows,
}

impl ScaleOrder {
    /// Scales of so many rows of so many blocks, with padding.
    fn len(self, rows: usize, blocks: usize) -> usize {
        match self {
            ScaleOrder::TensorCores => rows.div_ceil(128) * blocks.div_ceil(4) * 512,
            ScaleOrder::Rows => rows * blocks,
        }
    }

    /// The place of the scale of a row and a block of columns, where a row has so many `blocks`.
    pub fn place(self, row: usize, block: usize, blocks: usize) -> usize {
        match self {
            ScaleOrder::TensorCores => swizzled(row, block, blocks),
            ScaleOrder::Rows => row * blocks + block,
        }
    }
}

/// Block types of llama.cpp. Source: the `gguf` Python package, `constants.py` and `quants.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum GgufType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    Mxfp4,
    Nvfp4,
}

/// A part of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightPart {
    /// nf4: 16 values in f32.
    Table,
    /// nf4-double: 256 values in f32.
    NestedTable,
    /// nf4-double: one f32.
    Offset,
    /// nf4-double: one f32 per [`NF4_NESTED_BLOCK`] blocks.
    NestedAbsmax,
    /// Scales, per block, group, row or tensor: f32 (u8 in nf4-double, 16 bits in some formats of groups).
    Scales,
    /// Zeros of groups: numbers of the type of the scales, signed bytes, or nibbles (AutoAWQ).
    Zeros,
    /// A factor in f32 for each column.
    ColumnFactors,
    /// The first factor of a low-rank product in bf16, of columns.
    LowRankDown,
    /// The second factor of a low-rank product in bf16, of rows.
    LowRankUp,
    /// Zero bytes, unread: they align codes after a single scale to 16 bytes.
    Padding,
    /// A byte for each block of columns: e4m3, or the exponent of a power of two. Four bytes in [`W4A8Scales::F32`].
    BlockScales,
    /// The codes, or the blocks of GGUF.
    Codes,
    /// A scale in f32 for each row of the weight as a whole, which a card makes when it first multiplies it, and keeps. Zero bytes
    /// before, as [`WeightPart::MadeFlag`] is.
    MadeScales,
    /// Whether a card has made the scales, in its first four bytes.
    MadeFlag,
}

impl GgufType {
    /// All types.
    pub const ALL: [GgufType; 14] = [
        GgufType::Q4_0,
        GgufType::Q4_1,
        GgufType::Q5_0,
        GgufType::Q5_1,
        GgufType::Q8_0,
        GgufType::Q2K,
        GgufType::Q3K,
        GgufType::Q4K,
        GgufType::Q5K,
        GgufType::Q6K,
        GgufType::IQ4NL,
        GgufType::IQ4XS,
        GgufType::Mxfp4,
        GgufType::Nvfp4,
    ];

    /// Block size in numbers and in bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            GgufType::Q4_0 => (32, 18),
            GgufType::Q4_1 => (32, 20),
            GgufType::Q5_0 => (32, 22),
            GgufType::Q5_1 => (32, 24),
            GgufType::Q8_0 => (32, 34),
            GgufType::Q2K => (256, 84),
            GgufType::Q3K => (256, 110),
            GgufType::Q4K => (256, 144),
            GgufType::Q5K => (256, 176),
            GgufType::Q6K => (256, 210),
            GgufType::IQ4NL => (32, 18),
            GgufType::IQ4XS => (256, 136),
            GgufType::Mxfp4 => (32, 17),
            GgufType::Nvfp4 => (64, 36),
        }
    }

    /// The type's name in llama.cpp: `Q4_K`.
    pub fn as_str(self) -> &'static str {
        match self {
            GgufType::Q4_0 => "Q4_0",
            GgufType::Q4_1 => "Q4_1",
            GgufType::Q5_0 => "Q5_0",
            GgufType::Q5_1 => "Q5_1",
            GgufType::Q8_0 => "Q8_0",
            GgufType::Q2K => "Q2_K",
            GgufType::Q3K => "Q3_K",
            GgufType::Q4K => "Q4_K",
            GgufType::Q5K => "Q5_K",
            GgufType::Q6K => "Q6_K",
            GgufType::IQ4NL => "IQ4_NL",
            GgufType::IQ4XS => "IQ4_XS",
            GgufType::Mxfp4 => "MXFP4",
            GgufType::Nvfp4 => "NVFP4",
        }
    }
}

impl WeightFormat {
    /// Formats to which a full-precision checkpoint can be quantized at load, the most accurate first.
    pub const MADE_AT_LOAD: [WeightFormat; 5] = [
        WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::By256),
        WeightFormat::Int8,
        WeightFormat::Fp8(Fp8Scales::Rows),
        WeightFormat::Nf4,
        WeightFormat::Nf4Double,
    ];

    /// The parts of a weight in order, with their byte ranges. Parts of wider numbers come first, so that each is
    /// aligned if the whole is. Codes of int8 and fp8 are aligned to 16 bytes if the row count is a multiple of 4 or
    /// all rows share one scale.
    pub fn layout(self, rows: usize, columns: usize) -> Vec<(WeightPart, Range<usize>)> {
        let numbers = rows * columns;
        let blocks = numbers.div_ceil(NF4_BLOCK);
        let parts: Vec<(WeightPart, usize)> = match self {
            WeightFormat::Int8 => vec![(WeightPart::Scales, 4 * rows), (WeightPart::Codes, numbers)],
            WeightFormat::Fp8(Fp8Scales::None) | WeightFormat::E5M2(Fp8Scales::None) => {
                vec![(WeightPart::Scales, 0), (WeightPart::Codes, numbers)]
            }
            WeightFormat::Fp8(Fp8Scales::Tensor)
            | WeightFormat::E5M2(Fp8Scales::Tensor)
            | WeightFormat::Int8Scaled(Int8Scales::Tensor, _) => vec![
                (WeightPart::Scales, 4),
                (WeightPart::Padding, 12),
                (WeightPart::Codes, numbers),
            ],
            WeightFormat::Fp8(Fp8Scales::Rows)
            | WeightFormat::E5M2(Fp8Scales::Rows)
            | WeightFormat::Int8Scaled(Int8Scales::Rows, _) => {
                vec![(WeightPart::Scales, 4 * rows), (WeightPart::Codes, numbers)]
            }
            WeightFormat::BlockFp8 => {
                let blocks = rows.div_ceil(FP8_BLOCK) * columns.div_ceil(FP8_BLOCK);
                vec![(WeightPart::Scales, 4 * blocks), (WeightPart::Codes, numbers)]
            }
            WeightFormat::Int4(_) => {
                vec![(WeightPart::Scales, 4 * rows), (WeightPart::Codes, numbers / 2)]
            }
            WeightFormat::W4A8 {
                group, codes, scales, ..
            } => {
                let groups = numbers / usize::from(group.max(1));
                let mut parts = vec![
                    (WeightPart::Scales, 4 * rows),
                    (WeightPart::BlockScales, groups * scales.width()),
                    (WeightPart::Codes, numbers / 8 * codes.bits()),
                ];
                if codes == W4A8Codes::Four {
                    parts.insert(0, (WeightPart::Table, 4 * 16));
                }
                parts
            }
            WeightFormat::Nvfp4(order, factors) => {
                let scales = order.scales().len(rows, columns / NVFP4_BLOCK);
                let mut parts = vec![(WeightPart::Scales, 4), (WeightPart::Padding, 12)];
                if factors == ColumnFactors::F32 {
                    parts.push((WeightPart::ColumnFactors, 4 * columns));
                }
                parts.extend([
                    (WeightPart::BlockScales, scales),
                    (WeightPart::Codes, numbers / 2),
                ]);
                parts
            }
            WeightFormat::Mxfp8(order) => vec![
                (WeightPart::BlockScales, order.len(rows, columns / MXFP8_BLOCK)),
                (WeightPart::Codes, numbers),
            ],
            WeightFormat::Int4Groups {
                order,
                group,
                numbers: of_groups,
            } => {
                let groups = numbers / usize::from(group.max(1));
                let zeros = match order {
                    Int4Order::AutoAwq => groups / 2,
                    _ => groups * of_groups.width(),
                };
                vec![
                    (WeightPart::Scales, groups * of_groups.width()),
                    (WeightPart::Zeros, zeros),
                    (WeightPart::Codes, numbers / 2),
                ]
            }
            WeightFormat::Int8Groups {
                group,
                numbers: of_groups,
            } => {
                let groups = numbers / (group.max(1) as usize);
                vec![
                    (WeightPart::Scales, groups * of_groups.width()),
                    (WeightPart::Zeros, groups),
                    (WeightPart::Codes, numbers),
                ]
            }
            WeightFormat::Svdquant { codes, rank } => {
                let rank = usize::from(rank);
                let mut parts = vec![(WeightPart::ColumnFactors, 4 * columns)];
                match codes {
                    SvdquantCodes::Int4(_) => {
                        parts.push((WeightPart::Scales, 2 * (numbers / SVDQUANT_INT4_GROUP)));
                    }
                    SvdquantCodes::Fp4 => parts.extend([
                        (WeightPart::Scales, 4 * rows),
                        (WeightPart::BlockScales, numbers / SVDQUANT_FP4_GROUP),
                    ]),
                }
                parts.extend([
                    (WeightPart::LowRankDown, 2 * rank * columns),
                    (WeightPart::LowRankUp, 2 * rank * rows),
                    (WeightPart::Codes, numbers / 2),
                    (WeightPart::MadeScales, 4 * rows),
                    (WeightPart::MadeFlag, 16),
                ]);
                parts
            }
            WeightFormat::Nf4 | WeightFormat::Fp4 => vec![
                (WeightPart::Table, 4 * 16),
                (WeightPart::Scales, 4 * blocks),
                (WeightPart::Codes, numbers.div_ceil(2)),
            ],
            WeightFormat::Nf4Double | WeightFormat::Fp4Double => vec![
                (WeightPart::Table, 4 * 16),
                (WeightPart::NestedTable, 4 * 256),
                (WeightPart::Offset, 4),
                (WeightPart::NestedAbsmax, 4 * blocks.div_ceil(NF4_NESTED_BLOCK)),
                (WeightPart::Scales, blocks),
                (WeightPart::Codes, numbers.div_ceil(2)),
            ],
            WeightFormat::Gguf(kind) => {
                let (in_block, bytes) = kind.block();
                vec![(WeightPart::Codes, numbers / in_block * bytes)]
            }
        };
        let mut end = 0;
        let place = |(part, bytes): (WeightPart, usize)| {
            let begin = end;
            end += bytes;
            (part, begin..end)
        };
        parts.into_iter().map(place).collect()
    }

    /// What a weight of so many columns is made at load where this format is wanted: its groups are the largest that divide its
    /// rows.
    #[must_use]
    pub fn for_columns(self, columns: usize) -> WeightFormat {
        match self {
            WeightFormat::Int8Scaled(scales, _) => {
                WeightFormat::Int8Scaled(scales, Rotation::largest(columns))
            }
            other => other,
        }
    }

    /// The groups of columns that are multiplied by a Hadamard matrix after the codes are scaled.
    pub fn rotation(self) -> Rotation {
        match self {
            WeightFormat::Int8Scaled(_, rotation)
            | WeightFormat::Int4(rotation)
            | WeightFormat::W4A8 { rotation, .. } => rotation,
            _ => Rotation::None,
        }
    }

    /// What a product adds to its inputs before it multiplies the codes, which is no part of the weight.
    pub fn input_shift(self) -> InputShift {
        match self {
            WeightFormat::Svdquant {
                codes: SvdquantCodes::Int4(shift),
                ..
            } => shift,
            _ => InputShift::None,
        }
    }

    /// The number of which the rows of a weight in this format are a multiple.
    pub fn multiple_of_rows(self) -> usize {
        match self {
            WeightFormat::Int4Groups { order, .. } => order.multiple_of_rows(),
            WeightFormat::Svdquant { .. } => packed::SVDQUANT_ROWS,
            _ => 1,
        }
    }

    /// Exact bytes of a weight of this shape.
    pub fn bytes(self, rows: usize, columns: usize) -> Bytes {
        let end = self
            .layout(rows, columns)
            .last()
            .map_or(0, |(_, range)| range.end);
        Bytes(end as u64)
    }

    /// Whether a weight with this many columns can have this format. Blocks of llama.cpp do not cross the end of a
    /// row.
    pub fn fits(self, columns: usize) -> bool {
        match self {
            WeightFormat::Gguf(kind) => columns.is_multiple_of(kind.block().0),
            WeightFormat::Int8
            | WeightFormat::Fp8(_)
            | WeightFormat::E5M2(_)
            | WeightFormat::BlockFp8
            | WeightFormat::Nf4
            | WeightFormat::Nf4Double
            | WeightFormat::Fp4
            | WeightFormat::Fp4Double => true,
            WeightFormat::Int8Scaled(_, rotation) => columns.is_multiple_of(rotation.group()),
            // Eight codes are read at a time.
            WeightFormat::Int4(rotation) => columns.is_multiple_of(rotation.group().max(8)),
            WeightFormat::W4A8 {
                group,
                codes,
                rotation,
                ..
            } => {
                group >= 8
                    && columns.is_multiple_of(usize::from(group))
                    && columns.is_multiple_of(rotation.group())
                    && (codes == W4A8Codes::Four || columns.is_multiple_of(32))
            }
            WeightFormat::Nvfp4(..) => columns.is_multiple_of(NVFP4_BLOCK),
            WeightFormat::Mxfp8(_) => columns.is_multiple_of(MXFP8_BLOCK),
            WeightFormat::Int4Groups { order, group, .. } => {
                group > 0
                    && group.is_multiple_of(8)
                    && columns.is_multiple_of(usize::from(group))
                    && columns.is_multiple_of(order.multiple_of_columns())
            }
            WeightFormat::Int8Groups { group, .. } => {
                group > 0 && group.is_multiple_of(8) && columns.is_multiple_of(group as usize)
            }
            WeightFormat::Svdquant { rank, .. } => {
                columns.is_multiple_of(packed::SVDQUANT_COLUMNS) && rank.is_multiple_of(16)
            }
        }
    }
}

/// Decodes E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, 0x7F is NaN.
///
/// Source: FP8 Formats for Deep Learning (Micikevicius et al., 2022), E4M3.
pub fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits(((exponent - 7 + 127) as u32) << 23),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Decodes E5M2: 1 sign, 5 exponent, 2 mantissa bits: the upper half of a binary16.
///
/// Source: FP8 Formats for Deep Learning (Micikevicius et al., 2022), E5M2.
pub fn e5m2_to_f32(code: u8) -> f32 {
    half::f16::from_bits(u16::from(code) << 8).to_f32()
}

/// Decodes E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit; the lower four bits of `code`.
///
/// Source: OCP Microscaling Formats 1.0 (2023), FP4.
pub fn e2m1_to_f32(code: u8) -> f32 {
    const SIZES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let size = SIZES[usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

/// Decodes E8M0: a power of two. Zero is read as 0, with which empty blocks are written, and 255 is not finite.
///
/// Source: OCP Microscaling Formats 1.0 (2023), E8M0.
pub fn e8m0_to_f32(code: u8) -> f32 {
    f32::from_bits(u32::from(code) << 23)
}

/// Rows and columns of a weight of this shape. Without rows the column count saturates at `usize::MAX`.
pub fn rows_and_columns(shape: &[usize]) -> (usize, usize) {
    match shape.split_first() {
        Some((rows, rest)) => (*rows, rest.iter().fold(1, |all: usize, &n| all.saturating_mul(n))),
        None => (1, 1),
    }
}

impl fmt::Display for WeightFormat {
    /// The requested name (`int8-convrot`, `int8`, `fp8`, `nf4`, `nf4-double`), or the stored one (`fp8-scaled`, `Q4_K`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightFormat::Int8 => "int8",
            WeightFormat::Fp8(Fp8Scales::Rows) => "fp8",
            WeightFormat::Fp8(Fp8Scales::Tensor) => "fp8-scaled",
            WeightFormat::Fp8(Fp8Scales::None) => "fp8-unscaled",
            WeightFormat::Nf4 => "nf4",
            WeightFormat::Nf4Double => "nf4-double",
            WeightFormat::Gguf(kind) => kind.as_str(),
            WeightFormat::Fp4 => "fp4",
            WeightFormat::Fp4Double => "fp4-double",
            WeightFormat::E5M2(Fp8Scales::None) => "e5m2-unscaled",
            WeightFormat::E5M2(Fp8Scales::Tensor) => "e5m2-scaled",
            WeightFormat::E5M2(Fp8Scales::Rows) => "e5m2",
            WeightFormat::BlockFp8 => "fp8-blocks",
            WeightFormat::Int8Scaled(Int8Scales::Tensor, Rotation::None) => "int8-scaled",
            WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::None) => "int8-rows",
            WeightFormat::Int8Scaled(_, _) => "int8-convrot",
            WeightFormat::Int4(Rotation::None) => "int4",
            WeightFormat::Int4(_) => "int4-convrot",
            WeightFormat::W4A8 {
                codes: W4A8Codes::Four,
                ..
            } => "w4a8",
            WeightFormat::W4A8 {
                codes: W4A8Codes::Six,
                ..
            } => "w6a8",
            WeightFormat::Nvfp4(Nvfp4Order::TensorCores, _) => "nvfp4",
            WeightFormat::Nvfp4(Nvfp4Order::Rows, _) => "nvfp4-modelopt",
            WeightFormat::Nvfp4(Nvfp4Order::LowFirst, _) => "nvfp4-torchao",
            WeightFormat::Mxfp8(_) => "mxfp8",
            WeightFormat::Int4Groups {
                order: Int4Order::AutoAwq | Int4Order::TinyChat { .. } | Int4Order::LessEight,
                ..
            } => "awq",
            WeightFormat::Int4Groups { .. } => "int4-groups",
            WeightFormat::Int8Groups { .. } => "int8-groups",
            WeightFormat::Svdquant {
                codes: SvdquantCodes::Int4(_),
                ..
            } => "svdquant-int4",
            WeightFormat::Svdquant {
                codes: SvdquantCodes::Fp4,
                ..
            } => "svdquant-fp4",
        })
    }
}

/// Not the name of a format that can be made at load.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is none of int8-convrot, int8, fp8, nf4, nf4-double")]
pub struct WeightFormatError {
    pub given: String,
}

impl FromStr for WeightFormat {
    type Err = WeightFormatError;

    fn from_str(text: &str) -> Result<WeightFormat, WeightFormatError> {
        WeightFormat::MADE_AT_LOAD
            .into_iter()
            .find(|format| format.to_string() == text)
            .ok_or_else(|| WeightFormatError {
                given: text.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_contiguous_and_aligned() {
        let stored = [Fp8Scales::None, Fp8Scales::Tensor].map(WeightFormat::Fp8);
        for format in WeightFormat::MADE_AT_LOAD.into_iter().chain(stored) {
            for (rows, columns) in [(1, 1), (3, 5), (64, 64), (7, 4099), (4, 33)] {
                let format = format.for_columns(columns);
                let mut end = 0;
                for (part, range) in format.layout(rows, columns) {
                    assert_eq!(range.start, end);
                    let wide = matches!(
                        part,
                        WeightPart::Table
                            | WeightPart::NestedTable
                            | WeightPart::Offset
                            | WeightPart::NestedAbsmax
                            | WeightPart::ColumnFactors
                    );
                    assert!(!wide || range.start % 4 == 0, "{format} {part:?}");
                    let by_rows = [WeightFormat::Int8, WeightFormat::Fp8(Fp8Scales::Rows)].contains(&format);
                    let is_aligned =
                        matches!(format, WeightFormat::Fp8(_)) && !by_rows || by_rows && rows % 4 == 0;
                    if part == WeightPart::Codes && is_aligned {
                        assert_eq!(range.start % 16, 0, "{format} {rows}x{columns}");
                    }
                    end = range.end;
                }
                assert_eq!(Bytes(end as u64), format.bytes(rows, columns));
            }
        }
    }

    #[test]
    fn columns_without_rows_saturate() {
        let shape = [0, usize::MAX / 2, 3];
        for format in WeightFormat::MADE_AT_LOAD {
            let (rows, columns) = rows_and_columns(&shape);
            assert_eq!(format.bytes(rows, columns), format.bytes(0, 1));
        }
    }

    #[test]
    fn a_rotation_is_the_regular_hadamard_matrix_and_its_own_inverse() {
        for rotation in [Rotation::By16, Rotation::By64, Rotation::By256] {
            let size = rotation.group();
            let mut first = vec![0.0; size];
            first[0] = 1.0;
            rotation.turn(&mut first);
            // Of the Kronecker powers of four ones with minus ones on the second diagonal.
            for (place, found) in first.iter().enumerate() {
                let digits = std::iter::successors(Some(place), |rest| Some(rest / 4)).take(4);
                let minus = digits.filter(|rest| rest % 4 == 3).count() % 2 == 1;
                let one = 1.0 / (size as f32).sqrt();
                assert_eq!(*found, if minus { -one } else { one }, "{size}: {place}");
            }
            let original: Vec<f32> = (0..2 * size).map(|i| (i * i % 23) as f32 - 11.0).collect();
            let mut turned = original.clone();
            rotation.turn(&mut turned);
            assert_ne!(turned, original);
            rotation.turn(&mut turned);
            let apart = turned.iter().zip(&original).map(|(a, b)| (a - b).abs());
            assert!(apart.fold(0.0, f32::max) < 1e-5, "{size}");
        }
    }

    #[test]
    fn groups_are_the_largest_that_divide_a_row() {
        let [wanted, ..] = WeightFormat::MADE_AT_LOAD;
        for (columns, group) in [(3072, 256), (192, 64), (48, 16), (33, 1)] {
            assert_eq!(wanted.for_columns(columns).rotation().group(), group, "{columns}");
        }
    }

    #[test]
    fn format_names_round_trip() {
        for format in WeightFormat::MADE_AT_LOAD {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("int7".parse::<WeightFormat>().is_err());
    }
}

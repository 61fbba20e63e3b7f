//! Where tokens are, as angles: FLUX's rotary embedding over three axes.

use candle_core::{Device, Result, Tensor};

/// Base of the frequencies.
const THETA: f64 = 10_000.0;

/// Cosine and sine of every pair of a head, `[tokens, head_width / 2]` in f32 whatever the dtype of the
/// card: at the far end of a picture an angle in bf16 is off by whole tenths.
#[derive(Debug, Clone)]
pub struct Rotations {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

impl Rotations {
    /// Those of some tokens.
    pub(super) fn rows(&self, first: usize, count: usize) -> Result<Rotations> {
        Ok(Rotations {
            cos: self.cos.narrow(0, first, count)?,
            sin: self.sin.narrow(0, first, count)?,
        })
    }

    pub(super) fn angles(&self) -> ops::Angles<'_> {
        ops::Angles {
            cos: &self.cos,
            sin: &self.sin,
        }
    }
}

/// Positions of `text` tokens, all zero, and behind them those of a picture of `rows` by `columns` tokens:
/// `[0, row, column]`, row-major. (`FluxPipeline._prepare_latent_image_ids`.)
pub fn positions(text: usize, rows: usize, columns: usize) -> Vec<[u32; 3]> {
    let picture = (0..rows as u32).flat_map(|row| (0..columns as u32).map(move |column| [0, row, column]));
    std::iter::repeat_n([0; 3], text).chain(picture).collect()
}

/// The rotations of these positions: `FluxPosEmbed`, computed in f64 and rounded once. `axes` are the
/// widths that each axis has in a head (16, 56 and 56 of 128).
///
/// # Errors
/// Those of candle.
pub fn rotations(positions: &[[u32; 3]], axes: [usize; 3], device: &Device) -> Result<Rotations> {
    // Few places on an axis are different ones: each is computed once.
    let most = positions.iter().flatten().max().copied().unwrap_or(0);
    let tables = axes.map(|width| {
        let frequency = |i: usize| THETA.powf(-((2 * i) as f64) / width as f64);
        let frequencies: Vec<f64> = (0..width / 2).map(frequency).collect();
        let at = |at: u32| {
            frequencies
                .iter()
                .map(move |frequency| (f64::from(at) * frequency).sin_cos())
        };
        (0..=most)
            .map(|place| at(place).map(|(s, c)| (s as f32, c as f32)).collect())
            .collect::<Vec<Vec<(f32, f32)>>>()
    });
    let pairs = axes.iter().sum::<usize>() / 2;
    let mut cos = Vec::with_capacity(positions.len() * pairs);
    let mut sin = Vec::with_capacity(positions.len() * pairs);
    for position in positions {
        for (&at, table) in position.iter().zip(&tables) {
            for (s, c) in &table[at as usize] {
                cos.push(*c);
                sin.push(*s);
            }
        }
    }
    let shape = (positions.len(), pairs);
    Ok(Rotations {
        cos: Tensor::from_vec(cos, shape, device)?,
        sin: Tensor::from_vec(sin, shape, device)?,
    })
}

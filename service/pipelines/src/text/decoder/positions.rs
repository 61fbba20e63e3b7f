//! Positions of tokens, and the rotations by them.

use candle_core::{Device, Tensor};
use model::StageError;

use super::Decoder;
use crate::rotary::{Rotations, Rounded, rotations, turns};

/// The positions of the tokens of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) enum Positions<'a> {
    /// So many tokens, one after the other from 0.
    InOrder(usize),
    /// Each token's position in time, rows and columns.
    OnAxes(&'a [[u32; 3]]),
}

impl Positions<'_> {
    /// The positions of `count` tokens.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for another number of positions.
    pub(super) fn of(on_axes: Option<&[[u32; 3]]>, count: usize) -> Result<Positions<'_>, StageError> {
        match on_axes {
            None => Ok(Positions::InOrder(count)),
            Some(positions) if positions.len() == count => Ok(Positions::OnAxes(positions)),
            Some(positions) => {
                let problem = format!("{} positions of {count} tokens", positions.len());
                Err(StageError::BadInput(problem))
            }
        }
    }

    /// Number of tokens.
    pub(super) fn count(&self) -> usize {
        match self {
            Positions::InOrder(count) => *count,
            Positions::OnAxes(positions) => positions.len(),
        }
    }

    /// The rotation of each pair of a head: `theta^(-2i/d)` times the position on the axis of pair `i` of `d / 2`. Of a
    /// token with three positions, pairs turn by each in the sections of the decoder (Qwen2-VL's M-RoPE).
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn rotations(&self, decoder: &Decoder, device: &Device) -> candle_core::Result<Rotations> {
        let (head, theta) = (decoder.head_dim, decoder.theta);
        let (positions, sections) = match (self, decoder.sections) {
            (Positions::OnAxes(positions), Some(sections)) => (*positions, sections),
            _ => {
                let places: Vec<[u32; 1]> = (0..self.count() as u32).map(|at| [at]).collect();
                return rotations(&places, [head], theta, Rounded::Frequencies, device);
            }
        };
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for at in positions {
            let mut first = 0;
            for (at, pairs) in at.iter().zip(sections) {
                let of_axis = turns(*at, head, theta, Rounded::Frequencies);
                for (s, c) in of_axis.iter().skip(first).take(pairs) {
                    cos.push(*c);
                    sin.push(*s);
                }
                first += pairs;
            }
        }
        let shape = (positions.len(), head / 2);
        Ok(Rotations {
            cos: Tensor::from_vec(cos, shape, device)?,
            sin: Tensor::from_vec(sin, shape, device)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(sections: Option<[usize; 3]>) -> Decoder {
        Decoder {
            vocab_size: 5,
            hidden_size: 16,
            intermediate_size: 16,
            layers: 1,
            heads: 1,
            heads_kv: 1,
            head_dim: 16,
            rms_norm_eps: 1e-6,
            theta: 1e6,
            has_head_norms: false,
            has_biases: true,
            sections,
        }
    }

    #[test]
    fn equal_positions_on_all_axes_are_ordinary_ones() {
        let on_axes: Vec<[u32; 3]> = (0..7).map(|at| [at; 3]).collect();
        let of = |positions: Option<&[[u32; 3]]>, sections| {
            let positions = Positions::of(positions, 7).unwrap();
            let rotations = positions.rotations(&decoder(sections), &Device::Cpu).unwrap();
            let numbers = |tensor: &Tensor| tensor.to_vec2::<f32>().unwrap();
            (numbers(&rotations.cos), numbers(&rotations.sin))
        };
        let expected = of(None, None);
        assert_eq!(of(Some(&on_axes), Some([2, 3, 3])), expected);
        assert_eq!(of(None, Some([2, 3, 3])), expected);
    }

    #[test]
    fn another_number_of_positions_is_refused() {
        assert!(Positions::of(Some(&[[0; 3]]), 2).is_err());
    }
}

//! Adapters as requests and plans name them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Strength of an adapter over the steps of a request: points of a piecewise linear curve, constant before the first and after
/// the last point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StrengthCurve {
    /// Position in the steps that are run, from 0 (the first) to 1 (the last), and strength. At least one, by position.
    points: Vec<(f32, f32)>,
}

/// Why points are no [`StrengthCurve`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CurveError {
    #[error("is empty; give at least one point")]
    Empty,
    #[error("has {0} points; {MAX_POINTS} are the most")]
    TooMany(usize),
    #[error("has a point at {0}; positions are from 0 (the first step) to 1 (the last)")]
    Position(f32),
    #[error("has a point at {1} after one at {0}; order them by position")]
    Order(f32, f32),
    #[error("has strength {0}; strengths are from -{MAX_STRENGTH} to {MAX_STRENGTH}")]
    Strength(f32),
}

/// Maximum points of a [`StrengthCurve`].
pub const MAX_POINTS: usize = 256;

/// Maximum absolute strength of an adapter: far above the strengths in use.
pub const MAX_STRENGTH: f32 = 100.0;

impl StrengthCurve {
    /// 0 in all steps.
    pub fn zero() -> StrengthCurve {
        StrengthCurve {
            points: vec![(0.0, 0.0)],
        }
    }

    /// The curve with one strength in all steps.
    ///
    /// # Errors
    /// When the strength is not finite, or beyond [`MAX_STRENGTH`].
    pub fn constant(strength: f32) -> Result<StrengthCurve, CurveError> {
        StrengthCurve::of(vec![(0.0, strength)])
    }

    /// The curve through points of position and strength.
    ///
    /// # Errors
    /// When there are no points, or one is invalid.
    pub fn of(points: Vec<(f32, f32)>) -> Result<StrengthCurve, CurveError> {
        if points.is_empty() {
            return Err(CurveError::Empty);
        }
        if points.len() > MAX_POINTS {
            return Err(CurveError::TooMany(points.len()));
        }
        for &(position, strength) in &points {
            if !(0.0..=1.0).contains(&position) {
                return Err(CurveError::Position(position));
            }
            if !(-MAX_STRENGTH..=MAX_STRENGTH).contains(&strength) {
                return Err(CurveError::Strength(strength));
            }
        }
        if let Some(pair) = points.windows(2).find(|pair| pair[0].0 > pair[1].0) {
            return Err(CurveError::Order(pair[0].0, pair[1].0));
        }
        Ok(StrengthCurve { points })
    }

    /// The points, by position.
    pub fn points(&self) -> &[(f32, f32)] {
        &self.points
    }

    /// Whether every step has the same strength.
    pub fn is_constant(&self) -> bool {
        self.points.windows(2).all(|pair| pair[0].1 == pair[1].1)
    }

    /// Whether no step has a strength other than 0.
    pub fn is_zero(&self) -> bool {
        self.points.iter().all(|&(_, strength)| strength == 0.0)
    }

    /// The strength of step `step` (from 0) of `steps`.
    pub fn at(&self, step: usize, steps: usize) -> f32 {
        let position = match steps {
            0 | 1 => 0.0,
            _ => step as f32 / (steps - 1) as f32,
        };
        // Of several points at one position, the last counts from there on.
        self.between(position, self.points.partition_point(|&(at, _)| at <= position))
    }

    /// The strength at a position; `after` is the number of points at or before it.
    fn between(&self, position: f32, after: usize) -> f32 {
        match (
            after.checked_sub(1).map(|i| self.points[i]),
            self.points.get(after),
        ) {
            (Some((from, low)), Some(&(to, high))) => low + (high - low) * (position - from) / (to - from),
            (Some((_, strength)), None) | (None, Some(&(_, strength))) => strength,
            (None, None) => 0.0,
        }
    }

    /// The sum of both in every step.
    ///
    /// # Errors
    /// When it is beyond [`MAX_STRENGTH`], or needs more than [`MAX_POINTS`] points.
    pub fn plus(&self, other: &StrengthCurve) -> Result<StrengthCurve, CurveError> {
        let both = [self, other];
        let positions = both.iter().flat_map(|curve| &curve.points).map(|point| point.0);
        let mut positions: Vec<f32> = positions.collect();
        positions.sort_by(f32::total_cmp);
        positions.dedup();
        let mut points = Vec::new();
        for position in positions {
            // A curve may jump where several of its points have one position: the sum then has both sides of it.
            let before = |curve: &&StrengthCurve| {
                let after = curve.points.partition_point(|&(at, _)| at < position);
                curve.between(position, after)
            };
            let from = |curve: &&StrengthCurve| {
                let after = curve.points.partition_point(|&(at, _)| at <= position);
                curve.between(position, after)
            };
            let (low, high): (f32, f32) = (both.iter().map(before).sum(), both.iter().map(from).sum());
            points.push((position, low));
            if low != high {
                points.push((position, high));
            }
        }
        StrengthCurve::of(points)
    }

    /// The strength of the first step.
    pub fn first(&self) -> f32 {
        self.at(0, 1)
    }
}

/// An adapter in a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterUse {
    /// Name of the adapter, as in [`AdapterFile::name`].
    pub name: String,
    /// Strength over the steps of sampling.
    pub strength: StrengthCurve,
    /// Strength in text encoders, which run once.
    pub text_strength: f32,
}

/// Kind of a file that is attached to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AdapterKind {
    /// Low-rank terms of layers.
    Lora,
    /// A separate network, which reads a control picture.
    ControlNet,
}

/// An adapter to be attached to a model: its name and its file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AdapterFile {
    /// Unique name, part of the names of its components.
    pub name: String,
    /// A file, the folder of an adapter of peft, or that of a ControlNet.
    pub path: PathBuf,
    /// The kind when the adapter was found.
    pub kind: AdapterKind,
    /// Ignore tensors that are of no layer of the model, instead of refusing the adapter.
    pub ignores_unknown: bool,
}

/// The components and layers that an adapter changes, for display.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterReport {
    pub name: String,
    /// Numbers of layers that it changes, by component of the base.
    pub layers: BTreeMap<String, usize>,
    /// The largest rank of its terms.
    pub rank: usize,
    /// Tensors that were ignored.
    pub ignored: Vec<String>,
}

/// Why a file is no adapter of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdapterError {
    /// The file cannot be read, or no known program wrote it.
    #[error("{0}")]
    File(String),
    /// A kind of adapter, or a part of one, that is not supported.
    #[error("it has {kind} ({tensor}), which is not supported: LoRA of linear layers is")]
    Unsupported {
        /// For display: `LoKr`, `DoRA`.
        kind: &'static str,
        /// The first tensor of this kind.
        tensor: String,
    },
    /// A part of a kind that is not applied, without which the rest means the same.
    #[error(
        "it has {kind} ({tensor}), which is not applied here: ask for it with unknown tensors ignored to use the rest"
    )]
    Separate {
        /// For display: `LoKr`, `a difference of a bias`.
        kind: &'static str,
        /// The first tensor of this kind.
        tensor: String,
    },
    /// The family takes no adapters.
    #[error("models of the family {family} take no adapters")]
    NotTaken { family: &'static str },
    /// The family takes no ControlNets.
    #[error("models of the family {family} take no ControlNets; FLUX.1 does")]
    ControlNetNotTaken { family: &'static str },
    /// No tensor is of a layer of the model.
    #[error(
        "it is no adapter for {family}: none of its {tensors} tensors is of a layer of it ({first} is the first)"
    )]
    OtherFamily {
        family: &'static str,
        tensors: usize,
        first: String,
    },
    /// Tensors that are of no layer of the model.
    #[error(
        "{count} of its tensors are of no layer of {family} ({first} is the first): it may be for another model; \
         ask for it with unknown tensors ignored to use the rest"
    )]
    Unknown {
        family: &'static str,
        count: usize,
        first: String,
    },
    /// Half of a pair.
    #[error("it has {found}, and not the other half of the pair")]
    Half { found: String },
    /// A tensor that does not fit its layer.
    #[error("tensor {tensor} is {found:?} where {expected} is expected")]
    Shape {
        tensor: String,
        found: Vec<usize>,
        expected: String,
    },
    /// Two pairs for one layer.
    #[error("layer {layer} is changed twice, by {first} and by {second}")]
    Twice {
        layer: String,
        first: String,
        second: String,
    },
    /// A scale that is not a number, or a configuration that cannot be read.
    #[error("{0}")]
    Scale(String),
}

#[cfg(test)]
mod tests;

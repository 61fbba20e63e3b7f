//! Activation memory of a decode or an encode, and the rungs that need less.

use candle_core::DType;
use model::plan::ladder;
use ops::Planned;
use residency::Bytes;
use serde::{Deserialize, Serialize};

use super::arithmetic::{Arithmetic, Outcome};
use super::config::WanVaeConfig;
use super::latent;
use super::sketch::Sketch;
use super::stream::Stream;
use super::table;
use crate::Rung;
use crate::autoencoders::pass::StripSize;

/// Most bytes of a piece of a map where memory suffices: larger ones make a card no faster.
const WHOLE_PIECE_BYTES: usize = 96 << 20;

/// How large the pieces of rows are that pass through the layers, on a card: on the CPU they fit into a cache anyway. Results are
/// equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chunking {
    /// As large as is of use.
    Whole,
    /// Of at most `bytes` bytes where a map is enlarged, at least a row.
    Strips { bytes: usize },
}

impl Chunking {
    /// For reports: `whole`, `strips of 32 MiB`.
    pub fn label(self) -> String {
        match self {
            Chunking::Whole => "whole".to_owned(),
            Chunking::Strips { bytes } if bytes >= 1 << 20 => format!("strips of {} MiB", bytes >> 20),
            Chunking::Strips { bytes } => format!("strips of {bytes} bytes"),
        }
    }

    pub(super) fn pieces(self) -> StripSize {
        StripSize::Bytes(match self {
            Chunking::Whole => WHOLE_PIECE_BYTES,
            Chunking::Strips { bytes } => bytes,
        })
    }
}

/// The ladder of rungs for decoding `latents` latents of `h` by `w`, best first, each predicted to need less memory than
/// the one before it.
pub fn decode_ladder(
    config: &WanVaeConfig,
    sides: (usize, usize),
    latents: usize,
    dtype: DType,
) -> Vec<(Chunking, Rung)> {
    rungs(|chunking| decode_scratch(config, sides, latents, chunking, dtype))
}

/// The ladder for encoding `frames` frames, whose latents are `h` by `w`.
pub fn encode_ladder(
    config: &WanVaeConfig,
    sides: (usize, usize),
    frames: usize,
    dtype: DType,
) -> Vec<(Chunking, Rung)> {
    rungs(|chunking| encode_scratch(config, sides, frames, chunking, dtype))
}

fn rungs(scratch: impl Fn(Chunking) -> Bytes) -> Vec<(Chunking, Rung)> {
    let strips = [16, 4].map(|mebibytes| Chunking::Strips {
        bytes: mebibytes << 20,
    });
    ladder(std::iter::once(Chunking::Whole).chain(strips), |chunking| {
        Rung::new(chunking.label(), scratch(chunking))
    })
}

/// Predicted peak of activation bytes of decoding `latents` latents of `h` by `w`: what layers remember, the pieces, and
/// the frames of one latent.
pub fn decode_scratch(
    config: &WanVaeConfig,
    sides: (usize, usize),
    latents: usize,
    chunking: Chunking,
    dtype: DType,
) -> Bytes {
    let sketch = Sketch::new(dtype, chunking.pieces());
    let peak = decode(config, sides, latents, &sketch).map(|()| sketch.peak());
    of_sketch(peak)
}

/// Predicted peak of activation bytes of encoding `frames` 8-bit frames whose latents are `h` by `w`.
pub fn encode_scratch(
    config: &WanVaeConfig,
    sides: (usize, usize),
    frames: usize,
    chunking: Chunking,
    dtype: DType,
) -> Bytes {
    let sketch = Sketch::new(dtype, chunking.pieces());
    let peak = encode(config, sides, frames, &sketch).map(|()| sketch.peak());
    of_sketch(peak)
}

/// A sketch fails for no map. If it did, nothing would fit.
fn of_sketch(peak: Outcome<usize>) -> Bytes {
    Bytes(peak.map_or(u64::MAX / 2, |peak| peak as u64))
}

/// The first latent, and the second, which all others are like.
const DIFFERENT: usize = 2;

fn decode(config: &WanVaeConfig, (h, w): (usize, usize), latents: usize, sketch: &Sketch) -> Outcome<()> {
    let layers = table::decoder(config, &mut { sketch })?;
    let mut stream = Stream::new(sketch, &layers, [h, w, config.z_dim])?;
    for _ in 0..latents.min(DIFFERENT) {
        let map = sketch.blank([1, h, w, config.z_dim])?;
        let frames = latent::decode(config, sketch, &mut stream, map)?;
        // The same frames as bytes.
        sketch.note(sketch.sides(&frames)?.iter().product());
    }
    Ok(())
}

fn encode(config: &WanVaeConfig, (h, w): (usize, usize), frames: usize, sketch: &Sketch) -> Outcome<()> {
    let factor = config.factor();
    let (height, width, patch) = (h * factor, w * factor, config.patch());
    let layers = table::encoder(config, &mut { sketch })?;
    let sides = [height / patch, width / patch, config.in_channels];
    let latents = config.latents(frames);
    let mut stream = Stream::new(sketch, &layers, sides)?;
    let _joined = sketch.blank([latents, h, w, 2 * config.z_dim])?;
    for index in 0..latents.min(DIFFERENT) {
        let (_, count) = config.frames_of_latent(index);
        let map = sketch.blank([count, height, width, config.channels_of_frames()])?;
        latent::encode(config, sketch, &mut stream, map)?;
    }
    Ok(())
}

impl WanVaeConfig {
    /// Shapes for which cuDNN is used to decode `latents` latents of `h` by `w` with maps of this dtype. Each shape once, in
    /// order of use.
    pub fn planned_to_decode(
        &self,
        sides: (usize, usize),
        latents: usize,
        chunking: Chunking,
        dtype: DType,
    ) -> Vec<Planned> {
        let sketch = Sketch::of_shapes(dtype, chunking.pieces());
        let done = decode(self, sides, latents, &sketch);
        done.map_or_else(|_| Vec::new(), |()| sketch.planned())
    }

    /// Shapes for which it is used to encode `frames` frames, whose latents are `h` by `w`.
    pub fn planned_to_encode(
        &self,
        sides: (usize, usize),
        frames: usize,
        chunking: Chunking,
        dtype: DType,
    ) -> Vec<Planned> {
        let sketch = Sketch::of_shapes(dtype, chunking.pieces());
        let done = encode(self, sides, frames, &sketch);
        done.map_or_else(|_| Vec::new(), |()| sketch.planned())
    }
}

//! One latent to its frames, and frames to their latent.

use super::arithmetic::{Arithmetic, Outcome};
use super::config::WanVaeConfig;
use super::layers::Rows;
use super::stream::StreamOf;

/// Passes a latent `[1, h, w, channels]` through the layers of a decoder, to its frames `[n, height, width, channels]`.
pub(super) fn decode<A: Arithmetic>(
    config: &WanVaeConfig,
    a: &A,
    stream: &mut StreamOf<'_, A>,
    latent: A::Map,
) -> Outcome<A::Map> {
    let [_, h, w, _] = a.sides(&latent)?;
    let (factor, patch) = (config.factor(), config.patch());
    let channels = config.out_channels / (patch * patch);
    let count = if stream.is_first_latent() {
        1
    } else {
        config.frames_per_latent()
    };
    let mut frames: Option<A::Map> = None;
    let mut pieces = std::iter::once(Ok(Rows {
        map: latent,
        first: 0,
        is_last: true,
    }));
    let mut sink = |rows: Rows<A::Map>| {
        let frames = match &frames {
            Some(frames) => frames,
            None => frames.insert(a.blank([count, h * factor, w * factor, channels])?),
        };
        let [_, height, ..] = a.sides(&rows.map)?;
        let target = a.part(frames, 1, rows.first * patch, height * patch)?;
        a.unpatch(&rows.map, patch, &target)
    };
    stream.next(a, &mut pieces, &mut sink)?;
    frames.ok_or_else(no_rows)
}

/// Passes frames `[n, height, width, channels]`, the first alone or four later ones, through the layers of an encoder, to the
/// moments `[1, h, w, 2 channels]` of their latent.
pub(super) fn encode<A: Arithmetic>(
    config: &WanVaeConfig,
    a: &A,
    stream: &mut StreamOf<'_, A>,
    frames: A::Map,
) -> Outcome<A::Map> {
    let [count, height, width, _] = a.sides(&frames)?;
    let (factor, patch) = (config.factor(), config.patch());
    let (rows, columns) = (height / patch, width / patch);
    let most = a.rows_of_piece([count, 1, columns, config.base_dim]);
    let mut pieces = (0..rows).step_by(most).map(|first| {
        let count = most.min(rows - first);
        let piece = a.part(&frames, 1, first * patch, count * patch)?;
        Ok(Rows {
            map: a.patched(&piece, patch)?,
            first,
            is_last: first + count == rows,
        })
    });
    let moments = 2 * config.z_dim;
    let mut latent: Option<A::Map> = None;
    let mut sink = |rows: Rows<A::Map>| {
        let latent = match &latent {
            Some(latent) => latent,
            None => latent.insert(a.blank([1, height / factor, width / factor, moments])?),
        };
        let [_, height, ..] = a.sides(&rows.map)?;
        a.copy(&rows.map, &a.part(latent, 1, rows.first, height)?)
    };
    stream.next(a, &mut pieces, &mut sink)?;
    latent.ok_or_else(no_rows)
}

fn no_rows() -> model::StageError {
    model::StageError::BadInput("a map of no rows".to_owned())
}

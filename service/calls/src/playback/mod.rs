//! The playback of a session of sound, without a clock and without IO: `take` has the samples of a segment as they arrive,
//! `timeline` decides which segment sounds and fades one into another, `play_head` says how far the client has played.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod play_head;
mod take;
mod timeline;

pub use play_head::Gap;
pub(crate) use play_head::PlayHead;
pub(crate) use timeline::{PlaybackSettings, Timeline};
pub use timeline::{Rendered, SegmentStart};

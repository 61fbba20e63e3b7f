//! Supervisor and worker: two processes, one private protocol over the worker's standard input and output.

pub(crate) mod frames;
pub(crate) mod supervisor;
pub(crate) mod worker;

mod command_frames;
mod event_frames;
mod noun_frames;

//! Autoencoders: pictures, films and sound to latents and back.
//!
//! An autoencoder of residual blocks is a table (`table.rs`): the layers of its two halves in order, each with its name
//! and its channels. Everything follows from the table: the tensors that a checkpoint must have, the layers with their
//! tensors and the walk of a map through them (`half.rs`), the memory of that walk (`scratch.rs`), and the shapes that
//! cuDNN plans (`planned.rs`). Pictures ([`kl`]) and films ([`hunyuan`]) differ in their tables, in the axes of their kernels
//! (`kernels.rs`), and in the size of strips (`pass.rs`).
//!
//! Maps are `[h, t, w, c]`: rows, then frames, of which a picture has one. So a strip of rows is contiguous with all of
//! its frames, and is convolved and written in place (`strips.rs`). Whole and strip-wise processing share one code path:
//! every convolution processes its map strip by strip, and "whole" is one strip. Layers that span strips use the whole map:
//! group norms take its statistics first, attention sees all positions, and convolutions read the rows around their
//! strip. So the size of the strips changes the memory that is needed, and nothing else.
//!
//! To add an autoencoder of this kind, add a folder with its configuration, its table, its ladder of rungs, and its encoder and
//! decoder; if its kernels are padded in another way, also a variant of `Kernels`. Sound ([`oobleck`]) is a table
//! too, of layers over sequences in place of maps, and has windows in place of strips. Films whose norms are of single positions
//! ([`wan`]) stream: their layers remember the frames and the rows before, and no map is whole.

mod attention;
mod frames;
mod half;
mod kernels;
mod moments;
mod pass;
mod planned;
mod reference;
mod resnet;
mod role;
mod scratch;
mod source;
mod strips;
mod table;
mod tiles;

pub mod hunyuan;
pub mod kl;
pub mod mmaudio;
pub mod oobleck;
pub mod wan;

pub(crate) use role::role;

/// Name of the component in pipelines.
const COMPONENT: &str = "vae";

//! Layers over channels-last maps `[.., h, w, c]`, of pictures and of latents: convolutions and group norms, which autoencoders
//! and UNets share.

mod convolution;
mod norm;

pub(crate) use convolution::Convolution;
pub(crate) use norm::GroupNorm;

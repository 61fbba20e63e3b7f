//! The gRPC server: the only module that knows the public protocol. It validates, converts and serves; it never
//! sees a tensor.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod asked;
mod auth;
mod by_medium;
mod caller;
mod choose;
mod convert;
mod encodings;
mod entries;
mod generation;
mod given_pictures;
mod health;
mod hub;
mod jobs;
mod latent_upload;
mod limits;
mod media;
pub(crate) mod paths;
mod residency;
mod server;
mod sessions;
mod shared_files;
mod status;
mod stream;

pub(crate) use auth::Token;
pub(crate) use limits::Limits;
pub(crate) use server::{Service, policy_name, serve};

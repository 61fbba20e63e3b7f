//! SPEAKS gRPC. The calls of the service by gRPC: messages become calls of the crate `calls`, and the answers become messages.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod convert;
mod events;
mod generation;
mod health;
mod hub;
mod jobs;
mod methods;
mod requests;
mod residency;
mod server;
mod sessions;
mod status;

pub use server::{GrpcSettings, PROTOCOL, routes};

//! LISTENS. The calls of the service by gRPC: messages become calls of the crate `calls`, and the answers become messages.
//! It decides only who may call, and how much a client may have open.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod access;
mod convert;
mod events;
mod generation;
mod health;
mod hub;
mod jobs;
mod limits;
mod methods;
mod refusal;
mod requests;
mod residency;
mod server;
mod sessions;
mod status;
mod withdrawn;

pub use access::Gate;
pub use limits::Tls;
pub use server::{GrpcSettings, TransportError, serve};

//! LISTENS. Where clients come in, whatever they speak: connections and TLS, who may call what, and how much a client may have open.
//! A protocol brings its methods, each with a row of what it needs and takes, and the words of its refusals.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod access;
mod browsers;
mod caller;
mod counted;
mod grpc_web;
mod limits;
mod methods;
mod protocol;
mod refusal;
mod server;
pub mod status;
mod withdrawn;

pub use access::{Gate, check_role};
pub use caller::{caller, caller_within};
pub use counted::RefusedFor;
pub use limits::Tls;
pub use methods::{Admitted, Method, Needs, Requests};
pub use protocol::{Protocol, Protocols};
pub use refusal::{Answer, Refusal};
pub use server::{Served, TransportError, TransportSettings, serve};
/// The body of an answer, and the routes of a protocol, as the transport takes them.
pub use tonic::{body::Body, service::Routes};

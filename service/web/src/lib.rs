//! SPEAKS HTTP. The calls of the service as clients of OpenAI's API make them, health, metrics, and the page: requests become calls of the crate
//! `calls`, and the answers become JSON, files, or server-sent events.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod errors;
mod forms;
mod health;
mod images;
mod jobs;
mod mcp;
mod metrics;
mod models;
mod music;
mod openapi;
mod page;
mod ranges;
mod results;
mod routes;
mod sdapi;
mod videos;

pub use openapi::document;
pub use routes::{PROTOCOL, routes};

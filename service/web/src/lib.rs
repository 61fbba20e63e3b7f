//! SPEAKS HTTP. The calls of the service as clients of OpenAI's API make them, health, and metrics: requests become calls of the crate
//! `calls`, and the answers become JSON, files, or server-sent events.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

mod browsers;
mod errors;
mod forms;
mod health;
mod images;
mod jobs;
mod metrics;
mod models;
mod music;
mod openapi;
mod results;
mod routes;
mod videos;

pub use openapi::document;
pub use routes::{PROTOCOL, routes};

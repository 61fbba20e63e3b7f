//! FETCHES. Downloads models from a hub into the hub cache of this machine, and knows the models that have a short name. It knows
//! neither the service nor the command line, which both use it.
//!
//! The hub's URLs, its HTTP client with TLS, and the layout of the cache are hf-hub's. This crate adds the rest: which files
//! a pipeline is read from (`selection`), checksums and cancellation (`transfer`), the locks that other
//! programs take in the same cache (`cache`), and pulls that several share (`pulls`).

mod cache;
pub mod catalogue;
mod checksum;
mod disk;
mod error;
#[cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime
mod listing;
mod meter;
#[cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime
mod pull;
#[cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime
mod pulls;
mod reference;
mod selection;
#[cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime
mod transfer;

pub use error::{PullError, PullFailure};
pub use listing::{Login, id_of_folder};
pub use meter::Progress;
pub use pull::{
    Base, Hub, LONGEST_REF, PreparedPull, PullPlan, Pulled, is_of_folder, is_shard, is_whole,
    remove_from_cache, size_in_cache, transformer_files,
};
pub use pulls::{PullUpdate, Pulls};
pub use reference::Reference;

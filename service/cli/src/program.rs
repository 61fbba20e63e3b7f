//! The interface between the command line and the program that it is part of: the command line has the program run a service or a
//! worker, and list the models of this machine where no service answers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use config::{Config, LogSettings};
use futures::future::BoxFuture;
use gpu::CardDescription;
use model::Families;
use tokio::sync::oneshot;

use crate::doctor::Finding;

/// Why a service could not start, or failed while running, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ServiceProblem(pub String);

/// Receives the address of a service once it listens.
pub type Ready = oneshot::Sender<SocketAddr>;

/// The end of a service.
pub type Ended = BoxFuture<'static, Result<(), ServiceProblem>>;

/// A model of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalModel {
    pub id: String,
    /// Commit of a model in a hub cache; else empty.
    pub revision: String,
    /// Its folder or file.
    pub path: PathBuf,
}

/// The program that the command line is part of.
pub trait Program: Sync {
    /// Version, commit, features and profile of the build.
    fn version(&self) -> &'static str;

    /// The families of models that it runs.
    fn families(&self) -> Arc<dyn Families>;

    /// Starts the log.
    fn start_log(&self, log: &LogSettings);

    /// Waits until the log is written, or cannot be written.
    fn flush_log(&self);

    /// Runs a service until a signal or `stop` ends it. `ready` receives the address.
    fn serve(&self, config: Config, ready: Option<Ready>, stop: Option<oneshot::Receiver<()>>) -> Ended;

    /// Runs a worker, which takes its configuration from standard input.
    fn work(&self) -> !;

    /// The models in the folders and the hub cache of this configuration.
    fn models(&self, config: &Config) -> Vec<LocalModel>;

    /// Whether a name in a request, with a revision, formats and adapters, means one of them.
    fn has_model(&self, config: &Config, name: &str) -> bool;

    /// Whether a name in a request means one of these ids.
    fn is_among(&self, ids: &[String], name: &str) -> bool;

    /// Ids of the adapters in the folders of this configuration.
    fn adapters(&self, config: &Config) -> Vec<String>;

    /// The cards of this configuration, without those that do not answer.
    fn cards(&self, config: &Config) -> Vec<CardDescription>;

    /// Checks of the cards, the folders and the models of this configuration.
    fn examine(&self, config: Config) -> BoxFuture<'static, Vec<Finding>>;
}

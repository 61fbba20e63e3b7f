//! The program's implementation of the command line's interface.

use std::sync::Arc;

use calls::Models;
use cli::{Ended, Finding, LocalModel, Program, Ready, ServiceProblem};
use config::{Config, LogSettings};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use gpu::{CardDescription, DeviceChoice};
use model::Families;
use tokio::sync::oneshot;

use crate::{examine, process, serve, telemetry};

/// This program.
pub(crate) struct Moored;

/// The models of the folders of a configuration.
pub(crate) fn models_of(config: &Config) -> Models {
    let families = Arc::new(pipelines::families());
    Models::new(config.models.clone(), config.hub.cache.clone(), families)
}

/// The cards of a configuration, without those that do not answer.
pub(crate) fn cards_of(config: &Config) -> Vec<CardDescription> {
    let found = DeviceChoice::resolve(&config.cards.devices);
    let devices = found.map(|found| found.devices).unwrap_or_default().into_iter();
    devices.filter_map(|device| device.describe().ok()).collect()
}

impl Program for Moored {
    fn version(&self) -> &'static str {
        concat!(
            env!("CARGO_PKG_VERSION"),
            "\ncommit: ",
            env!("BUILD_OF_COMMIT"),
            "\nfeatures: ",
            env!("BUILD_OF_FEATURES"),
            "\nprofile: ",
            env!("BUILD_OF_PROFILE"),
        )
    }

    fn families(&self) -> Arc<dyn Families> {
        Arc::new(pipelines::families())
    }

    fn start_log(&self, log: &LogSettings) {
        telemetry::start(log);
    }

    fn flush_log(&self) {
        telemetry::flush();
    }

    fn serve(&self, config: Config, ready: Option<Ready>, stop: Option<oneshot::Receiver<()>>) -> Ended {
        if ready.is_none() {
            telemetry::log_start_time("start the service"); // others ask and download before they start one
        }
        let served = serve::run(config, ready, stop);
        served
            .map(|served| served.map_err(|problem| ServiceProblem(problem.to_string())))
            .boxed()
    }

    fn work(&self) -> ! {
        process::worker::run()
    }

    fn models(&self, config: &Config) -> Vec<LocalModel> {
        let models = models_of(config);
        let listed = models.list();
        let local = listed.iter().map(|model| LocalModel {
            id: model.id.clone(),
            revision: model.revision.clone(),
            path: model.path.clone(),
        });
        local.collect()
    }

    fn has_model(&self, config: &Config, name: &str) -> bool {
        models_of(config).has(name)
    }

    fn is_among(&self, ids: &[String], name: &str) -> bool {
        calls::models::is_among(&pipelines::families(), ids, name)
    }

    fn adapters(&self, config: &Config) -> Vec<String> {
        let adapters = models_of(config).adapters();
        adapters.iter().map(|adapter| adapter.id.clone()).collect()
    }

    fn cards(&self, config: &Config) -> Vec<CardDescription> {
        cards_of(config)
    }

    fn examine(&self, config: Config) -> BoxFuture<'static, Vec<Finding>> {
        examine::examine(config).boxed()
    }
}

//! A worker that opens no card, confines itself as others do, and tells what it was refused: for `moored doctor`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))] // it runs on the async runtime

use std::time::Duration;

use futures::StreamExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio_util::codec::FramedRead;

use super::confinement::Held;
use super::confinement::tries::Tried;
use super::frames::{self, Frames};
use super::supervisor::{Caches, spawn};
use super::{Configuration, FromWorker, WorkerSettings};

/// How long it may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Starts one, and what it told.
///
/// # Errors
/// When it does not start or does not answer, or cannot be confined as it must be. For people.
pub(crate) async fn run(settings: WorkerSettings, caches: &Caches) -> Result<(Held, Vec<Tried>), String> {
    let configuration = Configuration {
        generation: 1,
        settings,
        is_trial: true,
    };
    let told = ask(&configuration, caches);
    let told = tokio::time::timeout(LIMIT, told).await;
    told.map_err(|_| format!("a worker did not answer within {} s", LIMIT.as_secs()))?
}

async fn ask(configuration: &Configuration, caches: &Caches) -> Result<(Held, Vec<Tried>), String> {
    let mut worker = spawn(caches).map_err(|error| format!("a worker cannot be started: {error}"))?;
    let (Some(mut stdin), Some(stdout)) = (worker.stdin.take(), worker.stdout.take()) else {
        return Err("a worker has no pipes".to_owned());
    };
    let frame = frames::in_memory(configuration).map_err(|error| error.to_string())?;
    stdin.write_all(&frame).await.map_err(|error| error.to_string())?;
    let mut messages = FramedRead::new(stdout, Frames::<FromWorker>::new());
    let mut held = Held::default();
    while let Some(message) = messages.next().await {
        match message.map_err(|error| error.to_string())? {
            FromWorker::Confined(told) => held = told,
            FromWorker::Tried(tried) => return Ok((held, tried)),
            FromWorker::Refused(why) => return Err(why),
            FromWorker::Event(_) => {}
        }
    }
    Err("a worker ended before it answered: the log says why".to_owned())
}

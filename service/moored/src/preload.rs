//! Models that the configuration has loaded at the start: `models.preload` and `models.pinned`.

use std::sync::Arc;

use calls::{ModelRef, Models};
use config::ModelSettings;
use engine::Error;
use engine::job::{JobEventKind, JobOptions, JobSpec, JobWork, Priority};
use engine::library::{Entry, Library};
use engine::queue::Queue;
use gpu::CardDescription;

/// Client name of these jobs.
const CLIENT: &str = "moored (configuration)";

/// Loads the models, pinned ones first, one after the other. A model that cannot be loaded is logged and skipped:
/// the service is useful without it. `card` is the card for which a model is opened where any would do.
pub(crate) async fn run(
    settings: ModelSettings,
    models: Arc<Models>,
    library: Arc<Library>,
    queue: Queue,
    card: CardDescription,
) {
    let pinned = settings.pinned.iter().map(|name| ("models.pinned", name));
    let preloaded = settings.preload.iter().map(|name| ("models.preload", name));
    for (setting, name) in pinned.chain(preloaded) {
        let loaded = async {
            let entry = library
                .canonical(models.entry(ModelRef::named(name)).await?.entry, card.clone())
                .await?;
            if setting == "models.pinned" {
                queue.pin(entry.clone()).await?;
            }
            load(&queue, entry).await
        };
        match loaded.await {
            Ok(()) => tracing::info!(setting, model = name, "loaded"),
            Err(Error::ShuttingDown) => return,
            Err(error) => {
                tracing::warn!(setting, model = name, %error, "a model of the configuration is not loaded")
            }
        }
    }
}

async fn load(queue: &Queue, entry: Arc<Entry>) -> Result<(), Error> {
    let options = JobOptions {
        client: CLIENT.to_owned(),
        priority: Priority::Low, // requests of clients go first
        ..JobOptions::default()
    };
    let work = JobWork::Load {
        components: Vec::new(),
        replace: None,
        prove: false,
    };
    let mut job = queue.submit(JobSpec { options, entry, work }).await?;
    while let Some(event) = job.next().await {
        match event.kind {
            JobEventKind::Done(_) => return Ok(()),
            JobEventKind::Failed(error) => return Err(error),
            _ => {}
        }
    }
    Err(Error::ShuttingDown)
}

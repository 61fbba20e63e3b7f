//! Models that the configuration has loaded at the start: `models.preload` and `models.pinned`.

use std::sync::Arc;

use calls::{ModelRef, Models, load_for};
use config::ModelSettings;
use engine::Error;
use engine::library::Library;
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
            load_for(CLIENT, entry, &queue).await
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

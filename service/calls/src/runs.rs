//! The runs of jobs: the stages of a request.

use std::sync::Arc;

use engine::Error;
use engine::job::{Call, JobEventKind, JobOptions, JobSpec, JobWork, Priority, Run};
use engine::library::Entry;
use engine::queue::Queue;
use model::{ControlUse, InitImage, Request, Role};

use crate::models::Models;
use crate::references::AskedControl;

/// A run of all stages, without previews and without keeping a latent.
pub(crate) fn whole_run(call: Call, request: Request) -> Run {
    Run {
        call,
        request,
        count: 1,
        start: None,
        until: Role::Decode,
        keep_latent: false,
        preview_interval_ms: 0,
    }
}

/// Loads a model that the service itself wants in memory, and waits for it. `client` is the name in the list of jobs.
///
/// # Errors
/// When it cannot be opened or loaded, and [`Error::ShuttingDown`].
pub async fn load_for(client: &str, entry: Arc<Entry>, queue: &Queue) -> Result<(), Error> {
    let options = JobOptions {
        client: client.to_owned(),
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

/// The ControlNets of a request to an entry, with pictures of this size without their data.
pub(crate) fn controls_of(controls: &[AskedControl], entry: &Entry, size: (u32, u32)) -> Vec<ControlUse> {
    let used = |control: &AskedControl| ControlUse {
        name: Models::name_in(entry, &control.id),
        image: InitImage::of_size(size),
        scale: control.scale.unwrap_or(1.0),
        start: control.start.unwrap_or(0.0),
        end: control.end.unwrap_or(1.0),
        mode: control.mode,
    };
    controls.iter().map(used).collect()
}

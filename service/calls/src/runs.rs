//! The runs of jobs: the stages of a request.

use engine::job::{Call, Run};
use engine::library::Entry;
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

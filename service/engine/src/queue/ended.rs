//! Records of jobs that have ended.

use std::collections::VecDeque;
use std::time::Duration;

use residency::Bytes;
use tokio::time::Instant;

use super::listener::piece_bytes;
use super::record::{JobRecord, input_bytes};
use super::replay::Replay;
use super::report::JobInfo;
use crate::job::{JobEvent, JobId, JobWork};

/// How long the events of a job with an idempotency key are kept after its end.
const RETAINED_FOR: Duration = Duration::from_secs(60);
/// The most such jobs.
const RETAINED_JOBS: usize = 1_000;

/// Jobs that have ended.
#[derive(Default)]
pub(super) struct Ended {
    /// The latest first.
    infos: VecDeque<JobInfo>,
    /// The oldest first.
    retained: VecDeque<Retained>,
}

/// The events of an ended job, for clients that submit it again with the same idempotency key.
pub(super) struct Retained {
    pub(super) key: String,
    pub(super) id: JobId,
    pub(super) model_key: String,
    pub(super) work: JobWork,
    pub(super) events: Vec<JobEvent>,
    until: Instant,
}

impl Ended {
    pub(super) fn infos(&self) -> impl Iterator<Item = &JobInfo> {
        self.infos.iter()
    }

    pub(super) fn knows(&self, id: &str) -> bool {
        self.infos.iter().any(|info| &*info.id == id)
    }

    pub(super) fn by_key(&self, key: &str) -> Option<&Retained> {
        self.retained.iter().find(|retained| retained.key == key)
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.retained.retain(|retained| now < retained.until);
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.retained.front().map(|retained| retained.until)
    }

    pub(super) fn list(&mut self, info: JobInfo, at_most: usize) {
        self.infos.push_front(info);
        self.infos.truncate(at_most);
    }

    /// Keeps the events of a job for clients that submit it again with its idempotency key. Pieces and inputs together are bounded by
    /// `bound`: beyond it, the oldest jobs are dropped.
    pub(super) fn retain_events(&mut self, job: JobRecord, bound: Bytes, now: Instant) {
        if let Replay::Kept { events, .. } = job.replay {
            self.retain(
                Retained {
                    key: job.options.idempotency_key,
                    id: job.id,
                    model_key: job.entry.key.clone(),
                    work: job.work,
                    events,
                    until: now + RETAINED_FOR,
                },
                bound,
            );
        }
    }

    fn retain(&mut self, retained: Retained, bound: Bytes) {
        self.retained.push_back(retained);
        let mut bytes = self.retained.iter().map(Retained::bytes).sum::<Bytes>();
        while bytes > bound || self.retained.len() > RETAINED_JOBS {
            let Some(oldest) = self.retained.pop_front() else {
                return;
            };
            bytes -= oldest.bytes();
        }
    }
}

impl Retained {
    fn bytes(&self) -> Bytes {
        let pieces = self.events.iter().map(|event| piece_bytes(&event.kind));
        pieces.sum::<Bytes>() + input_bytes(&self.work)
    }
}

#[cfg(test)]
mod tests {
    use model::{Image, InitImage, Medium, Request, Role};

    use super::*;
    use crate::job::Run;

    fn retained(key: usize, rgb: Option<bytes::Bytes>) -> Retained {
        let image = Image {
            init_image: rgb.map(|rgb| InitImage {
                width: 16,
                height: 16,
                rgb,
            }),
            ..Image::of(16, 16)
        };
        let run = Run {
            call: crate::job::Call::EncodeImage,
            request: Request::of(Medium::Image(image), 1, 0.0, 0),
            count: 1,
            start: None,
            until: Role::Encode,
            keep_latent: true,
            preview_interval_ms: 0,
        };
        Retained {
            key: key.to_string(),
            id: "job".into(),
            model_key: "a".into(),
            work: JobWork::Run(run),
            events: Vec::new(),
            until: Instant::now() + RETAINED_FOR,
        }
    }

    fn oldest_of(count: usize, rgb: Option<bytes::Bytes>) -> (usize, String) {
        let mut ended = Ended::default();
        for key in 0..count {
            ended.retain(retained(key, rgb.clone()), Bytes::mib(256));
        }
        let oldest = ended.retained.front().map(|retained| retained.key.clone());
        (ended.retained.len(), oldest.unwrap_or_default())
    }

    #[tokio::test]
    async fn retained_jobs_are_bounded_in_number_and_bytes_and_the_oldest_are_dropped_first() {
        assert_eq!(oldest_of(1_002, None), (1_000, "2".to_owned()));
        let image: bytes::Bytes = vec![0; 48 << 20].into();
        assert_eq!(
            oldest_of(7, Some(image)),
            (5, "2".to_owned()),
            "an init image counts"
        );
    }
}

//! Records of jobs that have ended.

use std::collections::VecDeque;
use std::time::Duration;

use residency::Bytes;
use tokio::time::Instant;

use super::listener::piece_bytes;
use super::record::{JobRecord, input_bytes};
use super::replay::Replay;
use super::report::JobInfo;
use super::shared_store::{SharedStore, Stored, Taken};
use crate::job::{JobEvent, JobId, JobWork, Reach};

/// How long the events of a job with an idempotency key are kept after its end.
const RETAINED_FOR: Duration = Duration::from_secs(60);
/// The most such jobs.
const RETAINED_JOBS: u64 = 1_000;

/// Jobs that have ended.
pub(super) struct Ended {
    /// The latest first.
    infos: VecDeque<JobInfo>,
    /// By account and idempotency key: nobody takes another's keys.
    retained: SharedStore<Retained>,
}

/// The events of an ended job, for clients that submit it again with the same idempotency key.
pub(super) struct Retained {
    account: String,
    pub(super) id: JobId,
    pub(super) model_key: String,
    pub(super) work: JobWork,
    pub(super) events: Vec<JobEvent>,
    ended: Instant,
}

impl Ended {
    /// `bound`: of the kept events' pieces and the jobs' inputs together.
    pub(super) fn new(bound: Bytes) -> Ended {
        Ended {
            infos: VecDeque::new(),
            retained: SharedStore::new(bound.0, RETAINED_JOBS),
        }
    }

    pub(super) fn infos(&self) -> impl Iterator<Item = &JobInfo> {
        self.infos.iter()
    }

    pub(super) fn knows(&self, id: &str, reach: &Reach) -> bool {
        let mut infos = self.infos.iter();
        infos.any(|info| &*info.id == id && reach.has(&info.account))
    }

    pub(super) fn by_key(&self, account: &str, key: &str) -> Option<&Retained> {
        self.retained.get(&known_as(account, key))
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.retained.expire(RETAINED_FOR, now);
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.retained.next_expiry(RETAINED_FOR)
    }

    pub(super) fn list(&mut self, info: JobInfo, at_most: usize) {
        self.infos.push_front(info);
        self.infos.truncate(at_most);
    }

    /// Keeps the events of a job for clients that submit it again with its idempotency key.
    pub(super) fn retain_events(&mut self, job: JobRecord, now: Instant) {
        if let Replay::Kept { events, .. } = job.replay {
            let retained = Retained {
                account: job.options.account,
                id: job.id,
                model_key: job.entry.key.clone(),
                work: job.work,
                events,
                ended: now,
            };
            self.retain(job.options.idempotency_key, retained);
        }
    }

    /// Accounts share the bounds: the oldest of one that keeps many leave (see [`SharedStore`]).
    fn retain(&mut self, key: String, retained: Retained) {
        let more = Taken::one(retained.bytes());
        if self.retained.make_room(&retained.account, more) {
            self.retained.insert(known_as(&retained.account, &key), retained);
        }
    }
}

/// A key of an account. Neither has a line break.
fn known_as(account: &str, key: &str) -> String {
    format!("{account}\n{key}")
}

impl Stored for Retained {
    fn account(&self) -> &str {
        &self.account
    }

    fn bytes(&self) -> u64 {
        let pieces = self.events.iter().map(|event| piece_bytes(&event.kind));
        (pieces.sum::<Bytes>() + input_bytes(&self.work)).0
    }

    fn last_used(&self) -> Instant {
        self.ended
    }

    fn is_needed(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use model::{Image, InitImage, Medium, Request, Role};

    use super::*;
    use crate::job::Run;

    fn retained(account: &str, rgb: Option<bytes::Bytes>, age: u64) -> Retained {
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
            account: account.to_owned(),
            id: "job".into(),
            model_key: "a".into(),
            work: JobWork::Run(run),
            events: Vec::new(),
            ended: Instant::now() + Duration::from_millis(age),
        }
    }

    /// How many of so many jobs of one account are remembered, and the oldest of them.
    fn oldest_of(count: u64, rgb: Option<bytes::Bytes>) -> (usize, u64) {
        let mut ended = Ended::new(Bytes::mib(256));
        for key in 0..count {
            ended.retain(key.to_string(), retained("me", rgb.clone(), key));
        }
        let is_there = |key: &u64| ended.by_key("me", &key.to_string()).is_some();
        (ended.retained.len(), (0..count).find(is_there).unwrap_or(count))
    }

    #[tokio::test(start_paused = true)]
    async fn retained_jobs_are_bounded_in_number_and_bytes_and_the_oldest_are_dropped_first() {
        assert_eq!(oldest_of(1_002, None), (875, 127));
        let image: bytes::Bytes = vec![0; 48 << 20].into();
        assert_eq!(oldest_of(7, Some(image)), (4, 3), "an init image counts");
    }

    #[tokio::test(start_paused = true)]
    async fn keys_of_one_account_are_not_forgotten_for_the_jobs_of_another() {
        let image: bytes::Bytes = vec![0; 48 << 20].into();
        for rgb in [None, Some(image)] {
            let mut ended = Ended::new(Bytes::mib(256));
            ended.retain("mine".to_owned(), retained("me", rgb.clone(), 0));
            for key in 1..=2_000 {
                ended.retain(key.to_string(), retained("other", rgb.clone(), key));
            }
            assert!(ended.by_key("me", "mine").is_some());
            assert!(
                ended.by_key("other", "2000").is_some(),
                "its latest is remembered too"
            );
        }
    }
}
